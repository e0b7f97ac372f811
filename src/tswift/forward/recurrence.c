/* Gated delta nets and Mamba2 over the nodes of a pass, for all heads of a layer.

   A state is a matrix [keys][values] per head. A node takes its parent's, lets it decay, and adds its key times its value,
   or, where it corrects, times what its value is more than the state gives for that key; then it reads the state by its
   query. Columns know nothing of each
   other: a task is some columns of a head, and the committed state is read once, whatever the number of nodes. Every sum
   goes over the keys in their order, so a node's bits depend on its path alone. */

#include <stdint.h>
#include <string.h>

enum { COLUMNS = 64 };

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

typedef struct {
    const float *state;                      /* [heads][keys][values], after what is committed */
    float *after;                            /* the same after the last node; NULL where nobody asks */
    const float *queries, *keys;             /* [rows][heads / group][keys] */
    const float *contents;                   /* [rows][heads][values] */
    const float *decays, *rates;             /* [rows][heads] */
    const int64_t *rows;                     /* [nodes], each node's row */
    const int64_t *from, *to;                /* [nodes], which scratch state a node reads and writes; 0 is the committed */
    float *out;                              /* [nodes][heads][values] */
    float *scratch;                          /* [threads][states][keys][COLUMNS] */
    parallel_region *parallel;               /* tswift_parallel of pool.c */
    int64_t nodes, heads, group, key_size, value_size, states, threads;
    int64_t corrects;
    int64_t taken, workers;                  /* 0 */
} Call;

static void step(
    const float *before, float *after, const float *key, const float *query, const float *content, float decay, float rate,
    float *out, int64_t keys, int64_t corrects
) {
    float known[COLUMNS] = {0}, change[COLUMNS], read[COLUMNS] = {0};
    for (int64_t k = 0; k < (corrects ? keys : 0); k++)
        for (int c = 0; c < COLUMNS; c++) known[c] += before[k * COLUMNS + c] * decay * key[k];
    for (int c = 0; c < COLUMNS; c++) change[c] = (content[c] - known[c]) * rate;
    for (int64_t k = 0; k < keys; k++)
        for (int c = 0; c < COLUMNS; c++) {
            const float now = before[k * COLUMNS + c] * decay + key[k] * change[c];
            after[k * COLUMNS + c] = now;
            read[c] += now * query[k];
        }
    memcpy(out, read, sizeof read);
}

static void columns(const Call *w, int64_t head, int64_t first, float *states) {
    const int64_t keys = w->key_size, values = w->value_size, size = keys * COLUMNS;
    const int64_t width = values - first < COLUMNS ? values - first : COLUMNS;
    const int64_t key_heads = w->heads / w->group, place = head * keys * values + first;
    for (int64_t k = 0; k < keys; k++) {
        memcpy(states + k * COLUMNS, w->state + place + k * values, width * sizeof(float));
        memset(states + k * COLUMNS + width, 0, (COLUMNS - width) * sizeof(float));
    }
    for (int64_t node = 0; node < w->nodes; node++) {
        const int64_t row = w->rows[node], rank = row * w->heads + head;
        const int64_t own = (row * key_heads + head / w->group) * keys;
        float content[COLUMNS] = {0}, out[COLUMNS];
        memcpy(content, w->contents + rank * values + first, width * sizeof(float));
        step(
            states + w->from[node] * size, states + w->to[node] * size, w->keys + own, w->queries + own, content,
            w->decays[rank], w->rates[rank], out, keys, w->corrects
        );
        memcpy(w->out + (node * w->heads + head) * values + first, out, width * sizeof(float));
    }
    if (w->after)
        for (int64_t k = 0; k < keys; k++)
            memcpy(
                w->after + place + k * values, states + w->to[w->nodes - 1] * size + k * COLUMNS, width * sizeof(float)
            );
}

static void take_columns(void *given) {
    Call *w = given;
    const int64_t parts = (w->value_size + COLUMNS - 1) / COLUMNS;
    const int64_t worker = __atomic_fetch_add(&w->workers, 1, __ATOMIC_RELAXED);
    float *states = w->scratch + worker * w->states * w->key_size * COLUMNS;
    for (int64_t task; (task = __atomic_fetch_add(&w->taken, 1, __ATOMIC_RELAXED)) < w->heads * parts;)
        columns(w, task / parts, task % parts * COLUMNS, states);
}

void tswift_recur(Call *w) {
    if (w->threads > 1) w->parallel(take_columns, w, w->threads, 0);
    else take_columns(w);
}
