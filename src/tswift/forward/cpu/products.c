/* Products of a few rows and the weights of linear layers.

   A row has the same bits whatever other rows are multiplied with it: every sum of a row is taken in an order that
   depends on nothing but the layer's sizes.

   Weights that are floats lie in blocks of BLOCK outputs, all inputs of a block together: [blocks, inputs, BLOCK]. What a
   matrix holds in 16 bits without loss is kept so, for half the bytes, and widened in registers: the products are the
   same. In bfloat16 the weights of two neighbouring vectors take turns, so that one load and two operators widen both.

   Weights that are codes lie as models/codes.py says; tests/forward/plain_products.py defines their product. Rows are rounded to integers, which
   are multiplied as numbers of 16 bits in tiles of up to TILE rows, four inputs at a time, as vectors.h says. Of a tile
   there are, for every block of inputs: the words of its fours, of all rows the first, then the next; and for each row a
   step, the step times the sum of its integers, and that sum.

   program.c includes this file. */

#include <math.h>
#include <stdlib.h>

#include "../../vectors.h"

enum {
    VECTORS = LANES < 8 ? 4 : 2,
    BLOCK = LANES * VECTORS, /* outputs of a block of floats */
    ROWS = REGISTERS * 3 / 4 / VECTORS, /* most rows of floats: so many sums stay in registers */
    TILE = CODED,            /* most rows of integers */
    GROUP = 16,              /* outputs of a group of codes */
    HALVES = GROUP / LANES,  /* vectors of a group */
    MOST = 8 / VECTORS,      /* blocks that are multiplied together, for few rows: so many sums are under way */
    INPUTS = LANES < 8 ? 4 : 1, /* of floats, that are loaded at a time */
    LINE = 64,               /* bytes of a line of the cache */
    AHEAD = 4096,            /* bytes before they are multiplied, weights are fetched */
    ALIGNED = 16,            /* numbers of a line of the cache */
    LARGE = 1 << 17,         /* products of a layer that are worth a second thread */
    PORTION = 1 << 16,       /* products that a thread takes at a time, at least */
    RANGES = 64,             /* most threads that have outputs of their own */
    MANY = 16,               /* rows that are worth a second thread for what is not multiplied */
    MUCH = 1 << 14           /* and numbers of fewer rows */
};

#ifndef FAR_AHEAD
#define FAR_AHEAD 8192 /* and codes; products.py knows where less is better */
#endif

static const float LEAST = 0x1p-100f; /* a block of inputs none of which is larger counts as zeros */

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

typedef struct {
    const void *weight; /* as above; zeros beyond the last output */
    const float *bias;  /* [outputs], or none */
    int64_t inputs, outputs;
    int64_t kind;  /* of weights; for codes, of their scales: FLOAT32 or FLOAT16 */
    int64_t bits;  /* of a code; 0 for floats */
    int64_t block; /* inputs of a block of codes: 16 or 32; of embeddings of floats, 1 if they lie row after row */
    int64_t centre; /* the code that stands for 0, so that no minima are kept; 0 for none */
    int64_t input_bits; /* of rounded inputs: 8 or 16 */
    float scale;   /* a factor of the outputs, which come before the cap; 0 for none */
    float softcap; /* outputs are squeezed to between minus and plus this by a hyperbolic tangent; 0 for none */
} Linear;

/* A product of rows and the matrices of neighbouring layers, of which threads take portions. */
typedef struct {
    const Linear *layers;
    int64_t count;
    const float *input;
    float *output;
    int64_t rows, width; /* outputs of all layers */
    int64_t units, portion;
    char *rounded[2]; /* the rows, for blocks of 32 and of 16 */
    int64_t next_tile;
    int64_t ranges, begun; /* ranges of units, and threads that have begun */
    int64_t *next;         /* unit of each range that is to be taken next */
} Product;

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

INLINE const char *weights(const Linear *l, int64_t block) {
    return (const char *)l->weight + block * l->inputs * BLOCK * (l->kind == FLOAT32 ? 4 : 2);
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

/* Squeeze numbers to between minus and plus a cap by a hyperbolic tangent; NaN stays NaN. */
static void squeeze(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i++) {
        const float size = fabsf(x[i]), rest = power(-2 * (size / cap));
        x[i] = x[i] / (size > 0x1p-100f ? size : 0x1p-100f) * (cap * ((1 - rest) / (1 + rest)));
    }
}

/* Write some of a layer's outputs. */
INLINE void finish(const Linear *l, float *to, float *found, int64_t first, int64_t size) {
    const int64_t count = least(l->outputs - first, size);
    if (l->bias)
        for (int64_t o = 0; o < count; o++) found[o] += l->bias[first + o];
    if (l->scale)
        for (int64_t o = 0; o < count; o++) found[o] *= l->scale;
    if (l->softcap) squeeze(found, count, l->softcap);
    if (count == size) memcpy(to + first, found, size * sizeof *to); /* a number that the compiler knows */
    else memcpy(to + first, found, count * sizeof *to);
}

/* Add the products of some neighbouring inputs. Where they fill a vector, a row's are one load. */
INLINE void add_inputs(
    vector sum[ROWS][MOST * VECTORS], const char *at, const float *input, int64_t inputs, const int some,
    const int blocks, const int rows, const int kind
) {
    const int size = kind == FLOAT32 ? 4 : 2;
#pragma GCC unroll 4
    for (int i = 0; i < some; i++) {
        vector weight[MOST * VECTORS];
        for (int b = 0; b < blocks; b++) {
            const char *pair = at + (b * inputs + i) * BLOCK * size;
            vector *to = weight + b * VECTORS;
            if (i * BLOCK * size % LINE == 0)
                for (int line = 0; line < BLOCK * size; line += LINE) __builtin_prefetch(pair + AHEAD + line);
            for (int v = 0; v < VECTORS; v++)
                if (kind == FLOAT32) to[v] = load((const float *)pair + v * LANES);
                else if (kind == FLOAT16) to[v] = load_halves((const uint16_t *)pair + v * LANES);
                else if (v % 2 == 0) load_pair((const uint16_t *)pair + v * LANES, to + v);
        }
        for (int r = 0; r < rows; r++) {
            const float *own = input + r * inputs;
            const vector x = some == LANES ? spread(load(own)[i]) : spread(own[i]);
            for (int v = 0; v < blocks * VECTORS; v++) sum[r][v] = plus(sum[r][v], weight[v], x);
        }
    }
}

/* So many rows and neighbouring blocks, every sum from the first input to the last. */
INLINE void multiply(
    const Linear *l, const float *input, float *output, int64_t width, int64_t block, const int blocks, const int rows,
    const int kind
) {
    const int size = kind == FLOAT32 ? 4 : 2;
    const char *at = weights(l, block);
    const int64_t inputs = l->inputs;
    vector sum[ROWS][MOST * VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < blocks * VECTORS; v++) sum[r][v] = spread(0);
    int64_t i = 0;
    for (; i + INPUTS <= inputs; i += INPUTS)
        add_inputs(sum, at + i * BLOCK * size, input + i, inputs, INPUTS, blocks, rows, kind);
    for (; i < inputs; i++) add_inputs(sum, at + i * BLOCK * size, input + i, inputs, 1, blocks, rows, kind);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) {
            float found[BLOCK];
            for (int v = 0; v < VECTORS; v++) store(found + v * LANES, sum[r][b * VECTORS + v]);
            finish(l, output + r * width, found, (block + b) * BLOCK, BLOCK);
        }
}

/* How many blocks are multiplied together, for so many sums that they need not wait for each other. */
INLINE int together(int64_t rows) { return rows == 1 ? MOST : rows <= ROWS / 2 ? 2 : 1; }

#define CASE(n, kind) \
    case n: \
        if (n > ROWS) break; \
        if (wide && together(n) > 1) multiply(l, input, output, width, block, together(n), n, kind); \
        else multiply(l, input, output, width, block, 1, n, kind); \
        break;
#define CASES(kind) \
    switch (rows) { \
        CASE(1, kind) CASE(2, kind) CASE(3, kind) CASE(4, kind) CASE(5, kind) CASE(6, kind) \
        CASE(7, kind) CASE(8, kind) CASE(9, kind) CASE(10, kind) CASE(11, kind) CASE(12, kind) \
    }

static void few_rows(
    const Linear *l, const float *input, float *output, int64_t width, int64_t block, int64_t rows, int wide
) {
    if (l->kind == BFLOAT16) CASES(BFLOAT16)
    else if (l->kind == FLOAT16) CASES(FLOAT16)
    else CASES(FLOAT32)
}

/* Some blocks of a layer whose weights are floats. */
static void take_floats(const Product *p, const Linear *l, float *output, int64_t from, int64_t to) {
    const int64_t turns = (p->rows + ROWS - 1) / ROWS, some = (p->rows + turns - 1) / turns;
    for (int64_t block = from, blocks; block < to; block += blocks) {
        const int wide = turns == 1 && block + together(some) <= to;
        blocks = wide ? together(some) : 1;
        for (int64_t row = 0; row < p->rows; row += some) {
            const int64_t left = least(p->rows - row, some);
            few_rows(l, p->input + row * l->inputs, output + row * p->width, p->width, block, left, wide);
        }
    }
}

/* Rows of a tile: all have as many, but for the last. */
INLINE int64_t tile_rows(int64_t rows) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    return (rows + tiles - 1) / tiles;
}

/* Bytes of a tile of rounded rows. */
INLINE int64_t tile_size(const Linear *l, int64_t rows) {
    return rows * l->inputs / l->block * (l->block * (int64_t)sizeof(int16_t) + 3 * (int64_t)sizeof(float));
}

/* Round a block of one row. */
INLINE void round_block(const float *from, char *to, int64_t row, int64_t rows, const int block, const int input_bits) {
    const int32_t shift = 0x4b400000; /* the bits of the number that is added to round to an integer */
    const float highest = input_bits == 8 ? 127 : 32639;
    uint32_t bits[32], largest = 0;
    memcpy(bits, from, block * sizeof *from);
    for (int i = 0; i < block; i++) {
        const uint32_t size = bits[i] & 0x7fffffff; /* in the order of the numbers, and NaN above all */
        largest = size > largest ? size : largest;
    }
    float size;
    memcpy(&size, &largest, sizeof size);
    if (size < LEAST) size = 0;
    const float by = size == 0 ? 0 : highest / size, step = size / highest;
    int32_t words[32], sum = 0;
    integers sums = {0};
    for (int i = 0; i < block; i += LANES) {
        const integers counts = (integers)(load(from + i) * spread(by) + spread(0x1.8p23f)) - shift;
        sums += counts;
        store_integers(words + i, words_of_four(counts));
    }
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (int i = 0; i < block / 2; i++) ((int32_t *)to)[i * rows + row] = words[i / 2 * 4 + i % 2];
    to += rows * block * (int64_t)sizeof(int16_t);
    ((float *)to)[row] = step;
    ((float *)to)[rows + row] = (float)sum * step;
    ((int32_t *)to)[2 * rows + row] = sum;
}

static void round_tile(const Linear *l, const float *input, char *to, int64_t rows) {
    const int64_t blocks = l->inputs / l->block, size = tile_size(l, rows) / blocks;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const float *from = input + row * l->inputs + block * l->block;
            if (l->block == 32 && l->input_bits == 8) round_block(from, to + block * size, row, rows, 32, 8);
            else if (l->block == 32) round_block(from, to + block * size, row, rows, 32, 16);
            else if (l->input_bits == 8) round_block(from, to + block * size, row, rows, 16, 8);
            else round_block(from, to + block * size, row, rows, 16, 16);
        }
}

/* Add the products of a block's codes and a tile of rounded rows. What is loaded of a row serves all vectors of a
   group. */
INLINE void add_block(
    partial exact[HALVES][TILE], const char *codes, const int32_t *x, const int rows, const int bits, int64_t block
) {
    for (int64_t i = 0; i < block / 4; i += 8 / bits, codes += LINE, x += 8 / bits * 2 * rows) {
        integers own[HALVES], wide[HALVES];
        for (int h = 0; h < HALVES; h++) own[h] = load_integers(codes + h * LANES * 4);
#pragma GCC unroll 2
        for (int four = 0; four < 8 / bits; four++)
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                for (int h = 0; h < HALVES; h++) wide[h] = part_of_codes(own[h], four, part, bits);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                    for (int h = 0; h < HALVES; h++)
                        exact[h][r] = plus_codes(exact[h][r], wide[h], x, (four * 2 + part) * rows + r, part);
            }
    }
}

INLINE vector load_as(const char *from, int64_t kind) {
    return kind == FLOAT16 ? load_halves((const uint16_t *)from) : load((const float *)from);
}

/* A tile of rows and a group of outputs. */
INLINE void multiply_codes(
    const Linear *l, const char *tile, float *output, int64_t width, int64_t group, const int rows, const int bits,
    const int64_t block
) {
    const int64_t coded = block * GROUP * bits / 8;
    const int64_t tail = l->kind == FLOAT16 ? 2 * GROUP : 4 * GROUP, size = coded + (l->centre ? 1 : 2) * tail;
    const vector centre = spread(-(float)l->centre);
    const int64_t blocks = l->inputs / block;
    const char *at = (const char *)l->weight + group * blocks * size;
    vector total[HALVES][TILE];
    for (int h = 0; h < HALVES; h++)
        for (int r = 0; r < rows; r++) total[h][r] = spread(0);
    for (int64_t b = 0; b < blocks; b++, at += size) {
        const float *steps = (const float *)(tile + rows * block * 2), *sums = steps + rows;
        const int32_t *inputs = (const int32_t *)(sums + rows);
        for (int64_t line = 0; line < size; line += LINE) __builtin_prefetch(at + FAR_AHEAD + line);
        partial exact[HALVES][TILE];
        for (int h = 0; h < HALVES; h++)
            for (int r = 0; r < rows; r++) exact[h][r] = begun_codes(inputs[r], bits);
        add_block(exact, at, (const int32_t *)tile, rows, bits, block);
        for (int h = 0; h < HALVES; h++) {
            const char *factors = at + coded + h * tail / HALVES;
            const vector scale = load_as(factors, l->kind);
            const vector minimum = l->centre ? scale * centre : load_as(factors + tail, l->kind);
            for (int r = 0; r < rows; r++) {
                const vector found = as_float(total_of_codes(exact[h][r]));
                total[h][r] = plus(total[h][r], scale * spread(steps[r]), found);
                total[h][r] = plus(total[h][r], minimum, spread(sums[r]));
            }
        }
        tile = (const char *)(inputs + rows);
    }
    for (int r = 0; r < rows; r++) {
        float found[GROUP];
        for (int h = 0; h < HALVES; h++) store(found + h * LANES, total[h][r]);
        finish(l, output + r * width, found, group * GROUP, GROUP);
    }
}

#define CODES_OF(n) \
    case n: \
        if (n > TILE) break; \
        if (l->block == 16) multiply_codes(l, tile, output, width, group, n, l->bits, 16); \
        else if (l->bits == 4) multiply_codes(l, tile, output, width, group, n, 4, 32); \
        else multiply_codes(l, tile, output, width, group, n, 8, 32); \
        break;

static void one_tile(const Linear *l, const char *tile, float *output, int64_t width, int64_t group, int64_t rows) {
    switch (rows) {
        CODES_OF(1) CODES_OF(2) CODES_OF(3) CODES_OF(4) CODES_OF(5) CODES_OF(6) CODES_OF(7) CODES_OF(8)
    }
}

/* Some groups of a layer whose weights are codes. */
static void take_codes(const Product *p, const Linear *l, float *output, int64_t from, int64_t to) {
    const int64_t some = tile_rows(p->rows), size = tile_size(l, some);
    for (int64_t group = from; group < to; group++) {
        const char *tile = p->rounded[l->block == 16];
        for (int64_t row = 0; row < p->rows; row += some, tile += size)
            one_tile(l, tile, output + row * p->width, p->width, group, least(p->rows - row, some));
    }
}

/* Blocks or groups of a layer. */
INLINE int64_t units(const Linear *l) {
    const int64_t size = l->bits ? GROUP : BLOCK;
    return (l->outputs + size - 1) / size;
}

/* Neighbouring units, of one layer or of several. */
static void take_units(const Product *p, int64_t first, int64_t end) {
    int64_t before = 0;
    float *output = p->output;
    for (const Linear *l = p->layers; l < p->layers + p->count; l++) {
        const int64_t own = units(l), from = most(first - before, 0), to = least(end - before, own);
        if (from < to) {
            if (l->bits) take_codes(p, l, output, from, to);
            else take_floats(p, l, output, from, to);
        }
        before += own, output += l->outputs;
    }
}

/* What every thread does: all of a range of its own, whose weights are fetched ahead, then what others have left. */
static void take_portions(void *given) {
    Product *p = given;
    const int64_t me = __atomic_fetch_add(&p->begun, 1, __ATOMIC_RELAXED);
    for (int64_t turn = 0; turn < p->ranges; turn++) {
        const int64_t range = (me + turn) % p->ranges, end = p->units * (range + 1) / p->ranges;
        int64_t first;
        while ((first = __atomic_fetch_add(p->next + range, p->portion, __ATOMIC_RELAXED)) < end)
            take_units(p, first, least(first + p->portion, end));
    }
}

static void take_tiles(void *given) {
    Product *p = given;
    const int64_t some = tile_rows(p->rows);
    for (int64_t tile; (tile = __atomic_fetch_add(&p->next_tile, 1, __ATOMIC_RELAXED)) * some < p->rows;)
        for (int small = 0; small < 2; small++)
            for (const Linear *l = p->layers; l < p->layers + p->count; l++)
                if (l->bits && (l->block == 16) == small) {
                    const int64_t row = tile * some;
                    char *to = p->rounded[small] + tile * tile_size(l, some);
                    round_tile(l, p->input + row * l->inputs, to, least(p->rows - row, some));
                    break;
                }
}

/* Memory that a thread keeps, at least so many bytes. */
static char *kept_space(int64_t size) {
    static __thread char *space;
    static __thread int64_t held;
    if (size > held) {
        free(space);
        held = (size + LINE - 1) / LINE * LINE;
        space = aligned_alloc(LINE, held);
        if (!space) abort();
    }
    return space;
}

int64_t tswift_block(void) { return BLOCK; }
int64_t tswift_lanes(void) { return LANES; }

/* Rows [rows, inputs] times the matrices of layers: [rows, all outputs]. */
static void multiply_all(
    const Linear *layers, int64_t count, const float *input, float *output, int64_t rows, parallel_region *parallel,
    int64_t threads
) {
    Product p = {.layers = layers, .count = count, .input = input, .output = output, .rows = rows};
    int64_t space[2] = {0};
    for (const Linear *l = layers; l < layers + count; l++) {
        p.width += l->outputs;
        p.units += units(l);
        if (l->bits) space[l->block == 16] = tile_size(l, 1) * (rows + TILE) / LINE * LINE + LINE;
    }
    if (!rows || !p.width) return;
    if (space[0] + space[1]) {
        p.rounded[0] = kept_space(space[0] + space[1]);
        p.rounded[1] = p.rounded[0] + space[0];
        if (threads > 1 && rows >= MANY) parallel(take_tiles, &p, threads, 0);
        else take_tiles(&p);
    }
    const int together = threads > 1 && layers->inputs * p.width * rows >= LARGE;
    int64_t next[RANGES];
    p.portion = PORTION / (layers->inputs * (p.width / p.units) * rows + 1) / MOST * MOST + MOST;
    p.ranges = together ? least(threads, RANGES) : 1;
    p.next = next;
    for (int64_t range = 0; range < p.ranges; range++) next[range] = p.units * range / p.ranges;
    if (together) parallel(take_portions, &p, threads, 0);
    else take_portions(&p);
}

void tswift_multiply(
    const Linear *l, const float *input, float *output, int64_t rows, parallel_region *parallel, int64_t threads
) {
    multiply_all(l, 1, input, output, rows, parallel, threads);
}

