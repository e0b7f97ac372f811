/* Attention of a few rows to many keys, computed in float32, on x86 processors with AVX2, FMA and F16C, or with
   AVX-512, with the same bits.

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
   - Each score is added up in four sums, a dimension's being its index modulo 4; each weighted value key by key; and
     the weights of a block in four sums, a key's being its position modulo 4.
   At last the parts are put together in order. The compiler must not fuse a product with a sum on its own.

   Rows are computed in tiles, whose vectors hold 1, 2 or 4 dimensions of each row, so that few rows fill them, too: the
   fewer rows, the wider a piece of a key is copied to all of them by one load.

   Keys and values that are 16-bit integers, steps of a size of their own for every dimension, are multiplied as such, and
   sums of their products are exact in any order. The rows, and the weights of a block, are rounded to integers whose
   sizes add up to SUM at most, so that no sum overflows 32 bits.

   Of 8 bits, every key and every value has a step of its own: a row holds its numbers, from 1 to 255 with 128 for 0, and
   then the step, a float. Rows of queries are rounded to 8 bits, and so are the weights of a block times the values'
   steps. Such products are added up by fours.

   With a window, a node sees the newest `window` positions up to its own. What is before it weighs exactly nothing, so
   parts and blocks in which no node sees anything are left out. With a soft cap, scores are squeezed to between minus
   and plus that by a hyperbolic tangent.

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
#define INT16 3
#define INT8 4
#define INTEGERS (KIND >= INT16)

#if KIND == FLOAT32
typedef float stored;
#elif KIND == INT16
typedef int16_t stored, rounded_query;
#elif KIND == INT8
typedef uint8_t stored;
typedef int8_t rounded_query;
#else
typedef uint16_t stored;
#endif

#ifdef __AVX512F__
typedef __m512 vector;
enum { LANES = 16, HELD = 16 };
INLINE vector spread(float x) { return _mm512_set1_ps(x); }
INLINE vector load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void store(float *to, vector x) { _mm512_storeu_ps(to, x); }
INLINE vector plus(vector sum, vector x, vector y) { return _mm512_fmadd_ps(x, y, sum); }
INLINE vector higher(vector x, vector y) { return _mm512_max_ps(x, y); } /* y if one is NaN */
INLINE vector lower(vector x, vector y) { return _mm512_min_ps(x, y); } /* y if one is NaN */
INLINE int differ(vector x, vector y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_OQ) != 0; }
INLINE vector unless_less(vector y, vector x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, spread(least), _CMP_NLT_UQ), y);
}
INLINE vector times_power(vector y, vector shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}
INLINE vector swap_pairs(vector x) { return _mm512_permute_ps(x, 0x4e); }
INLINE vector swap_neighbours(vector x) { return _mm512_permute_ps(x, 0xb1); }
INLINE vector repeat_two(double x) { return _mm512_castpd_ps(_mm512_set1_pd(x)); }
INLINE vector repeat_four(__m128 x) { return _mm512_broadcast_f32x4(x); }
INLINE vector put(vector into, vector x, int lane, int dims) {
    return _mm512_mask_mov_ps(into, (dims == 2 ? 0x5555 : 0x1111) << lane, x);
}
typedef __m512i integers; /* 32 bits each, or PACKED that are narrower */
INLINE integers nothing(void) { return _mm512_setzero_si512(); }
INLINE integers load_integers(const void *from) { return _mm512_loadu_si512(from); }
INLINE void store_integers(void *to, integers x) { _mm512_storeu_si512(to, x); }
INLINE integers one_pack(int32_t x) { return _mm512_set1_epi32(x); }
INLINE integers two_packs(int64_t x) { return _mm512_set1_epi64(x); }
INLINE integers four_packs(const void *from) { return _mm512_broadcast_i32x4(_mm_loadu_si128(from)); }
/* GCC 12 copies the sums of these products to and fro */
#if KIND == INT8 && defined __AVX512VNNI__
INLINE integers plus_packs(integers sum, integers x, integers y) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
#elif KIND == INT8
INLINE integers fours(integers x, integers y) {
    return _mm512_madd_epi16(_mm512_maddubs_epi16(x, y), _mm512_set1_epi16(1));
}
INLINE integers bits_of(integers x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
#elif defined __AVX512VNNI__
INLINE integers plus_packs(integers sum, integers x, integers y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
}
#else
INLINE integers plus_packs(integers sum, integers x, integers y) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y));
}
#endif
INLINE integers both(integers x, integers y) { return _mm512_add_epi32(x, y); }
INLINE integers pairs_swapped(integers x) { return _mm512_shuffle_epi32(x, 0x4e); }
INLINE integers neighbours_swapped(integers x) { return _mm512_shuffle_epi32(x, 0xb1); }
INLINE integers firsts(integers x, integers y) { return _mm512_unpacklo_epi32(x, y); }
INLINE integers lasts(integers x, integers y) { return _mm512_unpackhi_epi32(x, y); }
INLINE integers first_pairs(integers x, integers y) { return _mm512_unpacklo_epi64(x, y); }
INLINE integers last_pairs(integers x, integers y) { return _mm512_unpackhi_epi64(x, y); }
INLINE integers evens(integers x, integers y) { return _mm512_mask_shuffle_epi32(x, 0xaaaa, y, 0xa0); }
INLINE integers odds(integers x, integers y) { return _mm512_mask_shuffle_epi32(y, 0x5555, x, 0xf5); }
INLINE vector as_float(integers x) { return _mm512_cvtepi32_ps(x); }
INLINE integers rounded(vector x) { return _mm512_cvtps_epi32(x); }
INLINE integers joined(integers low, integers high, int bits) {
    return _mm512_or_si512(low, _mm512_slli_epi32(high, bits));
}
#if KIND == FLOAT32
INLINE vector widened(const stored *from) { return load(from); }
#elif INTEGERS
INLINE vector widened(const stored *from) { return spread(*from); } /* not called */
#elif KIND == BFLOAT16
INLINE vector widened(const stored *from) {
    const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
}
#else
INLINE vector widened(const stored *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
#endif
#else
typedef __m256 vector;
enum { LANES = 8, HELD = 8 };
INLINE vector spread(float x) { return _mm256_set1_ps(x); }
INLINE vector load(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store(float *to, vector x) { _mm256_storeu_ps(to, x); }
INLINE vector plus(vector sum, vector x, vector y) { return _mm256_fmadd_ps(x, y, sum); }
INLINE vector higher(vector x, vector y) { return _mm256_max_ps(x, y); } /* y if one is NaN */
INLINE vector lower(vector x, vector y) { return _mm256_min_ps(x, y); } /* y if one is NaN */
INLINE int differ(vector x, vector y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_NEQ_OQ)); }
INLINE vector unless_less(vector y, vector x, float least) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, spread(least), _CMP_LT_OQ), y);
}
INLINE vector times_power(vector y, vector shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}
INLINE vector swap_pairs(vector x) { return _mm256_permute_ps(x, 0x4e); }
INLINE vector swap_neighbours(vector x) { return _mm256_permute_ps(x, 0xb1); }
INLINE vector repeat_two(double x) { return _mm256_castpd_ps(_mm256_set1_pd(x)); }
INLINE vector repeat_four(__m128 x) { return _mm256_set_m128(x, x); }
INLINE vector put(vector into, vector x, int lane, int dims) {
    const __m256i lanes = _mm256_and_si256(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(dims - 1));
    return _mm256_blendv_ps(into, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(lane))));
}
typedef __m256i integers;
INLINE integers nothing(void) { return _mm256_setzero_si256(); }
INLINE integers load_integers(const void *from) { return _mm256_loadu_si256(from); }
INLINE void store_integers(void *to, integers x) { _mm256_storeu_si256(to, x); }
INLINE integers one_pack(int32_t x) { return _mm256_set1_epi32(x); }
INLINE integers two_packs(int64_t x) { return _mm256_set1_epi64x(x); }
INLINE integers four_packs(const void *from) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(from)); }
#if KIND == INT8 && defined __AVXVNNI__
INLINE integers plus_packs(integers sum, integers x, integers y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
#elif KIND == INT8
INLINE integers fours(integers x, integers y) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1));
}
INLINE integers bits_of(integers x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(mask)); }
#else
INLINE integers plus_packs(integers sum, integers x, integers y) { /* told how, or GCC runs out of registers */
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm256_madd_epi16(x, y)));
    return sum;
}
#endif
INLINE integers both(integers x, integers y) { return _mm256_add_epi32(x, y); }
INLINE integers pairs_swapped(integers x) { return _mm256_shuffle_epi32(x, 0x4e); }
INLINE integers neighbours_swapped(integers x) { return _mm256_shuffle_epi32(x, 0xb1); }
INLINE integers firsts(integers x, integers y) { return _mm256_unpacklo_epi32(x, y); }
INLINE integers lasts(integers x, integers y) { return _mm256_unpackhi_epi32(x, y); }
INLINE integers first_pairs(integers x, integers y) { return _mm256_unpacklo_epi64(x, y); }
INLINE integers last_pairs(integers x, integers y) { return _mm256_unpackhi_epi64(x, y); }
INLINE integers evens(integers x, integers y) { return _mm256_blend_epi32(x, _mm256_shuffle_epi32(y, 0xa0), 0xaa); }
INLINE integers odds(integers x, integers y) { return _mm256_blend_epi32(y, _mm256_shuffle_epi32(x, 0xf5), 0x55); }
INLINE vector as_float(integers x) { return _mm256_cvtepi32_ps(x); }
INLINE integers rounded(vector x) { return _mm256_cvtps_epi32(x); }
INLINE integers joined(integers low, integers high, int bits) {
    return _mm256_or_si256(low, _mm256_slli_epi32(high, bits));
}
#if KIND == FLOAT32
INLINE vector widened(const stored *from) { return load(from); }
#elif INTEGERS
INLINE vector widened(const stored *from) { return spread(*from); } /* not called */
#elif KIND == BFLOAT16
INLINE vector widened(const stored *from) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
}
#else
INLINE vector widened(const stored *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
#endif
#endif

#if KIND == INT8 && !defined __AVX512VNNI__ && (defined __AVX512F__ || !defined __AVXVNNI__)
/* Two products are added up in 16 bits first, which two of 8 bits do not fit in: the highest bits are taken apart. */
INLINE integers plus_packs(integers sum, integers x, integers y) {
    return both(both(sum, fours(bits_of(x, 0x7f), y)), fours(bits_of(x, 0x80), y));
}
#endif

enum {
    SUMS = 4,    /* of a score, and of a block's weights */
    SOME = 12,   /* most keys that are scored together */
    BLOCK = 120, /* keys of a block */
    TAIL = (DRAFTED + BLOCK + 128) / SOME * SOME + SOME, /* most keys: so many before the prefix ends, and 128 nodes */
    TILE = 16,   /* what numbers of rows are rounded up to */
    MIXED = 4,   /* most rows whose weighted values are held in registers */
    WIDENED = 24, /* values that are turned into float32 at a time, to be used while they are in the nearest cache */
    ROW = WIDTH + (KIND == INT8 ? sizeof(float) : 0), /* numbers of a key or a value, and its step */
    LINE = 64 / sizeof(stored), /* numbers of a cache line */
    PACKED = KIND == INT8 ? 4 : 2, /* integers whose products are added up together */
    BITS = 32 / PACKED,
    HIGHEST = KIND == INT8 ? 127 : INT16_MAX, /* of an integer of a query */
    ZERO = 128,  /* what stands for 0 in 8 bits */
    SUM = 65000, /* most that sizes of integers add up to whose products with 16 bits are added up in 32 */
    PART = 480,  /* keys of the first NEAR parts; the next MIDDLE have twice as many, all others 8 times */
    NEAR = 16,
    MIDDLE = 24
};

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

/* One layer's attention; native.py has the same structure. */
typedef struct {
    const float *query;        /* [kv heads, rows, WIDTH] */
    const stored *keys;        /* [kv heads, prefix + nodes, ROW], a head's being keys_head numbers apart */
    const stored *values;      /* like keys */
    const uint8_t *ancestors;  /* [nodes, nodes], or none: every node descends from all before it */
    const int64_t *depths;     /* of nodes: ancestors but itself; none without ancestors */
    float *out;                /* like query */
    float *scratch;            /* as many numbers as tswift_scratch says */
    parallel_region *parallel; /* tswift_parallel of pool.c */
    const float *key_steps, *value_steps; /* of int16: [kv heads, WIDTH], what 1 stands for */
    int64_t keys_head, values_head, kv_heads, rows, prefix, nodes, threads;
    int64_t window;            /* positions that a node sees, its own among them; 0 for all */
    float scale, softcap;      /* the latter of scores as powers of e; 0 for none */
} Call;

/* The scratch: the queries as those who score them want them; what the parts leave (highest scores, sums of weights,
   and sums of weighted values). */
#define PADDED(rows) (((rows) + TILE - 1) / TILE * TILE)
#define PART_SIZE(rows) (2 * PADDED(rows) + (rows) * WIDTH)

/* A call under way. */
typedef struct {
    const Call *call;
    int64_t nearest, farthest; /* borders of the nodes */
    int64_t seen, unseen;      /* the first position that any node sees, and that all do */
    int64_t skipped;           /* parts before that of the former */
    int64_t parts;             /* of a head after these, the tail among them */
    int64_t next;              /* part that is to be taken next */
} Work;

/* What is fetched of the next block while this one is computed, evenly: many lines at once would hold up the loads. */
typedef struct {
    const stored *line; /* the next one */
    int due;            /* numbers of this block that were computed since the last one */
    int apart;          /* so many are computed for every line */
} Ahead;

/* A block of keys, and where its rows are. */
typedef struct {
    const float *query;
    const stored *keys, *values;
    const float *value_steps;              /* of 8 bits, and zeros up to a multiple of SUMS */
    const int32_t *packs;                  /* integers: the values, PACKED of a dimension together */
    Ahead next_keys, next_values;
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
INLINE vector power(vector x) {
    const vector shift = spread(0x1.8p23f); /* what is added to it is rounded to an integer, in the low bits */
    const vector shifted = x + shift, rest = x - (shifted - shift);
    vector y = spread(0.00015353362f);
    y = plus(spread(0.0013398875f), y, rest);
    y = plus(spread(0.009618437f), y, rest);
    y = plus(spread(0.055503324f), y, rest);
    y = plus(spread(0.24022648f), y, rest);
    y = plus(spread(0.6931472f), y, rest);
    y = plus(spread(1.0f), y, rest);
    return unless_less(times_power(y, shifted), x, -126);
}

/* Two blocks of integers, this one and the next, fit the nearest cache; of floats they do not. */
INLINE void fetch(Ahead *a, int computed) {
    for (a->due += computed; a->due >= a->apart; a->due -= a->apart, a->line += LINE)
        _mm_prefetch((const char *)a->line, INTEGERS ? _MM_HINT_T0 : _MM_HINT_T1);
}

INLINE int64_t depth(const Call *c, int64_t node) { return c->depths ? c->depths[node] : node; }

/* Where a node's tail begins. With no more than DRAFTED nodes, whatever the prefix, it is before its end. */
INLINE int64_t border(const Call *c, int64_t node) {
    const int64_t far = c->prefix + depth(c, node) - DRAFTED, least = far < c->prefix ? far : c->prefix;
    return least < 0 ? 0 : least / BLOCK * BLOCK;
}

/* The sum to which a key's weight is added: its position modulo 4. */
INLINE int place(const Call *c, int64_t slot) {
    return (slot < c->prefix ? slot : c->prefix + depth(c, slot - c->prefix)) % SUMS;
}

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

/* The first position that a node sees. */
INLINE int64_t sight(const Call *c, int64_t node) {
    return c->window ? most(c->prefix + depth(c, node) - c->window + 1, 0) : 0;
}

/* How many of a block's keys come before what a node sees of it: its tail or what is before that, and its window. Those
   that are drafted are not among them. */
INLINE int unseen(const Call *c, const Block *b, int64_t node) {
    const int64_t from = border(c, node), visible = least(sight(c, node), c->prefix);
    if (b->tail) return most(from, visible) - b->first;
    return b->first < from ? most(least(visible - b->first, b->count), 0) : b->count;
}

/* Nodes do not see what is beside or after them; what is before all nodes they do. */
INLINE int sees(const Call *c, int64_t node, int64_t slot) {
    const int64_t other = slot - c->prefix;
    if (other >= 0 && c->prefix + depth(c, other) < sight(c, node)) return 0;
    return other < 0 || (c->ancestors ? c->ancestors[node * c->nodes + other] : other <= node);
}

/* Where the score of a key and a row is: a vector holds as many keys as dimensions of a row. */
INLINE int at(int key, int row, const int dims) { return key / dims * LANES + row * dims + key % dims; }

static void hide(const Call *c, const Block *b, float *scores, const int dims) {
    for (int r = 0; r < b->rows; r++) {
        const int64_t node = (b->row + r) % c->nodes;
        const int before = unseen(c, b, node), drafted = c->prefix - b->first;
        for (int key = 0; key < before; key++) scores[at(key, r, dims)] = -INFINITY;
        for (int key = drafted; key < b->count; key++)
            if (!sees(c, node, b->first + key)) scores[at(key, r, dims)] = -INFINITY;
    }
}

INLINE void shrink(float *out, float by) {
    for (int d = 0; d < WIDTH; d++) out[d] *= by;
}

/* A piece of a key for every row of a tile. */
INLINE vector repeat(const float *from, const int dims) {
    double two;
    memcpy(&two, from, sizeof two);
    return dims == 1 ? spread(*from) : dims == 2 ? repeat_two(two) : repeat_four(_mm_loadu_ps(from));
}

/* Add up the lanes of a row. */
INLINE vector folded(vector x, const int dims) {
    if (dims == 4) x = x + swap_pairs(x);
    if (dims > 1) x = x + swap_neighbours(x);
    return x;
}

/* How many keys are scored together, so that their sums fill the registers. */
INLINE int together(const int dims) { return LANES == 16 || INTEGERS ? SOME : dims == 4 ? 8 : 6; }

/* Keys or values as they are multiplied; they stay where they are if that is what they are. */
#if INTEGERS
typedef stored scored;
INLINE const scored *widen(const stored *from, scored *to, int count) { return from; }
#else
typedef float scored;
INLINE const scored *widen(const stored *from, scored *to, int count) {
    if (KIND == FLOAT32) return (const scored *)from;
    for (int i = 0; i < count * WIDTH; i += LANES) store(to + i, widened(from + i));
    return to;
}
#endif

#if INTEGERS
INLINE integers repeat_packs(const stored *from, const int dims) {
    int32_t one;
    int64_t two;
    memcpy(&one, from, sizeof one);
    memcpy(&two, from, sizeof two);
    return dims == 1 ? one_pack(one) : dims == 2 ? two_packs(two) : four_packs(from);
}

/* Add up the lanes of each row, of as many keys as it has lanes; their sums take the lanes' places. */
INLINE integers gathered(const integers *sum, const int dims) {
    if (dims == 1) return sum[0];
    if (dims == 2) return both(evens(sum[0], sum[1]), odds(sum[0], sum[1]));
    const integers low = both(firsts(sum[0], sum[1]), lasts(sum[0], sum[1]));
    const integers high = both(firsts(sum[2], sum[3]), lasts(sum[2], sum[3]));
    return both(first_pairs(low, high), last_pairs(low, high));
}

/* The scores of some keys. The query is [WIDTH / PACKED / dims, rows of a tile, dims] of packs, and then for every lane
   what its row's integers stand for. Of 8 bits, what it makes up for keys that have 128 for 0 comes next. */
INLINE void score_some(Block *b, const stored *keys, float *scores, int key, const int dims) {
    const int some = together(dims);
    const float *back = b->query + WIDTH / PACKED / dims * LANES;
    Ahead next = b->next_keys;
    integers sum[SOME];
    float steps[SOME];
    for (int k = 0; k < some; k++) {
        sum[k] = KIND == INT8 ? load_integers(back + LANES) : nothing();
        if (KIND == INT8) memcpy(steps + k, keys + k * ROW + WIDTH, sizeof *steps);
    }
    for (int u = 0; u < WIDTH / PACKED; u += dims) {
        fetch(&next, some * dims * PACKED);
        const integers of_rows = load_integers(b->query + u / dims * LANES);
#pragma GCC unroll 12
        for (int k = 0; k < some; k++)
            sum[k] = plus_packs(sum[k], repeat_packs(keys + k * ROW + PACKED * u, dims), of_rows);
    }
    for (int k = 0; k < some; k += dims) {
        vector score = as_float(gathered(sum + k, dims)) * load(back);
        if (KIND == INT8) score = score * repeat(steps + k, dims);
        store(scores + (key + k) / dims * LANES, score);
    }
    b->next_keys = next;
}
#else
/* The scores of some keys. The query is [WIDTH / dims, rows of a tile, dims]. With one dimension, two of the four sums
   at a time, so that they stay in registers. */
INLINE void score_some(Block *b, const float *keys, float *scores, int key, const int dims) {
    const int some = together(dims), held = dims == 4 ? 1 : 2;
    Ahead next = b->next_keys;
    vector score[SOME];
    for (int turn = 0; turn < (dims == 1 ? 2 : 1); turn++) {
        vector sum[SOME][2];
        for (int k = 0; k < some; k++) sum[k][0] = sum[k][1] = spread(0);
        for (int d = 0; d < WIDTH; d += SUMS) {
            fetch(&next, some * SUMS);
            for (int h = 0; h < held; h++) {
                const int first = d + (dims == 1 ? turn + 2 * h : 2 * h);
                const vector of_rows = load(b->query + first / dims * LANES);
#pragma GCC unroll 12
                for (int k = 0; k < some; k++)
                    sum[k][h] = plus(sum[k][h], repeat(keys + k * WIDTH + first, dims), of_rows);
            }
        }
        for (int k = 0; k < some; k++) {
            vector both = sum[k][0];
            if (held == 2) both = both + sum[k][1];
            if (dims == 1 && turn == 0) store(scores + (key + k) * LANES, both);
            else if (dims == 1) store(scores + (key + k) * LANES, load(scores + (key + k) * LANES) + both);
            else score[k] = folded(both, dims);
        }
    }
    if (dims > 1)
        for (int k = 0; k < some; k += dims) {
            for (int lane = 1; lane < dims; lane++) score[k] = put(score[k], score[k + lane], lane, dims);
            store(scores + (key + k) / dims * LANES, score[k]);
        }
    b->next_keys = next;
}

#endif

/* The hyperbolic tangent of what a cap of scores divides, times it: of x below 0 or above. */
INLINE vector squeezed(vector score, float cap) {
    const vector x = score / spread(cap), size = higher(x, -x);
    const vector rest = power(size * spread(-2.885390082f)); /* e to the power of -2 x */
    return spread(cap) * (x / higher(size, spread(FLT_MIN))) * ((spread(1) - rest) / (spread(1) + rest));
}

INLINE void score_all(const Call *c, Block *b, float *scores, const int dims) {
    const int some = together(dims);
    scored wide[SOME * WIDTH];
    int key = 0;
    for (; key + some <= b->count; key += some)
        score_some(b, widen(b->keys + key * ROW, wide, some), scores, key, dims);
    if (key < b->count) {
        stored rest[SOME * ROW] = {0};
        memcpy(rest, b->keys + key * ROW, (b->count - key) * ROW * sizeof *rest);
        score_some(b, widen(rest, wide, some), scores, key, dims);
    }
    if (c->softcap)
        for (int v = 0; v * dims < b->count; v++)
            store(scores + v * LANES, squeezed(load(scores + v * LANES), c->softcap * 1.442695041f));
    for (key = b->count; key % SUMS; key++)
        for (int r = 0; r < LANES / dims; r++) scores[at(key, r, dims)] = -INFINITY;
}

INLINE void weigh(const Call *c, const Block *b, float *scores, float *by, const int dims) {
    const int held = SUMS / dims, vectors = (b->count + SUMS - 1) / SUMS * held;
    float each[SUMS * LANES];
    for (int i = 0; i < LANES; i++) each[i] = b->top[i / dims], each[LANES + i] = b->total[i / dims];
    const vector before = load(each);
    const vector lowest = spread(-FLT_MAX);
    vector high[4] = {lowest, lowest, lowest, lowest}, total = load(each + LANES);
    int v = 0;
    for (; v + 4 <= vectors; v += 4)
        for (int i = 0; i < 4; i++) high[i] = higher(load(scores + (v + i) * LANES), high[i]);
    for (; v < vectors; v++) high[0] = higher(load(scores + v * LANES), high[0]);
    vector highest = higher(higher(high[0], high[1]), higher(high[2], high[3]));
    if (dims == 4) highest = higher(highest, swap_pairs(highest));
    if (dims > 1) highest = higher(highest, swap_neighbours(highest));
    const vector own = highest;
    highest = higher(highest, before);
    if (differ(highest, before)) {
        const vector share = power(before - highest);
        store(each, highest);
        store(each + LANES, share);
        total = total * share;
        for (int r = 0; r < LANES / dims; r++) b->top[r] = each[r * dims];
        for (int r = 0; r < b->rows; r++) shrink(b->out + r * WIDTH, each[LANES + r * dims]);
    }
    vector sum[SUMS], largest = spread(0);
    for (int i = 0; i < held; i++) sum[i] = spread(0);
    for (v = 0; v < vectors; v += held)
        for (int i = 0; i < held; i++) {
            const vector weight = power(load(scores + (v + i) * LANES) - highest);
            store(scores + (v + i) * LANES, weight);
            if (KIND == INT8) largest = higher(weight * repeat(b->value_steps + (v + i) * dims, dims), largest);
            if (v / held * SUMS < b->plain) sum[i] = sum[i] + weight;
        }
    if (b->tail) {
        for (int i = 0; i < held; i++) store(each + i * LANES, sum[i]);
        for (int key = b->plain; key < b->count; key++) {
            const int to = place(c, b->first + key);
            for (int r = 0; r < b->rows; r++) each[at(to, r, dims)] += scores[at(key, r, dims)];
        }
        for (int i = 0; i < held; i++) sum[i] = load(each + i * LANES);
    }
    if (dims == 1) sum[0] = sum[0] + sum[2], sum[1] = sum[1] + sum[3];
    if (dims < 4) sum[0] = sum[0] + sum[1];
    const vector found = folded(sum[0], dims);
    if (KIND == INT16) {
        const vector of_sum = spread(SUM) / found, of_most = spread(INT16_MAX) / power(own - highest);
        store(by, lower(spread(0x1p100f), lower(of_most, of_sum)));
    }
    if (KIND == INT8) {
        if (dims == 4) largest = higher(largest, swap_pairs(largest));
        if (dims > 1) largest = higher(largest, swap_neighbours(largest));
        store(by, lower(spread(0x1p126f), spread(UINT8_MAX) / largest));
    }
    if (KIND != INT16) total = total + found; /* there, what rounding leaves of weights: see mix */
    store(each, total);
    for (int r = 0; r < LANES / dims; r++) b->total[r] = each[r * dims];
}

/* Mix for all rows, as many at a time as the sums of stay in registers: numbers that the compiler knows. */
#define MIX_ALL(...) \
    for (int row = 0, some; row < b->rows; row += some) { \
        const int left = b->rows - row, turns = (left + MIXED - 1) / MIXED; \
        some = (left + turns - 1) / turns; \
        if (some == 4) mix_rows(b, __VA_ARGS__, row, 4, dims); \
        else if (some == 3) mix_rows(b, __VA_ARGS__, row, 3, dims); \
        else if (some == 2) mix_rows(b, __VA_ARGS__, row, 2, dims); \
        else mix_rows(b, __VA_ARGS__, row, 1, dims); \
    }

#if INTEGERS
INLINE void mix_rows(
    Block *b, const int32_t *weights, const float *inverse, int row, const int rows, const int dims
) {
    float *out = b->out + row * WIDTH;
    int vectors = HELD / (rows > 2 ? MIXED : rows);
    while (WIDTH % (vectors * LANES)) vectors /= 2;
    Ahead next = b->next_values;
    for (int d = 0; d < WIDTH; d += vectors * LANES) {
        integers sum[MIXED][HELD];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = nothing();
        for (int key = 0; key < b->count; key += PACKED) {
            const int32_t *weight = weights + at(key, row, dims);
            integers value[HELD];
            fetch(&next, PACKED * vectors * LANES);
            for (int v = 0; v < vectors; v++)
                value[v] = load_integers(b->packs + key / PACKED * WIDTH + d + v * LANES);
            for (int r = 0; r < rows; r++) {
                const integers own = one_pack(weight[r * dims]);
                for (int v = 0; v < vectors; v++) sum[r][v] = plus_packs(sum[r][v], own, value[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) {
                float *to = out + r * WIDTH + d + v * LANES;
                store(to, plus(load(to), as_float(sum[r][v]), spread(inverse[(row + r) * dims])));
            }
    }
    b->next_values = next;
}

/* Values of a block, PACKED of a dimension together. Behind the last one it does not matter which: their weight is 0.
   The step of what is broken is 0, or it would break those who do not see it. */
static void pack_values(const Block *b, int32_t *packs, float *steps) {
    for (int key = 0; key < b->count; key += PACKED, packs += WIDTH) {
        const stored *from[PACKED];
        for (int k = 0; k < PACKED; k++) from[k] = b->values + (key + k < b->count ? key + k : key) * ROW;
        for (int k = 0; KIND == INT8 && k < PACKED; k++) {
            float step;
            memcpy(&step, from[k] + WIDTH, sizeof step);
            steps[key + k] = step == step && key + k < b->count ? step : 0;
        }
        for (int d = 0; d < WIDTH; d += 16) {
#if KIND == INT8
            __m128i x[PACKED];
            for (int k = 0; k < PACKED; k++) x[k] = _mm_loadu_si128((const __m128i *)(from[k] + d));
            const __m128i signs = _mm_set1_epi8(ZERO - 256);
            const __m128i first = _mm_unpacklo_epi8(x[0], x[1]), second = _mm_unpacklo_epi8(x[2], x[3]);
            const __m128i third = _mm_unpackhi_epi8(x[0], x[1]), fourth = _mm_unpackhi_epi8(x[2], x[3]);
            const __m128i made[] = {
                _mm_unpacklo_epi16(first, second), _mm_unpackhi_epi16(first, second),
                _mm_unpacklo_epi16(third, fourth), _mm_unpackhi_epi16(third, fourth),
            };
            for (int i = 0; i < PACKED; i++)
                _mm_storeu_si128((__m128i *)(packs + d + 4 * i), _mm_xor_si128(made[i], signs));
#else
            __m256i x[PACKED]; /* their second and third quarters change places, as halves are interleaved apart */
            for (int k = 0; k < PACKED; k++)
                x[k] = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(from[k] + d)), 0xd8);
            _mm256_storeu_si256((__m256i *)(packs + d), _mm256_unpacklo_epi16(x[0], x[1]));
            _mm256_storeu_si256((__m256i *)(packs + d + 8), _mm256_unpackhi_epi16(x[0], x[1]));
#endif
        }
    }
}

/* Round weights, and put as many as are packed together in the first one's lane. */
INLINE void mix(Block *b, const float *weights, const float *by, const int dims) {
    _Alignas(64) int32_t shares[TAIL * LANES];
    float inverse[LANES], total[LANES];
    const vector factor = load(by), unit = spread(1) / factor;
    store(inverse, unit);
    const int vectors = (b->count + SUMS - 1) / SUMS * SUMS / dims, held = dims < PACKED ? PACKED / dims : 1;
    integers sum = nothing();
    for (int v = 0; v < vectors; v += held) {
        integers all = nothing();
        for (int i = 0; i < held; i++) {
            vector weight = load(weights + (v + i) * LANES);
            if (KIND == INT8) weight = weight * repeat(b->value_steps + (v + i) * dims, dims);
            const integers own = rounded(weight * factor);
            if (KIND == INT16) sum = both(sum, own);
            all = joined(all, own, i * dims * BITS);
        }
        if (dims > 1) all = joined(all, neighbours_swapped(all), BITS);
        if (dims == 4 && PACKED == 4) all = joined(all, pairs_swapped(all), 2 * BITS);
        store_integers(shares + v * LANES, all);
    }
    if (KIND == INT16) {
        if (dims == 4) sum = both(sum, pairs_swapped(sum));
        if (dims > 1) sum = both(sum, neighbours_swapped(sum));
        store(total, as_float(sum) * unit);
        for (int r = 0; r < LANES / dims; r++) b->total[r] += total[r * dims];
    }
    MIX_ALL(shares, inverse)
}
#else
/* Add the weighted values of some keys to what some rows have. */
INLINE void mix_rows(
    Block *b, const float *values, const float *weights, int from, int to, int row, const int rows, const int dims
) {
    float *out = b->out + row * WIDTH;
    int vectors = rows > 2 ? HELD / MIXED : HELD / rows;
    while (WIDTH % (vectors * LANES)) vectors /= 2;
    Ahead next = b->next_values;
    for (int d = 0; d < WIDTH; d += vectors * LANES) {
        vector sum[MIXED][HELD];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = load(out + r * WIDTH + d + v * LANES);
        for (int key = from; key < to; key++) {
            const float *weight = weights + at(key, row, dims);
            vector value[HELD];
            fetch(&next, vectors * LANES);
            for (int v = 0; v < vectors; v++) value[v] = load(values + (key - from) * WIDTH + d + v * LANES);
            for (int r = 0; r < rows; r++) {
                const vector own = spread(weight[r * dims]);
                for (int v = 0; v < vectors; v++) sum[r][v] = plus(sum[r][v], own, value[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) store(out + r * WIDTH + d + v * LANES, sum[r][v]);
    }
    b->next_values = next;
}

/* The same without what a row does not see: a weight of nothing times infinity would not be nothing. */
static __attribute__((noinline)) void mix_seen(const Call *c, Block *b, const float *weights, const int dims) {
    float wide[WIDTH];
    for (int r = 0; r < b->rows; r++) {
        const int64_t node = (b->row + r) % c->nodes;
        for (int key = unseen(c, b, node); key < b->count; key++)
            if (sees(c, node, b->first + key))
                mix_rows(b, widen(b->values + key * WIDTH, wide, 1), weights, key, key + 1, r, 1, dims);
    }
}

INLINE void mix(const Call *c, Block *b, const float *weights, const int dims) {
    if (b->broken) return mix_seen(c, b, weights, dims);
    float wide[WIDENED * WIDTH];
    for (int from = 0, to; from < b->count; from = to) {
        to = KIND == FLOAT32 || from + WIDENED > b->count ? b->count : from + WIDENED;
        const float *values = widen(b->values + from * WIDTH, wide, to - from);
        MIX_ALL(values, weights, from, to)
    }
}
#endif

INLINE void attend_tile(const Call *c, Block *b, const int dims) {
    _Alignas(64) float scores[TAIL * LANES];
    score_all(c, b, scores, dims);
    if (b->shown < b->count) hide(c, b, scores, dims);
#if INTEGERS
    float by[LANES];
    weigh(c, b, scores, by, dims);
    mix(b, scores, by, dims);
#else
    weigh(c, b, scores, 0, dims);
    mix(c, b, scores, dims);
#endif
}

static void attend(const Call *c, Block *b) {
    if (b->rows > LANES / 2) attend_tile(c, b, 1);
    else if (b->rows > LANES / 4) attend_tile(c, b, 2);
    else attend_tile(c, b, 4);
}

/* How many of the rows that are left come next: half a vector's and a few cost less than a vector's that are not all
   there. */
INLINE int64_t tile(int64_t left) {
    return left > LANES * 3 / 4 ? LANES : left > LANES / 4 ? LANES / 2 : LANES / 4;
}

INLINE int tiles(int64_t rows) {
    int count = 0;
    for (; rows > 0; rows -= tile(rows)) count++;
    return count;
}

INLINE int times(int64_t rows, int64_t at_once) { return (rows + at_once - 1) / at_once; }

/* Lay out the rows, scaled, as those who score them want it. */
#if INTEGERS
static void pack(const Call *c) {
    const int64_t rows = c->rows;
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0, some; row < rows; row += some) {
            const float *query = c->query + (head * rows + row) * WIDTH, *steps = c->key_steps + head * WIDTH;
            float *packed = c->scratch + (head * PADDED(rows) + row) * WIDTH;
            some = tile(rows - row);
            const int64_t dims = LANES / some, left = least(rows - row, some);
            float *back = packed + some * WIDTH / PACKED;
            int32_t *start = (int32_t *)(back + LANES);
            memset(packed, 0, some * WIDTH * sizeof *packed);
            for (int64_t r = 0; r < left; r++) {
                float scaled[WIDTH], sum = 0, most = 0;
                for (int64_t d = 0; d < WIDTH; d++) {
                    scaled[d] = query[r * WIDTH + d] * (KIND == INT16 ? steps[d] : 1) * c->scale;
                    sum += fabsf(scaled[d]), most = fabsf(scaled[d]) > most ? fabsf(scaled[d]) : most;
                }
                const float by = most / HIGHEST > sum / SUM ? most / HIGHEST : sum / SUM; /* the latter if it is NaN */
                rounded_query counts[WIDTH], *to = (rounded_query *)packed + r * dims * PACKED;
                int32_t all = 0;
                for (int64_t i = 0; i < dims; i++) back[r * dims + i] = by;
                for (int64_t d = 0; d < WIDTH; d++) {
                    const float shifted = scaled[d] / by + 0x1.8p23f; /* rounded to an integer, in the low bits */
                    int32_t bits;
                    memcpy(&bits, &shifted, sizeof bits);
                    counts[d] = bits;
                    all += counts[d];
                }
                if (KIND == INT8) start[r * dims] = -ZERO * all;
                for (int64_t d = 0; d < WIDTH; d += PACKED * dims, to += PACKED * LANES)
                    memcpy(to, counts + d, PACKED * dims * sizeof *to);
            }
        }
}
#else
static void pack(const Call *c) {
    const int64_t rows = c->rows;
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0, some; row < rows; row += some) {
            const float *query = c->query + (head * rows + row) * WIDTH;
            float *packed = c->scratch + (head * PADDED(rows) + row) * WIDTH;
            some = tile(rows - row);
            const int64_t dims = LANES / some, left = least(rows - row, some);
            memset(packed, 0, some * WIDTH * sizeof *packed);
            for (int64_t r = 0; r < left; r++)
                for (int64_t d = 0; d < WIDTH; d += dims)
                    for (int64_t i = 0; i < dims; i++)
                        packed[d / dims * LANES + r * dims + i] = query[r * WIDTH + d + i] * c->scale;
        }
}
#endif

/* Where a part begins. Only the position decides, not the length: see above. Of a window there are as many short parts
   everywhere. */
static int64_t part_start(const Call *c, int64_t index) {
    if (c->window) return PART * index;
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
    Work w = {.call = c, .nearest = border(c, 0), .farthest = border(c, 0), .seen = sight(c, 0), .unseen = sight(c, 0)};
    for (int64_t node = 1; node < c->nodes; node++) {
        const int64_t own = border(c, node), first = sight(c, node);
        w.nearest = least(own, w.nearest);
        w.farthest = most(own, w.farthest);
        w.seen = least(first, w.seen);
        w.unseen = most(first, w.unseen);
    }
    w.skipped = w.seen / PART; /* 0 without a window */
    while (part_start(c, w.skipped + w.parts) < w.farthest) w.parts++;
    w.parts++;
    return w;
}

static int all_finite(const stored *values, int64_t count) {
    int bad = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        float each[LANES];
        store(each, widened(values + i));
        for (int lane = 0; lane < LANES; lane++) bad |= each[lane] * 0 != 0;
    }
    return !bad;
}

static void attend_part(const Work *w, int64_t head, int64_t index) {
    const Call *c = w->call;
    const int64_t rows = c->rows, held = c->prefix + c->nodes;
    const int tail = index == w->parts - 1;
    const int64_t start = tail ? w->nearest : most(part_start(c, w->skipped + index), w->seen / BLOCK * BLOCK);
    const int64_t end = tail ? held : least(part_start(c, w->skipped + index + 1), w->farthest);
    const stored *keys = c->keys + head * c->keys_head, *values = c->values + head * c->values_head;
    const float *packed = c->scratch + head * PADDED(rows) * WIDTH;
    float *top = found(w, head, index), *total = top + PADDED(rows), *out = total + PADDED(rows);
    memset(total, 0, (PADDED(rows) + rows * WIDTH) * sizeof *total);
    for (int64_t r = 0; r < PADDED(rows); r++) top[r] = -FLT_MAX; /* minus infinity from itself would be NaN */
#if INTEGERS
    _Alignas(64) int32_t packs[(TAIL + SUMS) / PACKED * WIDTH];
#else
    const int32_t *packs = 0;
#endif
    float value_steps[TAIL + SUMS];
    for (int64_t first = start, count; first < end; first += count) {
        count = tail ? end - first : BLOCK;
        const int64_t next = first + 2 * BLOCK <= held ? first + BLOCK : first;
        Block b = {
            .keys = keys + first * ROW,
            .values = values + first * ROW,
            .value_steps = value_steps,
            .packs = packs,
            /* fetched piece by piece while this block is worked on: every tile scores all of its keys */
            .next_keys = {keys + next * ROW, 0, LINE * WIDTH / ROW * tiles(rows)},
            .next_values = {values + next * ROW, 0, LINE * WIDTH / ROW * times(rows, MIXED)},
            .first = first,
            .count = count,
            .plain = tail ? (c->prefix - first) / SUMS * SUMS : BLOCK,
            .tail = tail,
            .shown = !tail && first >= w->nearest ? 0 : count,
        };
        if (tail && c->nodes > 1) b.shown = w->nearest < w->farthest ? 0 : c->prefix - first;
        if (first < w->unseen) b.shown = 0;
#if INTEGERS
        pack_values(&b, packs, value_steps);
#endif
        b.broken = !INTEGERS && !all_finite(b.values + b.shown * WIDTH, (count - b.shown) * WIDTH);
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
    for (int64_t task; (task = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < tasks;)
        attend_part(w, task / w->parts, (task + from) % w->parts);
}

/* Weigh what the parts of a head found for up to a vector of rows by their sums of weights. */
static void combine(const Work *w, int64_t head, int64_t row) {
    const Call *c = w->call;
    const int64_t rows = c->rows, some = least(rows - row, LANES);
    float *out = c->out + (head * rows + row) * WIDTH, share[LANES];
    vector high = spread(-FLT_MAX), sum = spread(0);
    memset(out, 0, some * WIDTH * sizeof *out);
    for (int64_t p = 0; p < w->parts; p++) high = higher(load(found(w, head, p) + row), high);
    for (int64_t p = 0; p < w->parts; p++) {
        const float *top = found(w, head, p) + row, *total = top + PADDED(rows);
        const float *mixed = total - row + PADDED(rows) + row * WIDTH;
        const vector by = power(load(top) - high);
        sum = plus(sum, by, load(total));
        store(share, by);
        for (int64_t r = 0; r < some; r++)
            for (int64_t d = 0; d < WIDTH; d++)
                out[r * WIDTH + d] = fmaf(share[r], mixed[r * WIDTH + d], out[r * WIDTH + d]);
    }
    store(share, sum);
    for (int64_t r = 0; r < some; r++) /* the sum makes 0 of -0, which depends on what was added that is nothing */
        for (int64_t d = 0; d < WIDTH; d++) out[r * WIDTH + d] = out[r * WIDTH + d] / share[r] * (KIND == INT16 ? c->value_steps[head * WIDTH + d] : 1) + 0.0f;
}

/* How many numbers of scratch a call needs. */
int64_t tswift_scratch(const Call *c) {
    const Work w = begin(c);
    return found(&w, c->kv_heads, 0) - c->scratch;
}

void tswift_attend(const Call *c) {
    Work w = begin(c);
    pack(c);
    if (c->threads > 1 && c->kv_heads * w.parts > 2) c->parallel(take_parts, &w, c->threads, 0);
    else take_parts(&w);
    for (int64_t head = 0; head < c->kv_heads; head++)
        for (int64_t row = 0; row < c->rows; row += LANES) combine(&w, head, row);
}
