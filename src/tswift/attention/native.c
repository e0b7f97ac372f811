/* Attention of a few rows to many keys, computed in float32, on x86 processors with AVX2, FMA and F16C;
   many rows in AVX-512 where there is that, with the same bits.

   A row is one query head at one node; the rows of a KV head read its keys and values together. Scores are powers of
   two: the caller's scale holds log2(e).

   A row has the same bits whatever other rows are in the pass and whichever of its node's ancestors are drafted. So
   what is added up, and in which order, follows from positions alone:
   - Keys far behind a node (before its border, which is a multiple of BLOCK) are committed in every pass that it can be
     in: their slots are their positions. They are cut into parts by position, which the threads take one after another.
     A part goes block by block, while the block is in a near cache: scores, weights relative to the highest score so
     far, weighted sum of the values.
   - The rest, the node's tail, is one more part: a single block with a single highest score. Between the slots of
     drafted ancestors there may be others', which weigh exactly nothing.
   - Each score is added up dimension by dimension, each weighted value key by key, and the weights of a block in eight
     sums, a key's being its position modulo 8.
   At last the parts are put together in order. The compiler must not fuse a product with a sum on its own.

   WIDTH, the head size, is a multiple of 16; KIND is the type of keys and values; DRAFTED is how many nodes of a path
   may be drafted. Whoever compiles this gives them; native.py does. */

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#if KIND == FLOAT32
typedef float stored;
#else
typedef uint16_t stored;
#endif

enum {
    LANES = 8,
    BLOCK = 120, /* keys of a block */
    TAIL = (DRAFTED + BLOCK + 128 + 7) / 8 * 8, /* most keys of a tail: so many before the prefix ends, and 128 nodes */
    TILE = 16,   /* most rows whose scores are held at a time */
    FEW = 4,     /* up to so many rows, a vector holds numbers of one row; above, one number of each row */
    WIDE = 20,   /* keys that are scored together for sixteen rows, where vectors hold so many numbers */
    MIXED = 4,   /* most rows whose weighted values are held in registers */
    LINE = 64 / sizeof(stored),  /* numbers of a cache line */
    PIECE = 16 / sizeof(stored), /* numbers of a key that are turned at a time */
    PART = 480,  /* keys of the first NEAR parts; the next MIDDLE have twice as many, all others 8 times */
    NEAR = 16,
    MIDDLE = 24
};

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

/* One layer's attention; native.py has the same structure. */
typedef struct {
    const float *query;        /* [kv heads, rows, WIDTH] */
    const stored *keys;        /* [kv heads, prefix + nodes, WIDTH], a head's being keys_head numbers apart */
    const stored *values;      /* like keys */
    const uint8_t *ancestors;  /* [nodes, nodes], or none: every node descends from all before it */
    const int64_t *depths;     /* of nodes: ancestors but itself; none without ancestors */
    float *out;                /* like query */
    float *scratch;            /* as many numbers as tswift_scratch says */
    parallel_region *parallel; /* tswift_parallel of pool.c */
    int64_t keys_head, values_head, kv_heads, rows, prefix, nodes, threads;
    float scale;
} Call;

/* The scratch: the queries as those who score them want them; what the parts leave (highest scores, sums of weights,
   and sums of weighted values); and per thread a block of keys and values in float32. */
#define PADDED(rows) (((rows) + TILE - 1) / TILE * TILE)
#define PART_SIZE(rows) (2 * PADDED(rows) + (rows) * WIDTH)
#define WIDENED (KIND == FLOAT32 ? 0 : 2 * TAIL * WIDTH)

/* A call under way. */
typedef struct {
    const Call *call;
    int64_t nearest, farthest; /* borders of the nodes */
    int64_t parts;             /* of a head, the tail among them */
    int64_t next;              /* part that is to be taken next */
    int64_t workers;           /* threads that have begun */
} Work;

/* A block of keys, and where its rows are. */
typedef struct {
    const float *query;
    const stored *keys, *values;
    const float *wide_keys, *wide_values;  /* the same in float32, for many rows */
    const stored *next_keys, *next_values; /* of the next block */
    int64_t first;                         /* the first key */
    int count;                             /* keys */
    int plain;                             /* of these come before all that may have other places: see place */
    int tail;                              /* whether it is the tail */
    int shown;                             /* of the keys, these first ones are seen by all rows */
    int broken;                            /* whether one of the other values is no number */
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

INLINE __m256 load(const stored *at) {
#if KIND == FLOAT32
    return _mm256_loadu_ps(at);
#else
    const __m128i halves = _mm_loadu_si128((const __m128i *)at);
#if KIND == BFLOAT16
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
    return _mm256_cvtph_ps(halves);
#endif
#endif
}

/* The next block is fetched while this one is computed, a line now and then: many at once would hold up the loads. */
INLINE void fetch(const stored *at) { _mm_prefetch((const char *)at, _MM_HINT_T1); }

INLINE int64_t depth(const Call *c, int64_t node) { return c->depths ? c->depths[node] : node; }

/* Where a node's tail begins. With no more than DRAFTED nodes, whatever the prefix, it is before its end. */
INLINE int64_t border(const Call *c, int64_t node) {
    const int64_t far = c->prefix + depth(c, node) - DRAFTED, least = far < c->prefix ? far : c->prefix;
    return least < 0 ? 0 : least / BLOCK * BLOCK;
}

/* The sum to which a key's weight is added: its position modulo 8. */
INLINE int place(const Call *c, int64_t slot) {
    return (slot < c->prefix ? slot : c->prefix + depth(c, slot - c->prefix)) & (LANES - 1);
}

/* How many of a block's keys come before what a node sees of it: its tail or what is before that. */
INLINE int unseen(const Call *c, const Block *b, int64_t node) {
    const int64_t from = border(c, node);
    return b->tail ? from - b->first : b->first < from ? 0 : b->count;
}

/* Nodes do not see what is beside or after them; what is before all nodes they do. */
INLINE int sees(const Call *c, int64_t node, int64_t slot) {
    const int64_t other = slot - c->prefix;
    return other < 0 || (c->ancestors ? c->ancestors[node * c->nodes + other] : other <= node);
}

static void hide(const Call *c, const Block *b, float *scores, int by_key, int by_row) {
    for (int r = 0; r < b->rows; r++) {
        const int64_t node = (b->row + r) % c->nodes;
        const int before = unseen(c, b, node), drafted = c->prefix - b->first;
        for (int key = 0; key < before; key++) scores[key * by_key + r * by_row] = -INFINITY;
        for (int key = drafted; key < b->count; key++)
            if (!sees(c, node, b->first + key)) scores[key * by_key + r * by_row] = -INFINITY;
    }
}

INLINE void shrink(float *out, float by) {
    for (int d = 0; d < WIDTH; d += LANES)
        _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(out + d), _mm256_set1_ps(by)));
}

/* Many rows: the query is [WIDTH, lanes], scores are [keys, lanes], with as many lanes as the vectors have. */

INLINE void score_keys(const Block *b, float *scores, int key, const int count, const int vectors) {
    const float *keys = b->wide_keys + key * WIDTH;
    const stored *next = b->next_keys + key * WIDTH;
    __m256 sum[12][2];
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) sum[k][v] = _mm256_setzero_ps();
    for (int d = 0; d < WIDTH; d++) {
        __m256 of_rows[2];
        for (int v = 0; v < vectors; v++) of_rows[v] = _mm256_load_ps(b->query + (d * vectors + v) * LANES);
        if (LINE * d < count * WIDTH) fetch(next + LINE * d);
#pragma GCC unroll 12
        for (int k = 0; k < count; k++) {
            const __m256 of_key = _mm256_broadcast_ss(keys + k * WIDTH + d);
            for (int v = 0; v < vectors; v++) sum[k][v] = _mm256_fmadd_ps(of_key, of_rows[v], sum[k][v]);
        }
    }
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) _mm256_store_ps(scores + ((key + k) * vectors + v) * LANES, sum[k][v]);
}

#ifdef __AVX512F__
/* The same for sixteen rows: the same sums, two vectors in one. */
INLINE void score_wide(const Block *b, float *scores, int key, const int count) {
    const float *keys = b->wide_keys + key * WIDTH;
    const stored *next = b->next_keys + key * WIDTH;
    __m512 sum[WIDE];
    for (int k = 0; k < count; k++) sum[k] = _mm512_setzero_ps();
    for (int d = 0; d < WIDTH; d++) {
        const __m512 of_rows = _mm512_loadu_ps(b->query + d * 2 * LANES);
        if (LINE * d < count * WIDTH) fetch(next + LINE * d);
#pragma GCC unroll 24
        for (int k = 0; k < count; k++)
            sum[k] = _mm512_fmadd_ps(_mm512_set1_ps(keys[k * WIDTH + d]), of_rows, sum[k]);
    }
    for (int k = 0; k < count; k++) _mm512_storeu_ps(scores + (key + k) * 2 * LANES, sum[k]);
}
#endif

INLINE void score_many(const Block *b, float *scores, const int vectors) {
    const int some = 12 / vectors; /* twelve sums fill the registers */
    int key = 0;
#ifdef __AVX512F__
    if (vectors == 2)
        for (; key + WIDE <= b->count; key += WIDE) score_wide(b, scores, key, WIDE);
#endif
    for (; key + some <= b->count; key += some) score_keys(b, scores, key, some, vectors);
    for (; key + 3 <= b->count; key += 3) score_keys(b, scores, key, 3, vectors);
    for (; key < b->count; key++) score_keys(b, scores, key, 1, vectors);
}

/* The keys of a tail whose places are not those of a vector. */
static void add_rest(const Call *c, const Block *b, float *own, int lanes, __m256 highest, __m256 added[LANES]) {
    for (int key = b->plain; key < b->count; key++) {
        const __m256 weight = power(_mm256_sub_ps(_mm256_load_ps(own + key * lanes), highest));
        const int i = place(c, b->first + key);
        _mm256_store_ps(own + key * lanes, weight);
        added[i] = _mm256_add_ps(added[i], weight);
    }
}

INLINE void weigh_many(const Call *c, const Block *b, float *scores, const int vectors) {
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
        __m256 added[LANES];
        for (int i = 0; i < LANES; i++) added[i] = _mm256_setzero_ps();
        int key = 0;
        for (; key < b->plain; key += LANES)
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) {
                const __m256 weight = power(_mm256_sub_ps(_mm256_load_ps(own + (key + i) * lanes), highest));
                _mm256_store_ps(own + (key + i) * lanes, weight);
                added[i] = _mm256_add_ps(added[i], weight);
            }
        if (b->tail) add_rest(c, b, own, lanes, highest, added);
        for (int half = 1; half < LANES; half *= 2)
            for (int i = 0; i < LANES; i += 2 * half) added[i] = _mm256_add_ps(added[i], added[i + half]);
        _mm256_storeu_ps(total, _mm256_add_ps(sum, added[0]));
    }
}

/* Few rows: the query is [rows, WIDTH], scores are [rows, TAIL]. */

/* A piece of each of eight keys, turned: vectors of one number of each key. */
INLINE void turn(const stored *keys, __m256 out[PIECE]) {
    __m256 x[4], words[4];
    for (int k = 0; k < 4; k++) {
        const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(keys + k * WIDTH)));
        x[k] = _mm256_insertf128_ps(low, _mm_loadu_ps((const float *)(keys + (k + 4) * WIDTH)), 1);
    }
    const __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpacklo_ps(x[2], x[3]);
    words[0] = _mm256_shuffle_ps(a, b, 0x44), words[1] = _mm256_shuffle_ps(a, b, 0xee);
    const __m256 e = _mm256_unpackhi_ps(x[0], x[1]), f = _mm256_unpackhi_ps(x[2], x[3]);
    words[2] = _mm256_shuffle_ps(e, f, 0x44), words[3] = _mm256_shuffle_ps(e, f, 0xee);
    for (int i = 0; i < 4; i++) {
#if KIND == FLOAT32
        out[i] = words[i];
#else
        const __m256i pairs = _mm256_castps_si256(words[i]);
#if KIND == BFLOAT16
        out[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        out[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
#else
        const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(pairs, 16);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
        out[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        out[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
#endif
    }
}

/* Some eights of keys at a time, so that one's sums need not wait for each other. */
INLINE void score_eights(const Block *b, const stored *keys, float *scores, int key, const int eights, const int rows) {
    __m256 sum[3][FEW];
    for (int e = 0; e < eights; e++)
        for (int r = 0; r < rows; r++) sum[e][r] = _mm256_setzero_ps();
    for (int d = 0; d < WIDTH; d += PIECE)
#pragma GCC unroll 3
        for (int e = 0; e < eights; e++) {
            __m256 turned[PIECE];
            for (int k = d % LINE / PIECE; k < LANES; k += LINE / PIECE)
                fetch(b->next_keys + (key + e * LANES + k) * WIDTH + d);
            turn(keys + e * LANES * WIDTH + d, turned);
#pragma GCC unroll 8
            for (int i = 0; i < PIECE; i++)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const __m256 of_row = _mm256_broadcast_ss(b->query + r * WIDTH + d + i);
                    sum[e][r] = _mm256_fmadd_ps(of_row, turned[i], sum[e][r]);
                }
        }
    for (int e = 0; e < eights; e++)
        for (int r = 0; r < rows; r++) _mm256_store_ps(scores + r * TAIL + key + e * LANES, sum[e][r]);
}

INLINE void score_few(const Block *b, float *scores, const int rows) {
    const int eights = rows < 3 ? 3 : 1;
    int key = 0;
    for (; key + eights * LANES <= b->count; key += eights * LANES)
        score_eights(b, b->keys + key * WIDTH, scores, key, eights, rows);
    for (; key + LANES <= b->count; key += LANES) score_eights(b, b->keys + key * WIDTH, scores, key, 1, rows);
    if (key < b->count) {
        stored rest[LANES * WIDTH] = {0};
        memcpy(rest, b->keys + key * WIDTH, (b->count - key) * WIDTH * sizeof *rest);
        score_eights(b, rest, scores, key, 1, rows);
        for (int r = 0; r < rows; r++)
            for (int k = b->count; k < key + LANES; k++) scores[r * TAIL + k] = -INFINITY;
    }
}

INLINE void weigh_few(const Call *c, const Block *b, float *scores, const int rows) {
    for (int r = 0; r < rows; r++) {
        float *own = scores + r * TAIL, each[LANES], highest = b->top[r];
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
            if (key < b->plain) sum = _mm256_add_ps(sum, weight);
        }
        _mm256_storeu_ps(each, sum);
        for (int key = b->plain; key < b->count; key++) each[place(c, b->first + key)] += own[key];
        for (int half = 1; half < LANES; half *= 2)
            for (int i = 0; i < LANES; i += 2 * half) each[i] += each[i + half];
        b->total[r] += each[0];
    }
}

/* Add the weighted values; where a weight is depends on whether rows are many or few. */

INLINE void mix_rows(
    const Block *b, const float *weights, int from, int to, int row, const int rows, int by_key, int by_row,
    const int few
) {
    float *out = b->out + row * WIDTH;
    const int wide = rows == 1 ? 8 : rows == 2 ? 4 : 2, vectors = WIDTH % (wide * LANES) ? 2 : wide;
    for (int d = 0; d < WIDTH; d += vectors * LANES) {
        __m256 sum[MIXED][8];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_loadu_ps(out + r * WIDTH + d + v * LANES);
        for (int key = from; key < to; key++) {
            __m256 value[8];
            if (row == 0)
                for (int v = 0; v < vectors; v += LINE / LANES) fetch(b->next_values + key * WIDTH + d + v * LANES);
            for (int v = 0; v < vectors; v++) {
                const int at = key * WIDTH + d + v * LANES;
                value[v] = few ? load(b->values + at) : _mm256_loadu_ps(b->wide_values + at);
            }
            for (int r = 0; r < rows; r++) {
                const __m256 weight = _mm256_broadcast_ss(weights + key * by_key + r * by_row);
                for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_fmadd_ps(weight, value[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) _mm256_storeu_ps(out + r * WIDTH + d + v * LANES, sum[r][v]);
    }
}

#ifdef __AVX512F__
INLINE __m512 load_wide(const stored *at) {
    const __m512d low = _mm512_castps_pd(_mm512_castps256_ps512(load(at)));
    return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_castps_pd(load(at + LANES)), 1));
}

/* The same, two vectors in one. */
INLINE void mix_wide(
    const Block *b, const float *weights, int row, const int rows, int by_key, int by_row, const int few
) {
    float *out = b->out + row * WIDTH;
    const int vectors = WIDTH % (8 * LANES) ? 1 : 4;
    for (int d = 0; d < WIDTH; d += vectors * 2 * LANES) {
        __m512 sum[MIXED][4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_loadu_ps(out + r * WIDTH + d + v * 2 * LANES);
        for (int key = 0; key < b->count; key++) {
            __m512 value[4];
            for (int v = 0; v < vectors; v++) {
                const int at = key * WIDTH + d + v * 2 * LANES;
                if (row == 0 && at % LINE == 0) fetch(b->next_values + at);
                value[v] = few ? load_wide(b->values + at) : _mm512_loadu_ps(b->wide_values + at);
            }
            for (int r = 0; r < rows; r++) {
                const __m512 weight = _mm512_set1_ps(weights[key * by_key + r * by_row]);
                for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_fmadd_ps(weight, value[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) _mm512_storeu_ps(out + r * WIDTH + d + v * 2 * LANES, sum[r][v]);
    }
}
#define MIX(row, rows, by_key, by_row, few) mix_wide(b, weights + (row) * (by_row), row, rows, by_key, by_row, few)
#else
#define MIX(row, rows, by_key, by_row, few) \
    mix_rows(b, weights + (row) * (by_row), 0, b->count, row, rows, by_key, by_row, few)
#endif

/* The same without what a row does not see: a weight of nothing times infinity would not be nothing. */
static __attribute__((noinline)) void mix_seen(
    const Call *c, const Block *b, const float *weights, int by_key, int by_row, int few
) {
    for (int r = 0; r < b->rows; r++) {
        const int64_t node = (b->row + r) % c->nodes;
        for (int key = unseen(c, b, node); key < b->count; key++) {
            if (!sees(c, node, b->first + key)) continue;
            if (few) mix_rows(b, weights + r * by_row, key, key + 1, r, 1, by_key, by_row, 1);
            else mix_rows(b, weights + r * by_row, key, key + 1, r, 1, by_key, by_row, 0);
        }
    }
}

INLINE void mix_many(const Call *c, const Block *b, const float *weights, int by_key) {
    if (b->broken) return mix_seen(c, b, weights, by_key, 1, 0);
    for (int row = 0, some; row < b->rows; row += some) {
        const int left = b->rows - row, turns = (left + MIXED - 1) / MIXED;
        some = (left + turns - 1) / turns;
        if (some == 4) MIX(row, 4, by_key, 1, 0);
        else if (some == 3) MIX(row, 3, by_key, 1, 0);
        else MIX(row, 2, by_key, 1, 0);
    }
}

INLINE void attend_few(const Call *c, const Block *b, const int rows) {
    _Alignas(32) float scores[FEW * TAIL];
    score_few(b, scores, rows);
    if (b->shown < b->count) hide(c, b, scores, 1, TAIL);
    weigh_few(c, b, scores, rows);
    if (b->broken) mix_seen(c, b, scores, 1, TAIL, 1);
    else mix_rows(b, scores, 0, b->count, 0, rows, 1, TAIL, 1);
}

INLINE void attend_many(const Call *c, const Block *b, const int vectors) {
    _Alignas(32) float scores[TAIL * TILE];
    score_many(b, scores, vectors);
    if (b->shown < b->count) hide(c, b, scores, vectors * LANES, 1);
    weigh_many(c, b, scores, vectors);
    mix_many(c, b, scores, vectors * LANES);
}

static void attend(const Call *c, const Block *b) {
    if (b->rows > LANES) attend_many(c, b, 2);
    else if (b->rows > FEW) attend_many(c, b, 1);
    else if (b->rows == 4) attend_few(c, b, 4);
    else if (b->rows == 3) attend_few(c, b, 3);
    else if (b->rows == 2) attend_few(c, b, 2);
    else attend_few(c, b, 1);
}

/* How many of the rows that are left come next: eight and a few cost less than sixteen that are not all there. */
INLINE int64_t tile(int64_t left) { return left > LANES + FEW ? TILE : LANES; }

/* Lay out the rows, scaled, as those who score them want it. */
static void pack(const Call *c) {
    const int64_t rows = c->rows;
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0, some; row < rows; row += some) {
            const float *query = c->query + (head * rows + row) * WIDTH;
            float *packed = c->scratch + (head * PADDED(rows) + row) * WIDTH;
            const int64_t left = rows - row;
            some = tile(left);
            if (left <= FEW)
                for (int64_t i = 0; i < left * WIDTH; i++) packed[i] = query[i] * c->scale;
            else
                for (int64_t d = 0; d < WIDTH; d++)
                    for (int64_t r = 0; r < some; r++)
                        packed[d * some + r] = r < left ? query[r * WIDTH + d] * c->scale : 0;
        }
}

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

/* Where a part begins. Only the position decides, not the length: see above. */
static int64_t part_start(int64_t index) {
    const int64_t middle = least(index > NEAR ? index - NEAR : 0, MIDDLE);
    const int64_t far = index > NEAR + MIDDLE ? index - NEAR - MIDDLE : 0;
    return PART * (least(index, NEAR) + 2 * middle + 8 * far);
}

/* What a part found. */
INLINE float *found(const Work *w, int64_t head, int64_t index) {
    const Call *c = w->call;
    return c->scratch + c->kv_heads * PADDED(c->rows) * WIDTH + (head * w->parts + index) * PART_SIZE(c->rows);
}

static Work begin(const Call *c) {
    Work w = {.call = c, .nearest = border(c, 0), .farthest = border(c, 0)};
    for (int64_t node = 1; node < c->nodes; node++) {
        const int64_t own = border(c, node);
        w.nearest = own < w.nearest ? own : w.nearest;
        w.farthest = own > w.farthest ? own : w.farthest;
    }
    while (part_start(w.parts) < w.farthest) w.parts++;
    w.parts++;
    return w;
}

static int all_finite(const stored *values, int64_t count) {
    __m256 bad = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        const __m256 nothing = _mm256_mul_ps(load(values + i), _mm256_setzero_ps()); /* or else NaN */
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
    }
    return !_mm256_movemask_ps(bad);
}

static const float *widen(const stored *from, float *to, int64_t count) {
    if (KIND == FLOAT32) return (const float *)from;
    for (int64_t i = 0; i < count; i += LANES) _mm256_storeu_ps(to + i, load(from + i));
    return to;
}

static void attend_part(const Work *w, int64_t head, int64_t index, float *wide) {
    const Call *c = w->call;
    const int64_t rows = c->rows, held = c->prefix + c->nodes;
    const int tail = index == w->parts - 1;
    const int64_t start = tail ? w->nearest : part_start(index);
    const int64_t end = tail ? held : least(part_start(index + 1), w->farthest);
    const stored *keys = c->keys + head * c->keys_head, *values = c->values + head * c->values_head;
    const float *packed = c->scratch + head * PADDED(rows) * WIDTH;
    float *top = found(w, head, index), *total = top + PADDED(rows), *out = total + PADDED(rows);
    memset(total, 0, (PADDED(rows) + rows * WIDTH) * sizeof *total);
    for (int64_t r = 0; r < PADDED(rows); r++) top[r] = -FLT_MAX; /* minus infinity from itself would be NaN */
    for (int64_t first = start, count; first < end; first += count) {
        count = tail ? end - first : BLOCK;
        const int64_t next = first + 2 * BLOCK <= held ? first + BLOCK : first;
        Block b = {
            .keys = keys + first * WIDTH,
            .values = values + first * WIDTH,
            .next_keys = keys + next * WIDTH,
            .next_values = values + next * WIDTH,
            .first = first,
            .count = count,
            .plain = tail ? (c->prefix - first) / LANES * LANES : BLOCK,
            .tail = tail,
            .shown = !tail && first >= w->nearest ? 0 : count,
        };
        if (tail && c->nodes > 1) b.shown = w->nearest < w->farthest ? 0 : c->prefix - first;
        b.broken = !all_finite(b.values + b.shown * WIDTH, (count - b.shown) * WIDTH);
        if (rows > FEW) {
            b.wide_keys = widen(b.keys, wide, count * WIDTH);
            b.wide_values = widen(b.values, wide + TAIL * WIDTH, count * WIDTH);
        }
        for (int64_t row = 0, some; row < rows; row += some) {
            some = tile(rows - row);
            b.query = packed + row * WIDTH;
            b.row = row, b.rows = least(rows - row, some);
            b.top = top + row, b.total = total + row, b.out = out + row * WIDTH;
            attend(c, &b);
        }
    }
}

/* What every thread does. The short parts come last, so that no thread waits long for the others. */
static void take_parts(void *given) {
    Work *w = given;
    const Call *c = w->call;
    const int64_t tasks = c->kv_heads * w->parts, from = w->parts > NEAR ? NEAR : 0;
    const int64_t worker = __atomic_fetch_add(&w->workers, 1, __ATOMIC_RELAXED);
    float *wide = found(w, c->kv_heads, 0) + worker * WIDENED;
    for (int64_t task; (task = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < tasks;)
        attend_part(w, task / w->parts, (task + from) % w->parts, wide);
}

/* Weigh what the parts of a head found for up to eight rows by their sums of weights. */
static void combine(const Work *w, int64_t head, int64_t row) {
    const Call *c = w->call;
    const int64_t rows = c->rows, some = least(rows - row, LANES);
    float *out = c->out + (head * rows + row) * WIDTH, share[LANES];
    __m256 high = _mm256_set1_ps(-FLT_MAX), sum = _mm256_setzero_ps();
    memset(out, 0, some * WIDTH * sizeof *out);
    for (int64_t p = 0; p < w->parts; p++) high = _mm256_max_ps(_mm256_loadu_ps(found(w, head, p) + row), high);
    for (int64_t p = 0; p < w->parts; p++) {
        const float *top = found(w, head, p) + row, *total = top + PADDED(rows);
        const float *mixed = total - row + PADDED(rows) + row * WIDTH;
        const __m256 by = power(_mm256_sub_ps(_mm256_loadu_ps(top), high));
        sum = _mm256_fmadd_ps(by, _mm256_loadu_ps(total), sum);
        _mm256_storeu_ps(share, by);
        for (int64_t r = 0; r < some; r++)
            for (int64_t d = 0; d < WIDTH; d++)
                out[r * WIDTH + d] = fmaf(share[r], mixed[r * WIDTH + d], out[r * WIDTH + d]);
    }
    _mm256_storeu_ps(share, sum);
    for (int64_t r = 0; r < some; r++) /* the sum makes 0 of -0, which depends on what was added that is nothing */
        for (int64_t d = 0; d < WIDTH; d++) out[r * WIDTH + d] = out[r * WIDTH + d] / share[r] + 0.0f;
}

/* How many numbers of scratch a call needs. */
int64_t tswift_scratch(const Call *c) {
    const Work w = begin(c);
    return found(&w, c->kv_heads, 0) - c->scratch + c->threads * WIDENED;
}

void tswift_attend(const Call *c) {
    Work w = begin(c);
    pack(c);
    if (c->threads > 1 && c->kv_heads * w.parts > 2) c->parallel(take_parts, &w, c->threads, 0);
    else take_parts(&w);
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0; row < c->rows; row += LANES) combine(&w, head, row);
}
