/* A pass of a Llama-like decoder over a few tokens, and linear layers, in float32 on x86 processors with AVX2 and FMA.

   A row is one token. Whatever other rows are in the pass, a row has the same bits: every sum of a row is taken in an
   order that depends on nothing but the layer's sizes. Attention is that of native.c, whose rows are exact, too.

   Weights lie in blocks of BLOCK outputs, all inputs of a block together: [blocks, inputs, BLOCK]. What a matrix
   holds in bfloat16 without loss is kept so, for half the bytes, and widened in registers: the products are the same.
   There, the weights of two neighbouring vectors take turns, so that one load and two operators widen both.

   program.py has the same structures. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
typedef __m512 vector;
enum { LANES = 16, ROWS = 12 }; /* most rows that are multiplied together: so many sums stay in registers */
INLINE vector zero(void) { return _mm512_setzero_ps(); }
INLINE vector spread(float x) { return _mm512_set1_ps(x); }
INLINE vector plus(vector sum, vector x, vector y) { return _mm512_fmadd_ps(x, y, sum); }
INLINE void store(float *to, vector x) { _mm512_storeu_ps(to, x); }
INLINE vector load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void load_pair(const uint16_t *from, vector pair[2]) {
    const __m512i both = _mm512_loadu_si512(from);
    pair[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    pair[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
}
#else
typedef __m256 vector;
enum { LANES = 8, ROWS = 6 };
INLINE vector zero(void) { return _mm256_setzero_ps(); }
INLINE vector spread(float x) { return _mm256_set1_ps(x); }
INLINE vector plus(vector sum, vector x, vector y) { return _mm256_fmadd_ps(x, y, sum); }
INLINE void store(float *to, vector x) { _mm256_storeu_ps(to, x); }
INLINE vector load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void load_pair(const uint16_t *from, vector pair[2]) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)from);
    pair[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    pair[1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
}
#endif

enum {
    VECTORS = 2,
    BLOCK = LANES * VECTORS, /* outputs of a block */
    MOST = 4,                /* blocks that are multiplied together, for few rows: so many sums are under way */
    LINE = 64,               /* bytes of a line of the cache */
    AHEAD = 4096,            /* bytes before they are multiplied, weights are fetched */
    ALIGNED = 16,            /* numbers of a line of the cache */
    LARGE = 1 << 18,         /* products of a layer that are worth a second thread */
    PORTION = 1 << 16        /* products that a thread takes at a time, at least */
};

enum { FLOAT32, BFLOAT16, FLOAT16, INT16 }; /* kinds of keys and values, as in native.c */

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

typedef struct {
    const void *weight; /* [blocks, inputs, BLOCK], float32, or bfloat16 if half; zeros beyond the last output */
    const float *bias;  /* [outputs], or none */
    int64_t inputs, outputs, half;
} Linear;

/* As in native.c. */
typedef struct {
    const float *query;
    const void *keys, *values;
    const uint8_t *ancestors;
    const int64_t *depths;
    float *out, *scratch;
    parallel_region *parallel;
    const float *key_steps, *value_steps;
    int64_t keys_head, values_head, kv_heads, rows, prefix, nodes, threads;
    float scale;
} Attention;

typedef struct {
    Linear joined; /* queries, keys and values */
    Linear output, gates /* and what they let through */, down;
    const float *before, *after;            /* weights of the norms */
    const float *query_norm, *key_norm;     /* of every head, or none */
} Layer;

typedef struct {
    const Layer *layers;
    const float *embeddings; /* [vocabulary, hidden] */
    const float *norm;       /* weights of the last one */
    const float *rates;      /* [width / 2] of the rotary embedding */
    void (*attend)(const Attention *);
    int64_t (*attention_scratch)(const Attention *);
    parallel_region *parallel; /* tswift_parallel of pool.c */
    int64_t count, hidden, inner, heads, kv_heads, width, kind; /* of keys and values, as in native.c */
    float epsilon, rotary_scale, scale;
} Model;

typedef struct {
    const int64_t *tokens, *positions; /* [nodes] */
    char *keys, *values;               /* [layers, kv heads, capacity, width] with the strides below, in numbers */
    const uint8_t *ancestors;          /* as for attention */
    float *hidden, *raw;               /* [nodes, hidden], after and before the last norm */
    float *queries;                    /* [layers, heads, nodes, width], rotated */
    float *states;                     /* [layers, nodes, hidden], after each layer; or none */
    float *space;                      /* as many numbers as tswift_space says */
    const float *steps;                /* [2, layers, kv heads, width], what 1 stands for in keys and values of int16 */
    int64_t nodes, prefix, by_layer, by_head, threads;
} Pass;

/* A product of rows and a matrix, of which threads take portions. */
typedef struct {
    const Linear *linear;
    const float *input;
    float *output;
    int64_t rows, blocks, portion;
    int64_t next;
} Product;

INLINE const char *weights(const Linear *l, int64_t block) {
    return (const char *)l->weight + block * l->inputs * BLOCK * (l->half ? 2 : 4);
}

/* So many rows and neighbouring blocks, every sum from the first input to the last. */
INLINE void multiply(
    const Linear *l, const float *input, float *output, int64_t block, const int blocks, const int rows, const int half
) {
    const int size = half ? 2 : 4;
    const char *at = weights(l, block);
    const int64_t inputs = l->inputs, apart = inputs * BLOCK * size;
    vector sum[ROWS][MOST * VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < blocks * VECTORS; v++) sum[r][v] = zero();
    for (int64_t i = 0; i < inputs; i++) {
        vector weight[MOST * VECTORS];
        for (int b = 0; b < blocks; b++) {
            const char *pair = at + b * apart + i * BLOCK * size;
            vector *to = weight + b * VECTORS;
            for (int line = 0; line < BLOCK * size; line += LINE) _mm_prefetch(pair + AHEAD + line, _MM_HINT_T0);
            if (half) load_pair((const uint16_t *)pair, to);
            else to[0] = load((const float *)pair), to[1] = load((const float *)pair + LANES);
        }
        for (int r = 0; r < rows; r++) {
            const vector x = spread(input[r * inputs + i]);
            for (int v = 0; v < blocks * VECTORS; v++) sum[r][v] = plus(sum[r][v], weight[v], x);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) {
            float found[BLOCK], *to = output + r * l->outputs + (block + b) * BLOCK;
            const int64_t left = l->outputs - (block + b) * BLOCK, count = left < BLOCK ? left : BLOCK;
            for (int v = 0; v < VECTORS; v++) store(found + v * LANES, sum[r][b * VECTORS + v]);
            if (l->bias)
                for (int64_t o = 0; o < count; o++) found[o] += l->bias[(block + b) * BLOCK + o];
            memcpy(to, found, count * sizeof *to);
        }
}

/* How many blocks are multiplied together, for so many sums that they need not wait for each other. */
INLINE int together(int64_t rows) { return rows == 1 ? MOST : rows <= ROWS / 2 ? 2 : 1; }

#define CASE(n, half) \
    case n: \
        if (wide && together(n) > 1) multiply(l, input, output, block, together(n), n, half); \
        else multiply(l, input, output, block, 1, n, half); \
        break;
#ifdef __AVX512F__
#define MORE(half) CASE(7, half) CASE(8, half) CASE(9, half) CASE(10, half) CASE(11, half) CASE(12, half)
#else
#define MORE(half)
#endif
#define CASES(half) \
    switch (rows) { \
        CASE(1, half) CASE(2, half) CASE(3, half) CASE(4, half) CASE(5, half) CASE(6, half) MORE(half) \
    }

static void few_rows(const Linear *l, const float *input, float *output, int64_t block, int64_t rows, int wide) {
    if (l->half) CASES(1) else CASES(0)
}

static void take_portions(void *given) {
    Product *p = given;
    const Linear *l = p->linear;
    const int64_t turns = (p->rows + ROWS - 1) / ROWS, most = (p->rows + turns - 1) / turns;
    for (int64_t first; (first = __atomic_fetch_add(&p->next, p->portion, __ATOMIC_RELAXED)) < p->blocks;) {
        const int64_t end = first + p->portion < p->blocks ? first + p->portion : p->blocks;
        for (int64_t block = first, blocks; block < end; block += blocks) {
            const int wide = turns == 1 && block + together(most) <= end;
            blocks = wide ? together(most) : 1;
            for (int64_t row = 0, some; row < p->rows; row += some) {
                some = p->rows - row < most ? p->rows - row : most;
                few_rows(l, p->input + row * l->inputs, p->output + row * l->outputs, block, some, wide);
            }
        }
    }
}

int64_t tswift_block(void) { return BLOCK; }
int64_t tswift_lanes(void) { return LANES; }

/* Rows [rows, inputs] times a matrix: [rows, outputs]. */
void tswift_multiply(
    const Linear *l, const float *input, float *output, int64_t rows, parallel_region *parallel, int64_t threads
) {
    if (!rows) return;
    Product p = {.linear = l, .input = input, .output = output, .rows = rows};
    p.blocks = (l->outputs + BLOCK - 1) / BLOCK;
    p.portion = PORTION / (l->inputs * BLOCK * rows) / MOST * MOST + MOST;
    if (threads > 1 && l->inputs * l->outputs * rows >= LARGE) parallel(take_portions, &p, threads, 0);
    else take_portions(&p);
}

/* x over the root of its mean square, times weights. */
void tswift_norm(const float *x, const float *weight, float *out, int64_t count, float epsilon) {
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        for (int lane = 0; lane < 32; lane++) sums[lane] += x[i + lane] * x[i + lane];
    for (; i < count; i++) sums[i % 32] += x[i] * x[i];
    for (int lane = 0; lane < 32; lane++) sum += sums[lane];
    const float by = 1 / sqrtf(sum / count + epsilon);
    for (i = 0; i < count; i++) out[i] = weight[i] * (x[i] * by);
}

/* The exponential; the polynomial is that of 2^x on [-0.5, 0.5] in native.c. */
INLINE float power(float x) {
    const float shift = 0x1.8p23f, two = x * 1.442695041f, bound = two < -126 ? -126 : two > 127 ? 127 : two;
    const float shifted = bound + shift, rest = bound - (shifted - shift);
    float y = 0.00015353362f;
    y = y * rest + 0.0013398875f;
    y = y * rest + 0.009618437f;
    y = y * rest + 0.055503324f;
    y = y * rest + 0.24022648f;
    y = y * rest + 0.6931472f;
    y = y * rest + 1.0f;
    int32_t exponent, bits;
    memcpy(&exponent, &shifted, 4);
    memcpy(&bits, &y, 4);
    bits += (int32_t)((uint32_t)exponent << 23);
    memcpy(&y, &bits, 4);
    return y;
}

/* NaN stays NaN: what is broken has to show. */
void tswift_silu(const float *x, float *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = x[i] / (1 + power(-x[i]));
}

INLINE void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cosines[i] - second * sines[i];
        head[half + i] = second * cosines[i] + first * sines[i];
    }
}

INLINE int64_t widest(const Model *m) {
    const int64_t joined = (m->heads + 2 * m->kv_heads) * m->width;
    return joined > 2 * m->inner ? joined : 2 * m->inner;
}

static Attention attention(const Model *m, const Pass *p) {
    return (Attention){
        .ancestors = p->ancestors, .parallel = m->parallel, .keys_head = p->by_head,
        .values_head = p->by_head, .kv_heads = m->kv_heads, .rows = m->heads / m->kv_heads * p->nodes,
        .prefix = p->prefix, .nodes = p->nodes, .threads = p->threads, .scale = m->scale,
    };
}

/* How many ancestors a node has, but itself. */
static int64_t depth(const Pass *p, int64_t node) {
    int64_t found = -1;
    for (int64_t other = 0; other < p->nodes; other++) found += p->ancestors[node * p->nodes + other];
    return found;
}

/* Numbers of working space: of every row, what goes into a product, what comes out, and what was attended to; cosines
   and sines; depth; and what attention wants. */
int64_t tswift_space(const Model *m, const Pass *p) {
    const Attention a = attention(m, p);
    const int64_t row = m->hidden + widest(m) + m->inner + 2 * m->heads * m->width + m->width + sizeof(int64_t) / sizeof(float);
    return p->nodes * row + 2 * ALIGNED + m->attention_scratch(&a);
}

/* Put a head's keys or values, whose count is a multiple of 8, into the cache, rounded to the nearest. */
INLINE void keep(void *cache, const float *from, const float *steps, int64_t count, int64_t kind) {
    if (kind == FLOAT32) memcpy(cache, from, count * sizeof *from);
    else if (kind == FLOAT16)
        for (int64_t i = 0; i < count; i += 8)
            _mm_storeu_si128((__m128i *)((uint16_t *)cache + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    else if (kind == INT16)
        for (int64_t i = 0; i < count; i += 8) { /* NaN becomes the least integer, as in cache.py */
            const __m256i counts = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(from + i), _mm256_loadu_ps(steps + i)));
            const __m128i low = _mm256_castsi256_si128(counts), high = _mm256_extracti128_si256(counts, 1);
            _mm_storeu_si128((__m128i *)((uint16_t *)cache + i), _mm_packs_epi32(low, high));
        }
    else
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, sizeof bits);
            ((uint16_t *)cache)[i] = from[i] == from[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
        }
}

void tswift_forward(const Model *m, const Pass *p) {
    const int64_t n = p->nodes, hidden = m->hidden, width = m->width, half = width / 2, heads = m->heads;
    const int64_t joined = (heads + 2 * m->kv_heads) * width, size = m->kind == FLOAT32 ? 4 : 2;
    float *normed = p->space, *wide = normed + n * hidden, *inner = wide + n * widest(m);
    float *seen = inner + n * m->inner, *turned = seen + n * heads * width;
    float *cosines = turned + n * heads * width, *sines = cosines + n * half, *state = p->raw;
    Attention a = attention(m, p);
    /* attention reads whole vectors there, which must not cross a line of the cache */
    a.scratch = p->space + (sines + n * half - p->space + ALIGNED - 1) / ALIGNED * ALIGNED;
    int64_t *depths = (int64_t *)a.scratch;
    if (p->ancestors) {
        for (int64_t r = 0; r < n; r++) depths[r] = depth(p, r);
        a.depths = depths;
    }
    a.scratch += (n * (int64_t)(sizeof *depths / sizeof *a.scratch) + ALIGNED - 1) / ALIGNED * ALIGNED;
    for (int64_t r = 0; r < n; r++) {
        memcpy(state + r * hidden, m->embeddings + p->tokens[r] * hidden, hidden * sizeof *state);
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)p->positions[r] * m->rates[i];
            cosines[r * half + i] = cosf(angle) * m->rotary_scale;
            sines[r * half + i] = sinf(angle) * m->rotary_scale;
        }
    }
    for (int64_t index = 0; index < m->count; index++) {
        const Layer *layer = m->layers + index;
        float *query = p->queries + index * heads * n * width;
        for (int64_t r = 0; r < n; r++)
            tswift_norm(state + r * hidden, layer->before, normed + r * hidden, hidden, m->epsilon);
        tswift_multiply(&layer->joined, normed, wide, n, m->parallel, p->threads);
        for (int64_t r = 0; r < n; r++)
            for (int64_t h = 0; h < heads + 2 * m->kv_heads; h++) {
                float *from = wide + r * joined + h * width;
                const int64_t other = h - heads, head = other % m->kv_heads;
                const float *norm = other < 0 ? layer->query_norm : other < m->kv_heads ? layer->key_norm : 0;
                if (norm) tswift_norm(from, norm, from, width, m->epsilon);
                if (other < m->kv_heads) rotate(from, cosines + r * half, sines + r * half, half);
                if (other < 0) memcpy(query + (h * n + r) * width, from, width * sizeof *from);
                else {
                    const int64_t at = index * p->by_layer + head * p->by_head + (p->prefix + r) * width;
                    const int value = other >= m->kv_heads;
                    const float *steps = p->steps + ((value * m->count + index) * m->kv_heads + head) * width;
                    keep((value ? p->values : p->keys) + at * size, from, steps, width, m->kind);
                }
            }
        a.query = query, a.out = seen;
        a.key_steps = p->steps + index * m->kv_heads * width, a.value_steps = a.key_steps + m->count * m->kv_heads * width;
        a.keys = p->keys + index * p->by_layer * size, a.values = p->values + index * p->by_layer * size;
        m->attend(&a);
        for (int64_t r = 0; r < n; r++)
            for (int64_t h = 0; h < heads; h++)
                memcpy(turned + (r * heads + h) * width, seen + (h * n + r) * width, width * sizeof *seen);
        tswift_multiply(&layer->output, turned, normed, n, m->parallel, p->threads);
        for (int64_t i = 0; i < n * hidden; i++) state[i] += normed[i];
        for (int64_t r = 0; r < n; r++)
            tswift_norm(state + r * hidden, layer->after, normed + r * hidden, hidden, m->epsilon);
        tswift_multiply(&layer->gates, normed, wide, n, m->parallel, p->threads);
        for (int64_t r = 0; r < n; r++) {
            float *gate = wide + r * 2 * m->inner, *let = gate + m->inner;
            tswift_silu(gate, gate, m->inner);
            for (int64_t i = 0; i < m->inner; i++) inner[r * m->inner + i] = gate[i] * let[i];
        }
        tswift_multiply(&layer->down, inner, normed, n, m->parallel, p->threads);
        for (int64_t i = 0; i < n * hidden; i++) state[i] += normed[i];
        if (p->states) memcpy(p->states + index * n * hidden, state, n * hidden * sizeof *state);
    }
    for (int64_t r = 0; r < n; r++)
        tswift_norm(state + r * hidden, m->norm, p->hidden + r * hidden, hidden, m->epsilon);
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

/* The beginning of what drawing.c is called with. */
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
    const float *embeddings, *state; /* [vocabulary, hidden]; [hidden] where the heads start */
    const float *first;              /* [hidden] whose logits come before those of the heads, or none */
    Ranking *ranking;                /* of the first level; those of the others lie behind */
    void (*rank)(Ranking *);
    parallel_region *parallel;
    float *space;                    /* 7 * hidden, and the logits */
    int64_t levels, count, root, hidden, threads;
} Guess;

void tswift_guess(const Guess *g) {
    const float *state = g->state;
    float *out = g->space, *refined = out + g->hidden, *space = refined + 2 * g->hidden, *logits = space + 4 * g->hidden;
    int64_t root = g->root, head = 0;
    for (int64_t level = 0; level < g->levels; level++) {
        const float *given = g->first;
        if (level || !given) {
            float *next = refined + head % 2 * g->hidden;
            tswift_head(
                g->heads + head++, state, g->embeddings + root * g->hidden, next, out, space, 1, g->parallel, g->threads);
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
