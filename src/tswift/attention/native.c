/* Attention of a few rows to many keys, computed in float32.

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
#include <math.h>

#include "../vectors.h"

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

enum {
    SUMS = 4,    /* of a score, and of a block's weights */
    SOME = 12,   /* most keys that are scored together */
    BLOCK = 120, /* keys of a block */
    TAIL = (DRAFTED + BLOCK + 128) / SOME * SOME + SOME, /* most keys: so many before the prefix ends, and 128 nodes */
    TILE = 16,   /* what numbers of rows are rounded up to */
    HELD = REGISTERS / 2 / (INTEGERS ? sizeof(partial) / sizeof(integers) : 1), /* most vectors of sums in registers */
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
    return unless_less((vector)((integers)y + ((integers)shifted << 23)), x, -126);
}

/* To the second cache: the nearest awaits fewer lines at a time than memory gives. */
INLINE void fetch(Ahead *a, int computed) {
    for (a->due += computed; a->due >= a->apart; a->due -= a->apart, a->line += LINE) __builtin_prefetch(a->line, 0, 2);
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

/* Add up the lanes of a row. */
INLINE vector folded(vector x, const int dims) {
    if (dims == 4) x = x + swap_pairs(x);
    if (dims > 1) x = x + swap_neighbours(x);
    return x;
}

/* How many keys are scored together, so that their sums fill the registers. */
INLINE int together(const int dims) { return REGISTERS == 32 || INTEGERS ? SOME : dims == 4 ? 8 : 6; }

INLINE vector widened(const stored *from) {
    const uint16_t *halves = (const uint16_t *)from;
    return KIND == BFLOAT16 ? load_bfloats(halves) : KIND == FLOAT16 ? load_halves(halves) : load(from);
}

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
INLINE partial plus_packs(partial sum, integers x, integers y) {
    return KIND == INT8 ? plus_fours(sum, x, y) : plus_pairs(sum, x, y);
}

INLINE integers total_of_packs(partial sum) { return KIND == INT8 ? total_of_fours(sum) : total_of_pairs(sum); }

/* Add up the lanes of each row, of as many keys as it has lanes; their sums take the lanes' places. */
INLINE integers gathered(const partial *sum, const int dims) {
    integers own[4];
    for (int k = 0; k < dims; k++) own[k] = total_of_packs(sum[k]);
    if (dims == 1) return own[0];
    const integers first = firsts(own[0], own[1]), last = lasts(own[0], own[1]);
    if (dims == 2) return first_pairs(first, last) + last_pairs(first, last);
    const integers low = first + last, high = firsts(own[2], own[3]) + lasts(own[2], own[3]);
    return first_pairs(low, high) + last_pairs(low, high);
}

/* The scores of some keys. The query is [WIDTH / PACKED / dims, rows of a tile, dims] of packs, and then for every lane
   what its row's integers stand for. Of 8 bits, what it makes up for keys that have 128 for 0 comes next. */
INLINE void score_some(Block *b, const stored *keys, float *scores, int key, const int dims) {
    const int some = together(dims);
    const float *back = b->query + WIDTH / PACKED / dims * LANES;
    Ahead next = b->next_keys;
    partial sum[SOME];
    float steps[SOME];
    for (int number = 0; number < some * ROW; number += LINE) __builtin_prefetch(keys + some * ROW + number);
    for (int k = 0; k < some; k++) {
        sum[k] = begun(KIND == INT8 ? load_integers(back + LANES) : (integers){0});
        if (KIND == INT8) memcpy(steps + k, keys + k * ROW + WIDTH, sizeof *steps);
    }
    for (int u = 0; u < WIDTH / PACKED; u += dims) {
        fetch(&next, some * dims * PACKED);
        const integers of_rows = load_integers(b->query + u / dims * LANES);
#pragma GCC unroll 12
        for (int k = 0; k < some; k++)
            sum[k] = plus_packs(sum[k], (integers)repeat(keys + k * ROW + PACKED * u, dims), of_rows);
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
        partial sum[MIXED][HELD];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = (partial){0};
        for (int key = 0; key < b->count; key += PACKED) {
            const int32_t *weight = weights + at(key, row, dims);
            integers value[HELD];
            fetch(&next, PACKED * vectors * LANES);
            for (int v = 0; v < vectors; v++)
                value[v] = load_integers(b->packs + key / PACKED * WIDTH + d + v * LANES);
            for (int r = 0; r < rows; r++) {
                const integers own = spread_integer(weight[r * dims]);
                for (int v = 0; v < vectors; v++) sum[r][v] = plus_packs(sum[r][v], own, value[v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) {
                float *to = out + r * WIDTH + d + v * LANES;
                store(to, plus(load(to), as_float(total_of_packs(sum[r][v])), spread(inverse[(row + r) * dims])));
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
        for (int d = 0; d < WIDTH; d += 16)
            if (KIND == INT8) interleave_bytes(packs + d, (const uint8_t *const *)from, d);
            else interleave_shorts(packs + d, (const int16_t *const *)from, d);
    }
}

/* Round weights, and put as many as are packed together in the first one's lane. */
INLINE void mix(Block *b, const float *weights, const float *by, const int dims) {
    _Alignas(64) int32_t shares[TAIL * LANES];
    float inverse[LANES], total[LANES];
    const vector factor = load(by), unit = spread(1) / factor;
    store(inverse, unit);
    const int vectors = (b->count + SUMS - 1) / SUMS * SUMS / dims, held = dims < PACKED ? PACKED / dims : 1;
    integers sum = {0};
    for (int v = 0; v < vectors; v += held) {
        integers all = {0};
        for (int i = 0; i < held; i++) {
            vector weight = load(weights + (v + i) * LANES);
            if (KIND == INT8) weight = weight * repeat(b->value_steps + (v + i) * dims, dims);
            const integers own = rounded(weight * factor);
            if (KIND == INT16) sum += own;
            all |= own << i * dims * BITS;
        }
        if (dims > 1) all |= (integers)swap_neighbours((vector)all) << BITS;
        if (dims == 4 && KIND == INT8) all |= (integers)swap_pairs((vector)all) << BITS * PACKED / 2;
        store_integers(shares + v * LANES, all);
    }
    if (KIND == INT16) {
        if (dims == 4) sum += (integers)swap_pairs((vector)sum);
        if (dims > 1) sum += (integers)swap_neighbours((vector)sum);
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
