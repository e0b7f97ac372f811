/* Gated delta nets and Mamba2 over the nodes of a pass, for all heads of a layer.

   A state is a matrix [keys][values] per head. A node takes its parent's, lets it decay, and adds its key times its value,
   or, where it corrects, times what its value is more than the state gives for that key; then it reads the state by its
   query. Columns know nothing of each other: a task is some columns of a head, and the committed state is read once,
   whatever the number of nodes. Every sum goes over the keys in their order, so a node's bits depend on its path alone.
   program.c includes this file. */

#include "../../vectors.h"

enum { COLUMNS = 64 };

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

typedef struct {
    const float *state;                      /* [heads][keys][values], after what is committed */
    float *after;                            /* the same after the last node; NULL where nobody asks */
    const float *queries, *keys;             /* [rows][heads / group][keys], rows so far apart as is said below */
    const float *contents;                   /* [rows][heads][values], likewise */
    const float *decays, *rates;             /* [rows][heads] */
    const int64_t *rows;                     /* [nodes], each node's row; NULL where a node is a row */
    const int64_t *parents;                  /* [nodes], below 0 for what is committed */
    int64_t *places;                         /* [2][nodes], to work with: which state of scratch a node reads and writes */
    float *out;                              /* [nodes][heads][values] */
    float *scratch;                          /* [threads][states][keys][COLUMNS] */
    parallel_region *parallel;               /* tswift_parallel of pool.c */
    int64_t nodes, heads, group, key_size, value_size, states, threads;
    int64_t key_row, content_row;            /* numbers from a row to the next */
    int64_t corrects;
    int64_t taken, workers;                  /* 0 */
} Steps;

enum { PARTS = COLUMNS / LANES };

static void step(
    const float *before, float *after, const float *key, const float *query, const float *content, float decay, float rate,
    float *out, int64_t keys, int64_t corrects
) {
    vector known[PARTS] = {0}, change[PARTS], read[PARTS] = {0};
    for (int64_t k = 0; k < (corrects ? keys : 0); k++)
        for (int c = 0; c < PARTS; c++) known[c] += load(before + k * COLUMNS + c * LANES) * key[k];
    for (int c = 0; c < PARTS; c++) change[c] = (load(content + c * LANES) - known[c] * decay) * rate;
    for (int64_t k = 0; k < keys; k++)
        for (int c = 0; c < PARTS; c++) {
            const int64_t at = k * COLUMNS + c * LANES;
            const vector now = load(before + at) * decay + change[c] * key[k];
            store(after + at, now);
            read[c] += now * query[k];
        }
    memcpy(out, read, sizeof read);
}

static void columns(const Steps *w, int64_t head, int64_t first, float *states) {
    const int64_t keys = w->key_size, values = w->value_size, size = keys * COLUMNS;
    const int64_t width = values - first < COLUMNS ? values - first : COLUMNS;
    const int64_t place = head * keys * values + first;
    const int64_t *from = w->places, *to = from + w->nodes;
    for (int64_t k = 0; k < keys; k++) {
        memcpy(states + k * COLUMNS, w->state + place + k * values, width * sizeof(float));
        memset(states + k * COLUMNS + width, 0, (COLUMNS - width) * sizeof(float));
    }
    for (int64_t node = 0; node < w->nodes; node++) {
        const int64_t row = w->rows ? w->rows[node] : node, rank = row * w->heads + head;
        const int64_t own = row * w->key_row + head / w->group * keys;
        float content[COLUMNS] = {0}, out[COLUMNS];
        memcpy(content, w->contents + row * w->content_row + head * values + first, width * sizeof(float));
        step(
            states + from[node] * size, states + to[node] * size, w->keys + own, w->queries + own, content,
            w->decays[rank], w->rates[rank], out, keys, w->corrects
        );
        memcpy(w->out + (node * w->heads + head) * values + first, out, width * sizeof(float));
    }
    if (w->after)
        for (int64_t k = 0; k < keys; k++)
            memcpy(
                w->after + place + k * values, states + to[w->nodes - 1] * size + k * COLUMNS, width * sizeof(float)
            );
}

static void take_columns(void *given) {
    Steps *w = given;
    const int64_t parts = (w->value_size + COLUMNS - 1) / COLUMNS;
    const int64_t worker = __atomic_fetch_add(&w->workers, 1, __ATOMIC_RELAXED);
    float *states = w->scratch + worker * w->states * w->key_size * COLUMNS;
    for (int64_t task; (task = __atomic_fetch_add(&w->taken, 1, __ATOMIC_RELAXED)) < w->heads * parts;)
        columns(w, task / parts, task % parts * COLUMNS, states);
}

/* A node takes the place of its parent's state, if it is the last one to read that. */
static void place_states(Steps *w) {
    int64_t *from = w->places, *to = from + w->nodes, count = 1;
    for (int64_t node = 0; node < w->nodes; node++) {
        const int64_t parent = w->parents[node];
        int64_t other = node + 1;
        while (other < w->nodes && w->parents[other] != parent) other++;
        from[node] = parent < 0 ? 0 : to[parent];
        to[node] = other == w->nodes ? from[node] : count++;
    }
}

void tswift_recur(Steps *w) {
    place_states(w);
    if (w->threads > 1) w->parallel(take_columns, w, w->threads, 0);
    else take_columns(w);
}
