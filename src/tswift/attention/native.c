/* Attention of a few rows to many keys, in float32, on x86 processors with AVX2 and FMA.

   A row is one query head at one node; the rows of a KV head read its keys and values together. The keys are cut into
   parts, which the threads take one after another. A part goes block by block, while the block is in a near cache:
   scores, weights relative to the highest score so far, weighted sum of the values. At last the parts are put together.
   Scores are powers of two: the caller's scale holds log2(e).

   WIDTH, the head size, is a multiple of 16 and given by whoever compiles this; native.py does. */

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 8,
    BLOCK = 120, /* keys of a block */
    TILE = 16,   /* most rows whose scores are held at a time */
    FEW = 4,     /* up to so many rows, a vector holds numbers of one row; above, one number of each row */
    MIXED = 4    /* most rows whose weighted values are held in registers */
};

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

/* One layer's attention; native.py has the same structure. */
typedef struct {
    const float *query;        /* [kv heads, rows, WIDTH] */
    const float *keys;         /* [kv heads, prefix + nodes, WIDTH], a head's being keys_head numbers apart */
    const float *values;       /* like keys */
    const uint8_t *ancestors;  /* [nodes, nodes], or none: every node descends from all before it */
    float *out;                /* like query */
    float *scratch;            /* [kv heads, parts, PART_SIZE(rows)] */
    parallel_region *parallel; /* GOMP_parallel of the OpenMP that PyTorch uses */
    int64_t keys_head, values_head, kv_heads, rows, prefix, nodes, part, parts, threads;
    int64_t next; /* part that is to be taken next */
    float scale;
} Call;

/* What a part leaves: highest scores, sums of weights, and sums of weighted values. */
#define PADDED(rows) (((rows) + TILE - 1) / TILE * TILE)
#define PART_SIZE(rows) (2 * PADDED(rows) + (rows) * WIDTH)

/* A block of keys, and where its rows are. */
typedef struct {
    const float *query, *keys, *values;
    const float *next_keys, *next_values; /* of the next block */
    int64_t first;                        /* the first key */
    int count;                            /* keys */
    int row, rows;
    float *top, *total, *out;
} Block;

/* 2 to the power of x, which is at most 0. Below 2^-126 it is 0, so that minus infinity weighs nothing; NaN stays.
   The polynomial has the least greatest relative error on [-0.5, 0.5], 2e-9, before rounding. */
INLINE __m256 power(__m256 x) {
    const __m256 shift = _mm256_set1_ps(0x1.8p23f); /* what is added to it is rounded to an integer, in the low bits */
    const __m256 shifted = _mm256_add_ps(x, shift);
    const __m256 rest = _mm256_sub_ps(x, _mm256_sub_ps(shifted, shift));
    __m256 y = _mm256_set1_ps(0.00015353362f);
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0.0013398875f));
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0.009618437f));
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0.055503324f));
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0.24022648f));
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(0.6931472f));
    y = _mm256_fmadd_ps(y, rest, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), y);
}

/* The next block is fetched while this one is computed, a line now and then: many at once would hold up the loads. */
INLINE void fetch(const float *at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }

/* Nodes do not see what is beside or after them. */
INLINE void hide(const Call *c, const Block *b, float *scores, int by_key, int by_row) {
    for (int64_t key = c->prefix > b->first ? c->prefix - b->first : 0; key < b->count; key++) {
        const int64_t node = b->first + key - c->prefix;
        for (int r = 0; r < b->rows; r++) {
            const int64_t own = (b->row + r) % c->nodes;
            if (c->ancestors ? !c->ancestors[own * c->nodes + node] : node > own)
                scores[key * by_key + r * by_row] = -INFINITY;
        }
    }
}

INLINE void shrink(float *out, float by) {
    for (int d = 0; d < WIDTH; d += LANES)
        _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), _mm256_set1_ps(by)));
}

/* Many rows: the query is [WIDTH, lanes], scores are [keys, lanes], with as many lanes as the vectors have. */

INLINE void score_keys(const Block *b, float *scores, int key, const int count, const int vectors) {
    const float *keys = b->keys + key * WIDTH, *next = b->next_keys + key * WIDTH;
    __m256 sum[12][2];
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) sum[k][v] = _mm256_setzero_ps();
    for (int d = 0; d < WIDTH; d++) {
        __m256 of_rows[2];
        for (int v = 0; v < vectors; v++) of_rows[v] = _mm256_load_ps(b->query + (d * vectors + v) * LANES);
        if (16 * d < count * WIDTH) fetch(next + 16 * d);
#pragma GCC unroll 12
        for (int k = 0; k < count; k++) {
            const __m256 of_key = _mm256_broadcast_ss(keys + k * WIDTH + d);
            for (int v = 0; v < vectors; v++) sum[k][v] = _mm256_fmadd_ps(of_key, of_rows[v], sum[k][v]);
        }
    }
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) _mm256_store_ps(scores + ((key + k) * vectors + v) * LANES, sum[k][v]);
}

INLINE void score_many(const Block *b, float *scores, const int vectors) {
    const int some = 12 / vectors; /* twelve sums fill the registers */
    int key = 0;
    for (; key + some <= b->count; key += some) score_keys(b, scores, key, some, vectors);
    for (; key < b->count; key++) score_keys(b, scores, key, 1, vectors);
}

INLINE void weigh_many(const Block *b, float *scores, const int vectors) {
    for (int v = 0; v < vectors; v++) {
        const int lanes = vectors * LANES;
        float *own = scores + v * LANES, *top = b->top + v * LANES, *total = b->total + v * LANES;
        const __m256 before = _mm256_loadu_ps(top);
        __m256 high[4] = {before, before, before, before}, sum = _mm256_loadu_ps(total);
        for (int key = 0; key < b->count; key++)
            high[key % 4] = _mm256_max_ps(_mm256_load_ps(own + key * lanes), high[key % 4]);
        const __m256 highest = _mm256_max_ps(_mm256_max_ps(high[0], high[1]), _mm256_max_ps(high[2], high[3]));
        if (_mm256_movemask_ps(_mm256_cmp_ps(highest, before, _CMP_NEQ_OQ))) {
            float by[LANES];
            const __m256 share = power(_mm256_sub_ps(before, highest));
            _mm256_storeu_ps(by, share);
            _mm256_storeu_ps(top, highest);
            sum = _mm256_mul_ps(sum, share);
            for (int r = v * LANES; r < b->rows && r < (v + 1) * LANES; r++) shrink(b->out + r * WIDTH, by[r % LANES]);
        }
        __m256 added = _mm256_setzero_ps();
        for (int key = 0; key < b->count; key++) {
            const __m256 weight = power(_mm256_sub_ps(_mm256_load_ps(own + key * lanes), highest));
            _mm256_store_ps(own + key * lanes, weight);
            added = _mm256_add_ps(added, weight);
        }
        _mm256_storeu_ps(total, _mm256_add_ps(sum, added));
    }
}

/* Few rows: the query is [rows, WIDTH], scores are [rows, BLOCK]. */

/* Eight vectors to the eight sums of their numbers. */
INLINE __m256 sums(const __m256 x[8]) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

INLINE void score_few(const Block *b, float *scores) {
    for (int key = 0; key < b->count; key += LANES) {
        const int some = b->count - key < LANES ? b->count - key : LANES;
        const float *keys[LANES];
        for (int k = 0; k < LANES; k++) keys[k] = b->keys + (key + (k < some ? k : 0)) * WIDTH;
        for (int r = 0; r < b->rows; r++) {
            __m256 sum[LANES];
            for (int k = 0; k < LANES; k++) sum[k] = _mm256_setzero_ps();
            for (int d = 0; d < WIDTH; d += LANES) {
                const __m256 of_row = _mm256_load_ps(b->query + r * WIDTH + d);
                if (r == 0)
                    for (int k = d % 16 / LANES; k < LANES; k += 2) fetch(b->next_keys + (key + k) * WIDTH + d);
#pragma GCC unroll 8
                for (int k = 0; k < LANES; k++) sum[k] = _mm256_fmadd_ps(of_row, _mm256_loadu_ps(keys[k] + d), sum[k]);
            }
            _mm256_store_ps(scores + r * BLOCK + key, sums(sum));
            for (int k = some; k < LANES; k++) scores[r * BLOCK + key + k] = -INFINITY;
        }
    }
}

INLINE void weigh_few(const Block *b, float *scores) {
    for (int r = 0; r < b->rows; r++) {
        float *own = scores + r * BLOCK, each[LANES], highest = b->top[r];
        __m256 high = _mm256_set1_ps(highest), sum = _mm256_setzero_ps();
        for (int key = 0; key < b->count; key += LANES) high = _mm256_max_ps(_mm256_load_ps(own + key), high);
        _mm256_storeu_ps(each, high);
        for (int i = 0; i < LANES; i++) highest = each[i] > highest ? each[i] : highest;
        if (highest != b->top[r]) {
            const float by = _mm256_cvtss_f32(power(_mm256_set1_ps(b->top[r] - highest)));
            b->top[r] = highest;
            b->total[r] *= by;
            shrink(b->out + r * WIDTH, by);
        }
        for (int key = 0; key < b->count; key += LANES) {
            const __m256 weight = power(_mm256_sub_ps(_mm256_load_ps(own + key), _mm256_set1_ps(highest)));
            _mm256_store_ps(own + key, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        _mm256_storeu_ps(each, sum);
        for (int i = 0; i < LANES; i++) b->total[r] += each[i];
    }
}

/* Add the weighted values; where a weight is depends on whether rows are many or few. */

INLINE void mix_rows(const Block *b, const float *weights, int row, const int rows, int by_key, int by_row) {
    float *out = b->out + row * WIDTH;
    const int wide = rows == 1 ? 8 : rows == 2 ? 4 : 2, vectors = WIDTH % (wide * LANES) ? 2 : wide;
    for (int d = 0; d < WIDTH; d += vectors * LANES) {
        __m256 sum[MIXED][8];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_loadu_ps(out + r * WIDTH + d + v * LANES);
        for (int key = 0; key < b->count; key++) {
            __m256 value[8];
            if (row == 0)
                for (int v = 0; v < vectors; v += 2) fetch(b->next_values + key * WIDTH + d + v * LANES);
            for (int v = 0; v < vectors; v++) value[v] = _mm256_loadu_ps(b->values + key * WIDTH + d + v * LANES);
            for (int r = 0; r < rows; r++) {
                const __m256 weight = _mm256_broadcast_ss(weights + key * by_key + r * by_row);
                for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_fmadd_ps(weight, value[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) _mm256_storeu_ps(out + r * WIDTH + d + v * LANES, sum[r][v]);
    }
}

INLINE void mix(const Block *b, const float *weights, int by_key, int by_row) {
    for (int row = 0, some; row < b->rows; row += some) {
        const int left = b->rows - row, turns = (left + MIXED - 1) / MIXED;
        some = (left + turns - 1) / turns;
        if (some == 4) mix_rows(b, weights + row * by_row, row, 4, by_key, by_row);
        else if (some == 3) mix_rows(b, weights + row * by_row, row, 3, by_key, by_row);
        else if (some == 2) mix_rows(b, weights + row * by_row, row, 2, by_key, by_row);
        else mix_rows(b, weights + row * by_row, row, 1, by_key, by_row);
    }
}

static void attend_few(const Call *c, const Block *b) {
    _Alignas(32) float scores[FEW * BLOCK];
    score_few(b, scores);
    hide(c, b, scores, 1, BLOCK);
    weigh_few(b, scores);
    mix(b, scores, 1, BLOCK);
}

static void attend_many(const Call *c, const Block *b) {
    _Alignas(32) float scores[BLOCK * TILE];
    if (b->rows > LANES) {
        score_many(b, scores, 2);
        hide(c, b, scores, 2 * LANES, 1);
        weigh_many(b, scores, 2);
        mix(b, scores, 2 * LANES, 1);
    } else {
        score_many(b, scores, 1);
        hide(c, b, scores, LANES, 1);
        weigh_many(b, scores, 1);
        mix(b, scores, LANES, 1);
    }
}

/* Lay out a tile's rows, scaled, as those who score them want it. */
static void pack(const Call *c, const float *query, float *packed, int rows) {
    const int lanes = rows > LANES ? 2 * LANES : LANES;
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < WIDTH; d++)
            packed[rows > FEW ? d * lanes + r : r * WIDTH + d] = query[r * WIDTH + d] * c->scale;
}

/* How many of the rows that are left come next: eight and a few cost less than sixteen that are not all there. */
INLINE int64_t tile(int64_t left) { return left > LANES + FEW ? TILE : LANES; }

static void attend_part(const Call *c, int64_t head, int64_t index) {
    const int64_t rows = c->rows, held = c->prefix + c->nodes, start = index * c->part;
    const int64_t end = start + c->part < held ? start + c->part : held;
    const float *keys = c->keys + head * c->keys_head, *values = c->values + head * c->values_head;
    float *top = c->scratch + (head * c->parts + index) * PART_SIZE(rows), *total = top + PADDED(rows);
    float *out = total + PADDED(rows);
    _Alignas(32) float packed[PADDED(rows) * WIDTH];
    memset(packed, 0, sizeof packed);
    memset(total, 0, (PADDED(rows) + rows * WIDTH) * sizeof *total);
    for (int64_t r = 0; r < PADDED(rows); r++) top[r] = -FLT_MAX; /* minus infinity from itself would be NaN */
    for (int64_t row = 0, some; row < rows; row += some) {
        some = tile(rows - row);
        pack(c, c->query + (head * rows + row) * WIDTH, packed + row * WIDTH, rows - row < some ? rows - row : some);
    }
    for (int64_t first = start; first < end; first += BLOCK) {
        const int count = end - first < BLOCK ? end - first : BLOCK;
        const int64_t next = first + 2 * BLOCK <= held ? first + BLOCK : first;
        for (int64_t row = 0, some; row < rows; row += some) {
            some = tile(rows - row);
            const Block b = {
                .query = packed + row * WIDTH,
                .keys = keys + first * WIDTH,
                .values = values + first * WIDTH,
                .next_keys = keys + next * WIDTH,
                .next_values = values + next * WIDTH,
                .first = first,
                .count = count,
                .row = row,
                .rows = rows - row < some ? rows - row : some,
                .top = top + row,
                .total = total + row,
                .out = out + row * WIDTH,
            };
            if (b.rows > FEW) attend_many(c, &b);
            else attend_few(c, &b);
        }
    }
}

/* What every thread does. */
static void take_parts(void *given) {
    Call *c = given;
    const int64_t tasks = c->kv_heads * c->parts, share = tasks / (8 * c->threads), some = share > 1 ? share : 1;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&c->next, some, __ATOMIC_RELAXED);
        if (first >= tasks) return;
        for (int64_t task = first; task < first + some && task < tasks; task++)
            attend_part(c, task / c->parts, task % c->parts);
    }
}

/* Weigh what the parts of a head found for up to eight rows by their sums of weights. */
static void combine(const Call *c, int64_t head, int64_t row) {
    const int64_t rows = c->rows, some = rows - row < LANES ? rows - row : LANES;
    const float *found = c->scratch + head * c->parts * PART_SIZE(rows) + row;
    float *out = c->out + (head * rows + row) * WIDTH, share[LANES];
    __m256 high = _mm256_set1_ps(-FLT_MAX), sum = _mm256_setzero_ps();
    memset(out, 0, some * WIDTH * sizeof *out);
    for (int64_t p = 0; p < c->parts; p++) high = _mm256_max_ps(_mm256_loadu_ps(found + p * PART_SIZE(rows)), high);
    for (int64_t p = 0; p < c->parts; p++) {
        const float *top = found + p * PART_SIZE(rows), *total = top + PADDED(rows);
        const float *mixed = total - row + PADDED(rows) + row * WIDTH;
        const __m256 by = power(_mm256_sub_ps(_mm256_loadu_ps(top), high));
        sum = _mm256_fmadd_ps(by, _mm256_loadu_ps(total), sum);
        _mm256_storeu_ps(share, by);
        for (int64_t r = 0; r < some; r++)
            for (int64_t d = 0; d < WIDTH; d++) out[r * WIDTH + d] += share[r] * mixed[r * WIDTH + d];
    }
    _mm256_storeu_ps(share, sum);
    for (int64_t r = 0; r < some; r++)
        for (int64_t d = 0; d < WIDTH; d++) out[r * WIDTH + d] /= share[r];
}

void tswift_attend(Call *c) {
    if (c->threads > 1 && c->kv_heads * c->parts > 1) c->parallel(take_parts, c, c->threads, 0);
    else take_parts(c);
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0; row < c->rows; row += LANES) combine(c, head, row);
}
