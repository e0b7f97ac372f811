/* A pass of a decoder over a few tokens, which has the parts that program.py reads.

   A row is one token. Whatever other rows are in the pass, a row has the same bits: every sum of a row is taken in an
   order that depends on nothing but the layer's sizes. Attention is that of native.c, whose rows are exact, too; the
   products of linear layers are those of products.c.

   products.py reads the structures from here. */

#include "products.c"
#include "recurrence.c"

enum { LONG = 16384 }; /* tokens of a text that is worth a region of its own for attention, whatever others there are */

/* As in native.c. */
typedef struct {
    const float *query;
    const void *keys, *values;
    const uint8_t *ancestors;
    const int64_t *depths;
    float *out, *scratch;
    parallel_region *parallel;
    const float *key_steps, *value_steps;
    int64_t keys_head, values_head, kv_heads, rows, prefix, nodes, threads, window;
    float scale, softcap;
} Attention;

/* What a recurrent layer has beside its products: a convolution of a row with those before it on its path, which has
   queries, keys and values of the recurrence one after the other, and for every head a state. */
typedef struct {
    const float *taps;              /* [count][channels], the oldest row's first */
    const float *decays, *shifts;   /* [heads], at which a state decays, and what is added to the time that passes */
    const float *norm;              /* [value_size], weights for what is read from a state */
    int64_t count, channels, heads, group, key_size, value_size; /* as in recurrence.c */
} Recurrent;

typedef struct {
    Linear queries, keys, values, extra; /* these one after the other, as they are one product, */
    Linear gate, up;              /* and these: what lets through, and what it does. The first may have the rows of all */
    Linear output, down;
    const float *pre_attention_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm; /* weights of norms: before and after attention and the MLP; or none */
    const float *query_norm, *key_norm;             /* of every head, or of all as one; or none */
    const Recurrent *recurrent;  /* of a recurrent layer, whose products are what is convolved, gates for what it puts out, how
                              much is new, and how much time passes; none of one with attention */
    int64_t place;         /* among the layers of its kind */
    int64_t gated;         /* whether a head's queries are followed by gates for what its attention puts out */
    int64_t joint;         /* whether they are of all heads as one */
    int64_t rotary;        /* which rotary embedding turns queries and keys; -1 for none */
    int64_t window;        /* as for attention */
    float scale, softcap;
} Layer;

typedef struct {
    const Layer *layers;
    const Linear *embeddings; /* a row for every token */
    const float *norm;        /* weights of the last one */
    const float *rates;       /* [rotaries, turned / 2] of the rotary embeddings */
    const float *rotary_scales; /* [rotaries] */
    void (*attend)(const Attention *);
    int64_t (*attention_scratch)(const Attention *);
    parallel_region *parallel; /* tswift_parallel of pool.c */
    int64_t count, kept;       /* layers, and those of them with keys and values */
    int64_t hidden, inner, heads, kv_heads, width, kind; /* of keys and values, as in native.c */
    int64_t most;              /* nodes that attention takes at a time */
    int64_t rotaries, turned;  /* so many first dimensions of a head are turned */
    int64_t widest;            /* window of a layer */
    int64_t gated;             /* whether a layer's attention is */
    int64_t gelu;              /* whether this lets through, by a tangent, and not the SiLU */
    float epsilon;
    float embedding_scale, residual_scale; /* of embeddings, and of what is added to a state */
} Model;

/* The nodes of a text, a tree or a chain: neighbouring rows of a pass, the first of which is told. */
typedef struct {
    char *keys, *values;               /* [layers, kv heads, capacity, numbers of a row], strides as below */
    const uint8_t *ancestors;          /* as for attention; none for a chain, which may have any number of nodes if it is
                                          alone in its pass */
    float *queries;                    /* [layers, heads, nodes, width], rotated */
    const float *rows, *matrices;       /* of each recurrent layer the rows before its convolution, and its state */
    float *rows_after, *matrices_after; /* the same after a chain, perhaps in their place; or none */
    int64_t first, nodes, prefix, by_layer, by_head;
} Text;

typedef struct {
    const int64_t *tokens, *positions; /* [nodes], of all texts */
    const Text *texts;                 /* so many as count says */
    float *hidden, *raw;               /* [nodes, hidden], after and before the last norm */
    float *states;                     /* [layers, nodes, hidden], after each layer; or none */
    float *space;                      /* as many numbers as tswift_space says */
    const float *steps;                /* [2, layers, kv heads, width], what 1 stands for in keys and values of int16 */
    float *mixed;                      /* [nodes, what is multiplied], products of recurrent layers, so far apart as: */
    int64_t by_recurrent;
    int64_t count, nodes, threads;
} Pass;

/* A number of an array of floats of a kind. */
INLINE float number(const void *from, int64_t at, int64_t kind) {
    const uint16_t *halves = from;
    if (kind == FLOAT32) return ((const float *)from)[at];
    if (kind == FLOAT16) return half_to_float(halves[at]);
    const uint32_t bits = (uint32_t)halves[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The embedding of a token. */
static void embed(const Linear *e, int64_t token, float *out) {
    const int64_t inputs = e->inputs, group = token / GROUP, own = token % GROUP;
    if (!e->bits) {
        const int64_t place = token % BLOCK, both = place % (2 * LANES);
        const int64_t pair = place - both + both % LANES * 2 + both / LANES;
        const int64_t first = e->block ? token * inputs : token / BLOCK * inputs * BLOCK + (e->kind == BFLOAT16 ? pair : place);
        for (int64_t i = 0; i < inputs; i++) out[i] = number(e->weight, first + i * (e->block ? 1 : BLOCK), e->kind);
        return;
    }
    const int64_t coded = e->block * GROUP * e->bits / 8, tail = GROUP * (e->kind == FLOAT32 ? 4 : 2);
    const int64_t size = coded + (e->centre ? 1 : 2) * tail;
    const char *at = (const char *)e->weight + group * (inputs / e->block) * size;
    for (int64_t first = 0; first < inputs; first += e->block, at += size) {
        const float scale = number(at + coded, own, e->kind);
        const float minimum = e->centre ? scale * -(float)e->centre : number(at + coded + tail, own, e->kind);
        for (int64_t i = 0; i < e->block; i++) {
            const int64_t four = i / 4, place = own * 4 + i % 4;
            const uint8_t *codes = (const uint8_t *)at + (e->bits == 8 ? four : four / 2) * LINE;
            const int code = e->bits == 8 ? codes[place] : codes[place] >> 4 * (four % 2) & 15;
            out[first + i] = scale * (float)code + minimum;
        }
    }
}

static float squares(const float *x, int64_t count) {
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        for (int lane = 0; lane < 32; lane++) sums[lane] += x[i + lane] * x[i + lane];
    for (; i < count; i++) sums[i % 32] += x[i] * x[i];
    for (int lane = 0; lane < 32; lane++) sum += sums[lane];
    return sum;
}

/* x over the root of its mean square, times weights. */
void tswift_norm(const float *x, const float *weight, float *out, int64_t count, float epsilon) {
    const float by = 1 / sqrtf(squares(x, count) / count + epsilon);
    for (int64_t i = 0; i < count; i++) out[i] = weight[i] * (x[i] * by);
}

INLINE float logistic(float x) { return 1 / (1 + power(-x)); }

/* x over 1 and e to the power of minus x: the SiLU; or of a polynomial of x: the GELU with a tangent in place of the error
   function. NaN stays NaN: what is broken has to show. The powers have a loop of their own, or GCC multiplies by the inverse
   of the largest one, which has so few bits that each time takes an Intel processor 150 cycles. */
INLINE void let_through(const float *x, float *out, int64_t count, const int gelu) {
    float powers[256];
    for (int64_t first = 0, some; first < count; first += some, x += some, out += some) {
        some = least(count - first, sizeof powers / sizeof *powers);
        for (int64_t i = 0; i < some; i++)
            powers[i] = power(gelu ? -1.595769122f * (x[i] + 0.044715f * (x[i] * x[i] * x[i])) : -x[i]);
        for (int64_t i = 0; i < some; i++) out[i] = x[i] / (1 + powers[i]);
    }
}

void tswift_silu(const float *x, float *out, int64_t count) { let_through(x, out, count, 0); }

static void gelu(const float *x, float *out, int64_t count) { let_through(x, out, count, 1); }

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
    }
}

/* Of a number of the cache. */
INLINE int64_t bytes(int64_t kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

/* Put a head's keys or values, whose count is a multiple of 16, into the cache, rounded to the nearest. */
INLINE void keep(void *cache, const float *from, const float *steps, int64_t count, int64_t kind) {
    if (kind == FLOAT32) memcpy(cache, from, count * sizeof *from);
    else if (kind == FLOAT16)
        for (int64_t i = 0; i < count; i += LANES) store_halves((uint16_t *)cache + i, load(from + i));
    else if (kind == INT16)
        for (int64_t i = 0; i < count; i += LANES) /* NaN becomes the least integer, as in caches.py */
            store_shorts((int16_t *)cache + i, rounded(load(from + i) / load(steps + i)));
    else if (kind == INT8) {
        float largest = 0, broken = 0;
        for (int64_t i = 0; i < count; i++) {
            largest = fabsf(from[i]) > largest ? fabsf(from[i]) : largest;
            broken += from[i] * 0; /* NaN if one is not finite */
        }
        const float step = largest / 127 + broken;
        for (int64_t i = 0; i < count; i += LANES)
            store_bytes((uint8_t *)cache + i, step > 0 ? rounded(load(from + i) / spread(step)) : (integers){0});
        memcpy((uint8_t *)cache + count, &step, sizeof step);
    }
    else
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, sizeof bits);
            ((uint16_t *)cache)[i] = from[i] == from[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
        }
}

/* How many ancestors a node has, but itself. */
static int64_t depth(const Text *t, int64_t node) {
    int64_t found = -1;
    for (int64_t other = 0; other < t->nodes; other++) found += t->ancestors[node * t->nodes + other];
    return found;
}

/* The last of a node's ancestors; below 0 for none. */
static int64_t parent(const Text *t, int64_t node) {
    int64_t found = node - 1;
    while (t->ancestors && found >= 0 && !t->ancestors[node * t->nodes + found]) found--;
    return found;
}

/* The text of a row. */
INLINE const Text *text_of(const Pass *p, int64_t row) {
    const Text *t = p->texts;
    while (row >= t->first + t->nodes) t++;
    return t;
}

/* A pass under way: where its rows are. */
typedef struct Run {
    const Model *model;
    const Pass *pass;
    const Layer *layer;
    int64_t index;          /* of the layer */
    float *normed, *wide, *inner, *turned, *cosines, *sines;
    float *attending;       /* room for attention, so much for every thread: */
    int64_t room;
    float *convolved, *decays, *rates, *states; /* of a recurrent layer */
    int64_t *depths, *parents, *places; /* of nodes among those of their text */
    void (*step)(const struct Run *, int64_t row);
    int64_t next, workers;  /* what is to be taken next, and threads that have begun */
} Run;

/* Attention of some neighbouring nodes and KV heads in a layer with a window, or with none. */
static Attention attention(
    const Model *m, const Text *t, int64_t first, int64_t nodes, int64_t kv_heads, int64_t window
) {
    return (Attention){
        .ancestors = t->ancestors, .parallel = m->parallel, .keys_head = t->by_head,
        .values_head = t->by_head, .kv_heads = kv_heads, .rows = m->heads / m->kv_heads * nodes,
        .prefix = t->prefix + first, .nodes = nodes, .threads = 1, .window = window,
    };
}

/* Whether all threads attend to a text together, as it is alone or long; of others each takes a KV head after the other. */
INLINE int by_all(const Pass *p, const Text *t) { return p->count == 1 || t->prefix >= LONG; }

INLINE int64_t aligned(int64_t count) { return (count + ALIGNED - 1) / ALIGNED * ALIGNED; }

/* Numbers of a row of a recurrent layer's products. */
INLINE int64_t mixed_row(const Recurrent *m) { return m->channels + m->heads * m->value_size + 2 * m->heads; }

/* A row of attention's products. */
INLINE int64_t attended_row(const Model *m, int64_t gated) { return ((1 + gated) * m->heads + 2 * m->kv_heads) * m->width; }

/* The largest sizes of recurrent layers; zeros where there are none. */
static Recurrent largest(const Model *m) {
    Recurrent found = {0};
    for (const Layer *l = m->layers; l < m->layers + m->count; l++)
        if (l->recurrent) found = *l->recurrent; /* they are alike */
    return found;
}

/* Queries of the nodes and heads that a thread attends to at a time; what attention puts out is as large. */
INLINE int64_t attended_size(const Model *m, const Text *t, int64_t kv_heads) {
    return aligned(kv_heads * (m->heads / m->kv_heads) * least(t->nodes, m->most) * m->width);
}

/* The same with scratch: numbers of room that it takes. */
static int64_t attention_room(const Model *m, const Text *t, int64_t kv_heads) {
    int64_t scratch = 0;
    for (int64_t first = 0; first < t->nodes; first += m->most)
        for (int windowed = 0; windowed <= (m->widest > 0); windowed++) {
            const Attention a = attention(m, t, first, least(t->nodes - first, m->most), kv_heads, windowed * m->widest);
            scratch = most(scratch, m->attention_scratch(&a));
        }
    return 2 * attended_size(m, t, kv_heads) + aligned(scratch);
}

/* Lay out the working space; returns how many numbers it takes. Attention reads whole vectors of its part, which must
   not cross a line of the cache. */
static int64_t lay_out(Run *run) {
    const Model *m = run->model;
    const Pass *p = run->pass;
    const Recurrent recurrent = largest(m);
    const int64_t n = p->nodes, heads = m->heads * m->width, read = recurrent.heads * recurrent.value_size;
    const int64_t integers = sizeof(int64_t) / sizeof(float);
    int64_t at = 0, states = 1;
    for (const Text *t = p->texts; t < p->texts + p->count; t++) {
        if (t->ancestors) states = most(states, t->nodes);
        run->room = most(run->room, attention_room(m, t, by_all(p, t) ? m->kv_heads : 1));
    }
    struct { float **part; int64_t size; } parts[] = {
        {&run->normed, n * m->hidden},
        {&run->wide, n * most(attended_row(m, m->gated), 2 * m->inner)},
        {&run->inner, n * m->inner},
        {&run->turned, n * most(heads, read)},
        {&run->convolved, n * recurrent.channels},
        {&run->decays, n * recurrent.heads},
        {&run->rates, n * recurrent.heads},
        {&run->states, recurrent.heads ? p->threads * states * recurrent.key_size * COLUMNS : 0},
        {&run->cosines, m->rotaries * n * m->turned / 2},
        {&run->sines, m->rotaries * n * m->turned / 2},
        {(float **)&run->depths, n * integers},
        {(float **)&run->parents, recurrent.heads ? n * integers : 0},
        {(float **)&run->places, recurrent.heads ? 2 * n * integers : 0},
        {&run->attending, (p->count == 1 ? 1 : p->threads) * run->room},
    };
    const int64_t start = p->space ? aligned((uintptr_t)p->space / sizeof(float)) - (uintptr_t)p->space / sizeof(float) : 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].part = p->space ? p->space + start + at : 0;
        at += aligned(parts[i].size);
    }
    return at + ALIGNED;
}

/* Numbers of working space of a pass, whose own has none yet. */
int64_t tswift_space(const Model *m, const Pass *p) {
    Run run = {.model = m, .pass = p};
    return lay_out(&run);
}

static void take_rows(void *given) {
    Run *run = given;
    for (int64_t row; (row = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED)) < run->pass->nodes;)
        run->step(run, row);
}

/* Do something for every row, of so many numbers. */
static void each_row(Run *run, void (*step)(const Run *, int64_t), int64_t size) {
    run->step = step, run->next = 0;
    if ((run->pass->nodes >= MANY || run->pass->nodes * size >= MUCH) && run->pass->threads > 1)
        run->model->parallel(take_rows, run, run->pass->threads, 0);
    else take_rows(run);
}

static void multiply_rows(const Run *run, const Linear *layers, int64_t count, const float *input, float *output) {
    multiply_all(layers, count, input, output, run->pass->nodes, run->model->parallel, run->pass->threads);
}

static void begin_row(const Run *run, int64_t row) {
    const Model *m = run->model;
    const int64_t half = m->turned / 2;
    float *state = run->pass->raw + row * m->hidden;
    embed(m->embeddings, run->pass->tokens[row], state);
    for (int64_t i = 0; i < m->hidden; i++) state[i] *= m->embedding_scale;
    for (int64_t rotary = 0; rotary < m->rotaries; rotary++)
        for (int64_t i = 0, at = (rotary * run->pass->nodes + row) * half; i < half; i++, at++) {
            const float angle = (float)run->pass->positions[row] * m->rates[rotary * half + i];
            run->cosines[at] = cosf(angle) * m->rotary_scales[rotary];
            run->sines[at] = sinf(angle) * m->rotary_scales[rotary];
        }
}

/* A row of the states, normed by weights if there are any, for the next product. */
INLINE void give(const Run *run, const float *weights, int64_t row) {
    const Model *m = run->model;
    const float *state = run->pass->raw + row * m->hidden;
    float *to = run->normed + row * m->hidden;
    if (weights) tswift_norm(state, weights, to, m->hidden, m->epsilon);
    else memcpy(to, state, m->hidden * sizeof *to);
}

static void norm_row(const Run *run, int64_t row) { give(run, run->layer->pre_attention_norm, row); }

/* Norm and turn queries and keys, and put keys and values into the cache. */
static void split_row(const Run *run, int64_t row) {
    const Model *m = run->model;
    const Pass *p = run->pass;
    const Text *t = text_of(p, row);
    const Layer *l = run->layer;
    const int64_t width = m->width, half = m->turned / 2, node = row - t->first, size = bytes(m->kind);
    const int64_t kept = width + (m->kind == INT8 ? 4 : 0); /* numbers of a row of the cache; of 8 bits, with its step */
    const int64_t turned = (most(l->rotary, 0) * p->nodes + row) * half;
    const float *cosines = run->cosines + turned, *sines = run->sines + turned;
    float *from = run->wide + row * attended_row(m, l->gated), *keys = from + (1 + l->gated) * m->heads * width;
    if (l->joint && l->query_norm) tswift_norm(from, l->query_norm, from, m->heads * width, m->epsilon);
    if (l->joint && l->key_norm) tswift_norm(keys, l->key_norm, keys, m->kv_heads * width, m->epsilon);
    for (int64_t h = 0; h < m->heads; h++, from += (1 + l->gated) * width) {
        if (!l->joint && l->query_norm) tswift_norm(from, l->query_norm, from, width, m->epsilon);
        if (l->rotary >= 0) rotate(from, cosines, sines, half);
        memcpy(t->queries + ((l->place * m->heads + h) * t->nodes + node) * width, from, width * sizeof *from);
    }
    for (int64_t h = 0; h < 2 * m->kv_heads; h++, from += width) {
        const int64_t value = h >= m->kv_heads, head = h % m->kv_heads;
        const int64_t at = l->place * t->by_layer + head * t->by_head + (t->prefix + node) * kept;
        const float *steps = p->steps + ((value * m->kept + l->place) * m->kv_heads + head) * width;
        if (!value && !l->joint && l->key_norm) tswift_norm(from, l->key_norm, from, width, m->epsilon);
        if (!value && l->rotary >= 0) rotate(from, cosines, sines, half);
        keep((value ? t->values : t->keys) + at * size, from, steps, width, m->kind);
    }
}

/* Attention of a text by some KV heads. What it puts out is by head; the next product wants it by row. A long chain is
   attended to in parts, so that its rows have the bits that they have in passes of so many nodes. */
static void attend_heads(const Run *run, const Text *t, int64_t head, int64_t kv_heads, int64_t threads, float *room) {
    const Model *m = run->model;
    const Layer *l = run->layer;
    const int64_t group = m->heads / m->kv_heads, heads = group * kv_heads, before = group * head;
    const int64_t width = m->width, n = t->nodes, size = bytes(m->kind);
    const int64_t at = (l->place * t->by_layer + head * t->by_head) * size;
    const float *queries = t->queries + (l->place * m->heads + before) * n * width;
    float *seen = room + attended_size(m, t, kv_heads);
    for (int64_t first = 0, some; first < n; first += some) {
        some = least(n - first, m->most);
        Attention a = attention(m, t, first, some, kv_heads, l->window);
        a.scale = l->scale, a.softcap = l->softcap, a.threads = threads;
        a.query = queries, a.out = seen, a.scratch = seen + attended_size(m, t, kv_heads);
        a.depths = t->ancestors ? run->depths + t->first : 0;
        a.key_steps = run->pass->steps + (l->place * m->kv_heads + head) * width;
        a.value_steps = a.key_steps + m->kept * m->kv_heads * width;
        a.keys = t->keys + at, a.values = t->values + at;
        for (int64_t h = 0; some < n && h < heads; h++) {
            a.query = room;
            memcpy(room + h * some * width, queries + (h * n + first) * width, some * width * sizeof(float));
        }
        m->attend(&a);
        for (int64_t row = t->first + first, last = row + some; row < last; row++)
            for (int64_t h = 0; h < heads; h++) {
                float *to = run->turned + (row * m->heads + before + h) * width;
                const float *gate = run->wide + row * attended_row(m, 1) + (2 * (before + h) + 1) * width;
                memcpy(to, seen + (h * some + row - last + some) * width, width * sizeof *to);
                for (int64_t i = 0; l->gated && i < width; i++) to[i] *= logistic(gate[i]);
            }
    }
}

static void take_heads(void *given) {
    Run *run = given;
    const Pass *p = run->pass;
    const int64_t kv_heads = run->model->kv_heads;
    float *room = run->attending + __atomic_fetch_add(&run->workers, 1, __ATOMIC_RELAXED) * run->room;
    for (int64_t task; (task = __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED)) < p->count * kv_heads;) {
        const Text *t = p->texts + task / kv_heads;
        if (!by_all(p, t)) attend_heads(run, t, task % kv_heads, 1, 1, room);
    }
}

static void attend(Run *run) {
    const Pass *p = run->pass;
    for (const Text *t = p->texts; t < p->texts + p->count; t++)
        if (by_all(p, t)) attend_heads(run, t, 0, run->model->kv_heads, p->threads, run->attending);
    run->next = run->workers = 0;
    if (p->count > 1) run->model->parallel(take_heads, run, p->threads, 0);
}

/* A row of products of a recurrent layer. */
INLINE float *mixed(const Run *run, int64_t row) {
    return run->pass->mixed + run->layer->place * run->pass->by_recurrent + row * mixed_row(run->layer->recurrent);
}

/* Rows before a layer's convolution, after what is committed. */
INLINE int64_t kept_rows(const Run *run) {
    return run->layer->place * (run->layer->recurrent->count - 1) * run->layer->recurrent->channels;
}

/* The gates of a recurrence, and what is convolved: each queries and keys over their length. */
static void convolve_row(const Run *run, int64_t row) {
    const Recurrent *m = run->layer->recurrent;
    const Text *t = text_of(run->pass, row);
    const float *own = mixed(run, row), *fresh = own + m->channels + m->heads * m->value_size;
    const float *kept = t->rows + kept_rows(run);
    float *out = run->convolved + row * m->channels;
    int64_t node = run->parents[row], behind = m->count - 2;
    for (int64_t i = 0; i < m->channels; i++) out[i] = own[i] * m->taps[(m->count - 1) * m->channels + i];
    for (int64_t tap = m->count - 2; tap >= 0; tap--) {
        const float *from = node < 0 ? kept + behind-- * m->channels : mixed(run, t->first + node);
        const float *by = m->taps + tap * m->channels;
        for (int64_t i = 0; i < m->channels; i++) out[i] += from[i] * by[i];
        if (node >= 0) node = run->parents[t->first + node];
    }
    tswift_silu(out, out, m->channels);
    const int64_t heads = m->heads / m->group, size = m->key_size;
    for (int64_t h = 0; h < 2 * heads; h++) {
        const float by = 1 / sqrtf((squares(out + h * size, size) + 1e-6f) * (h < heads ? size : 1));
        for (int64_t i = 0; i < size; i++) out[h * size + i] *= by;
    }
    for (int64_t h = 0; h < m->heads; h++) {
        const float time = fresh[m->heads + h] + m->shifts[h];
        run->decays[row * m->heads + h] = power(m->decays[h] * (time > 20 ? time : log1pf(power(time))));
        run->rates[row * m->heads + h] = logistic(fresh[h]);
    }
}

/* Norm what a row reads from the states, and let it through. */
static void read_row(const Run *run, int64_t row) {
    const Recurrent *m = run->layer->recurrent;
    const int64_t size = m->value_size;
    float *read = run->turned + row * m->heads * size, *gate = mixed(run, row) + m->channels;
    for (int64_t h = 0; h < m->heads; h++, read += size, gate += size) {
        tswift_norm(read, m->norm, read, size, run->model->epsilon);
        for (int64_t i = 0; i < size; i++) read[i] *= gate[i] * logistic(gate[i]);
    }
}

/* The newest rows before a convolution, after a chain. */
static void keep_rows(const Run *run, const Text *t) {
    const Recurrent *m = run->layer->recurrent;
    const float *kept = t->rows + kept_rows(run);
    float *to = t->rows_after + kept_rows(run);
    for (int64_t row = 0, at = t->nodes; row < m->count - 1; row++, at++) {
        const float *from = at < m->count - 1 ? kept + at * m->channels : mixed(run, t->first + at - (m->count - 1));
        memmove(to + row * m->channels, from, m->channels * sizeof *to);
    }
}

/* A text's states, stepped by what is convolved. */
static void step_states(const Run *run, const Text *t) {
    const Recurrent *m = run->layer->recurrent;
    const int64_t at = run->layer->place * m->heads * m->key_size * m->value_size, own = t->first * m->heads;
    const float *queries = run->convolved + t->first * m->channels, *keys = queries + m->heads / m->group * m->key_size;
    Steps steps = {
        .state = t->matrices + at, .after = t->matrices_after ? t->matrices_after + at : 0,
        .queries = queries, .keys = keys, .contents = keys + m->heads / m->group * m->key_size,
        .decays = run->decays + own, .rates = run->rates + own, .parents = run->parents + t->first, .places = run->places,
        .out = run->turned + own * m->value_size, .scratch = run->states, .parallel = run->model->parallel,
        .nodes = t->nodes, .heads = m->heads, .group = m->group, .key_size = m->key_size, .value_size = m->value_size,
        .states = t->ancestors ? t->nodes : 1, .threads = run->pass->threads, .key_row = m->channels,
        .content_row = m->channels, .corrects = 1,
    };
    tswift_recur(&steps);
    if (t->rows_after) keep_rows(run, t);
}

/* A recurrent layer, whose products are known. */
static void remember(Run *run) {
    const Recurrent *m = run->layer->recurrent;
    const Pass *p = run->pass;
    each_row(run, convolve_row, m->channels);
    for (const Text *t = p->texts; t < p->texts + p->count; t++) step_states(run, t);
    each_row(run, read_row, m->heads * m->value_size);
}

static Run begin(const Model *m, const Pass *p) {
    Run run = {.model = m, .pass = p};
    lay_out(&run);
    for (const Text *t = p->texts; t < p->texts + p->count; t++)
        for (int64_t node = 0; node < t->nodes; node++) {
            if (t->ancestors) run.depths[t->first + node] = depth(t, node);
            if (p->mixed) run.parents[t->first + node] = parent(t, node);
        }
    return run;
}

/* Go on by nodes whose products are known, a chain, in all recurrent layers. */
void tswift_go_on(const Model *m, const Pass *p) {
    Run run = begin(m, p);
    for (run.layer = m->layers; run.layer < m->layers + m->count; run.layer++)
        if (run.layer->recurrent) remember(&run);
}

/* Add what attention or the MLP puts out, normed by weights if there are any, to a row of the states. */
INLINE void add(const Run *run, const float *weights, int64_t row) {
    const Model *m = run->model;
    float *state = run->pass->raw + row * m->hidden, *put = run->normed + row * m->hidden;
    if (weights) tswift_norm(put, weights, put, m->hidden, m->epsilon);
    for (int64_t i = 0; i < m->hidden; i++) state[i] += m->residual_scale * put[i];
}

static void between_row(const Run *run, int64_t row) {
    add(run, run->layer->post_attention_norm, row);
    give(run, run->layer->pre_mlp_norm, row);
}

static void add_row(const Run *run, int64_t row) { add(run, run->layer->post_mlp_norm, row); }

static void gate_row(const Run *run, int64_t row) {
    const int64_t inner = run->model->inner;
    float *gate = run->wide + row * 2 * inner, *up = gate + inner, *out = run->inner + row * inner;
    if (run->model->gelu) gelu(gate, gate, inner);
    else tswift_silu(gate, gate, inner);
    for (int64_t i = 0; i < inner; i++) out[i] = gate[i] * up[i];
}

static void last_row(const Run *run, int64_t row) {
    const Model *m = run->model;
    const int64_t at = row * m->hidden;
    tswift_norm(run->pass->raw + at, m->norm, run->pass->hidden + at, m->hidden, m->epsilon);
}

void tswift_forward(const Model *m, const Pass *p) {
    Run run = begin(m, p);
    each_row(&run, begin_row, m->hidden);
    for (; run.index < m->count; run.index++) {
        const Layer *layer = run.layer = m->layers + run.index;
        each_row(&run, norm_row, m->hidden);
        multiply_rows(&run, &layer->queries, layer->recurrent ? 4 : 3, run.normed, layer->recurrent ? mixed(&run, 0) : run.wide);
        if (layer->recurrent) remember(&run);
        else {
            each_row(&run, split_row, m->hidden);
            attend(&run);
        }
        multiply_rows(&run, &layer->output, 1, run.turned, run.normed);
        each_row(&run, between_row, m->hidden);
        multiply_rows(&run, &layer->gate, 2, run.normed, run.wide);
        each_row(&run, gate_row, m->inner);
        multiply_rows(&run, &layer->down, 1, run.inner, run.normed);
        each_row(&run, add_row, m->hidden);
        const int64_t size = p->nodes * m->hidden;
        if (p->states) memcpy(p->states + run.index * size, p->raw, size * sizeof(float));
    }
    each_row(&run, last_row, m->hidden);
}

/* One of a chain of heads: rows of states, refined, and what goes to the LM head; see heads.py. */
typedef struct {
    Linear mix, linear;                        /* without a mix, the head is not told the token before */
    const float *input_norm, *embedding_norm, *after;
    int64_t hidden;
    float epsilon;
} Head;

/* The space is of 4 * hidden numbers for every row. */
void tswift_head(
    const Head *h, const float *states, const float *embeddings, float *refined, float *out, float *space, int64_t rows,
    parallel_region *parallel, int64_t threads
) {
    const int64_t hidden = h->hidden, told = h->mix.weight != 0, width = (1 + told) * hidden;
    float *input = space, *mixed = told ? space + rows * width : space;
    for (int64_t r = 0; r < rows; r++) {
        tswift_norm(states + r * hidden, h->input_norm, input + r * width, hidden, h->epsilon);
        if (told)
            tswift_norm(
                embeddings + r * hidden, h->embedding_norm, input + r * width + hidden, hidden, h->epsilon);
    }
    if (told) {
        tswift_multiply(&h->mix, input, mixed, rows, parallel, threads);
        tswift_silu(mixed, mixed, rows * width);
    }
    tswift_multiply(&h->linear, mixed, refined, rows, parallel, threads);
    for (int64_t i = 0; i < rows * hidden; i++) refined[i] += states[i];
    for (int64_t r = 0; r < rows; r++)
        tswift_norm(refined + r * hidden, h->after, out + r * hidden, hidden, h->epsilon);
}

/* The beginning of what sampler.c is called with. */
typedef struct {
    const float *logits;
    const int64_t *positions;
    int64_t *best;
    double *scores;
} Ranking;

/* Levels of heads, each told the best token of the level before. */
typedef struct {
    const Head *heads;
    const Linear *lm_head;
    const Linear *embeddings;        /* as of the model */
    const float *state;              /* [hidden] where the heads start */
    const float *first;              /* [hidden] whose logits come before those of the heads, or none */
    Ranking *ranking;                /* of the first level; those of the others lie behind */
    void (*rank)(Ranking *);
    parallel_region *parallel;
    float *space;                    /* 8 * hidden, and the logits */
    int64_t levels, count, root, hidden, threads;
} Guess;

void tswift_guess(const Guess *g) {
    const float *state = g->state;
    float *out = g->space, *refined = out + g->hidden, *space = refined + 2 * g->hidden;
    float *token = space + 4 * g->hidden, *logits = token + g->hidden;
    int64_t root = g->root, head = 0;
    for (int64_t level = 0; level < g->levels; level++) {
        const float *given = g->first;
        if (level || !given) {
            float *next = refined + head % 2 * g->hidden;
            embed(g->embeddings, root, token);
            tswift_head(g->heads + head++, state, token, next, out, space, 1, g->parallel, g->threads);
            state = next, given = out;
        }
        tswift_multiply(g->lm_head, given, logits, 1, g->parallel, g->threads);
        g->ranking->logits = logits;
        g->rank(g->ranking);
        root = *g->ranking->best;
        g->ranking->best += g->count, g->ranking->scores += g->count;
        if (g->ranking->positions) g->ranking->positions++;
    }
}
