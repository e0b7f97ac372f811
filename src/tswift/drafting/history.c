/* Where a text stood like this before, and the mean of what was likely there; history.py has the same structures. */

#include <math.h>

#include "../vectors.h"

enum {
    PLACES = 16,  /* most places that are found */
    ORDERS = 16,  /* most lengths of context */
    REPEATED = 2, /* the length, by its number, after which repeats are counted */
    LATE = 24,    /* tokens of late */
    LOOKED = 64   /* logits that are looked at together */
};

static const uint64_t FACTOR = 0x9E3779B97F4A7C15u;

typedef struct {
    const int32_t *text;   /* [room] */
    int32_t *last;         /* [orders, 1 << bits]: the last position by the hash of the tokens up to it, or -1 */
    int32_t *before;       /* [orders, room]: the position of the same hash before each, or -1 */
    const int64_t *orders; /* lengths of context that are hashed, ascending */
    int64_t count, room, bits, kinds, reach;
    double repeats;        /* of late, the share of tokens that came as they had come last after the same few */
} Index;

typedef struct {
    int64_t place, length; /* of the match's last token; in tokens */
} Match;

typedef struct {
    uint16_t *logs;        /* [positions, kept] log-probabilities, float16, highest first */
    void *ids;             /* [positions, kept], uint16, or int32 if wide */
    float *scales;         /* [positions]: what makes logits of log-probabilities */
    int32_t *slots;        /* [vocabulary]: where a token is in the row under way, or anything */
    float *space;          /* [vocabulary] */
    const int64_t *biased; /* [biases] tokens */
    const double *bias;    /* [biases], added to their logits */
    const int64_t *banned; /* [bans] tokens */
    int64_t kept, wide, vocabulary, biases, bans;
} Logits;

/* The hash of the tokens that end at one, going on from the hash of fewer. */
static uint64_t hashed(const int32_t *end, int64_t from, int64_t to, uint64_t *factor, uint64_t value) {
    for (; from < to; from++, *factor *= FACTOR) value += (uint64_t)end[-from] * *factor;
    return value;
}

/* Whether the next token is what came the last time after as many tokens as the order of a kind says. */
static int repeated(const Index *x, int64_t kind) {
    const int64_t before = x->count ? x->before[kind * x->room + x->count - 1] : -1;
    return before >= 0 && x->text[before + 1] == x->text[x->count];
}

/* Index the tokens from `count` on. */
void tswift_index(Index *x, int64_t count) {
    for (; x->count < count; x->count++) {
        x->repeats += (repeated(x, REPEATED) - x->repeats) / LATE;
        uint64_t value = 0, factor = FACTOR;
        for (int64_t kind = 0, done = 0; kind < x->kinds; done = x->orders[kind++]) {
            int32_t *before = x->before + kind * x->room + x->count;
            if (x->orders[kind] > x->count + 1) {
                *before = -1;
                continue;
            }
            value = hashed(x->text + x->count, done, x->orders[kind], &factor, value);
            int32_t *last = x->last + (kind << x->bits) + (value >> (64 - x->bits));
            *before = *last, *last = x->count;
        }
    }
}

/* The best places whose tokens end as a context does, best first: long matches, and of these the late ones. */
static int64_t find(const Index *x, const int32_t *context, int64_t length, int64_t most, Match *found) {
    uint64_t value = 0, factor = FACTOR, values[ORDERS];
    int64_t count = 0, kinds = 0;
    const int32_t *end = context + length - 1;
    if (length > x->orders[x->kinds - 1]) length = x->orders[x->kinds - 1];
    for (int64_t done = 0; kinds < x->kinds && x->orders[kinds] <= length; done = x->orders[kinds++])
        values[kinds] = value = hashed(end, done, x->orders[kinds], &factor, value);
    while (kinds-- && count < most) {
        int64_t at = x->last[(kinds << x->bits) + (values[kinds] >> (64 - x->bits))];
        for (int64_t link = 0; at >= 0 && link < x->reach; link++, at = x->before[kinds * x->room + at]) {
            int64_t same = 0, slot = count;
            while (same < length && same <= at && x->text[at - same] == end[-same]) same++;
            if (same < x->orders[kinds]) continue; /* another context of the same hash */
            for (int64_t i = 0; i < count; i++)
                if (found[i].place == at) same = 0;
            while (slot && (found[slot - 1].length < same ||
                            (found[slot - 1].length == same && found[slot - 1].place < at)))
                slot--;
            if (!same || slot == most) continue;
            if (count < most) count++;
            memmove(found + slot + 1, found + slot, (count - 1 - slot) * sizeof *found);
            found[slot] = (Match){at, same};
        }
    }
    return count;
}

/* e to the power of x, which is at most 0, to float32's precision; nothing below -87. */
static inline float power(float x) {
    const float shift = 0x1.8p23f, two = x * 1.442695041f, bound = two < -126 ? -126 : two;
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
    return two < -126 ? 0 : y;
}

/* Keep the highest of a row of logits at a position; what is not finite has no chance. */
static void think(const Logits *l, const float *logits, int64_t position) {
    float *x = l->space, best[l->kept], sum = 0;
    uint16_t *logs = l->logs + position * l->kept;
    int32_t tokens[l->kept];
    for (int64_t t = 0; t < l->vocabulary; t++) x[t] = logits[t] - logits[t] == 0 ? logits[t] : -INFINITY;
    for (int64_t i = 0; i < l->biases; i++) x[l->biased[i]] += l->bias[i];
    for (int64_t i = 0; i < l->bans; i++) x[l->banned[i]] = -INFINITY;
    for (int64_t i = 0; i < l->kept; i++) best[i] = -INFINITY, tokens[i] = 0;
    for (int64_t first = 0; first < l->vocabulary; first += LOOKED) {
        const int64_t end = first + LOOKED < l->vocabulary ? first + LOOKED : l->vocabulary;
        int higher = 0;
        for (int64_t t = first; t < end; t++) higher |= x[t] > best[l->kept - 1];
        for (int64_t t = first; higher && t < end; t++) {
            int64_t at = l->kept - 1;
            if (!(x[t] > best[at])) continue;
            for (; at > 0 && x[t] > best[at - 1]; at--) best[at] = best[at - 1], tokens[at] = tokens[at - 1];
            best[at] = x[t], tokens[at] = t;
        }
    }
    const float high = best[0] > -INFINITY ? best[0] : 0;
    float sums[16] = {0};
    int64_t t = 0;
    for (; t + 16 <= l->vocabulary; t += 16)
        for (int lane = 0; lane < 16; lane++) sums[lane] += power(x[t + lane] - high);
    for (; t < l->vocabulary; t++) sum += power(x[t] - high);
    for (int lane = 0; lane < 16; lane++) sum += sums[lane];
    const float scale = sum > 0 ? high + logf(sum) : 0;
    l->scales[position] = scale;
    for (int64_t i = 0; i < l->kept; i++) {
        logs[i] = float_to_half(best[i] - scale);
        if (l->wide) ((int32_t *)l->ids)[position * l->kept + i] = tokens[i];
        else ((uint16_t *)l->ids)[position * l->kept + i] = tokens[i];
    }
}

/* Keep rows of logits [rows, vocabulary] at so many positions from the first. */
void tswift_append_logits(const Logits *l, const float *logits, int64_t rows, int64_t first) {
    for (int64_t row = 0; row < rows; row++) think(l, logits + row * l->vocabulary, first + row);
}

/* The weighted mean of some distributions as logits of the tokens that have any chance; returns how many have. */
static int64_t average(
    const Logits *l, const int64_t *places, const double *shares, int64_t count, int32_t *ids, float *logits
) {
    int64_t width = 0;
    double scale = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = places[i] * l->kept;
        scale += shares[i] * l->scales[places[i]];
        for (int64_t j = 0; j < l->kept; j++) {
            const float weight = (float)shares[i] * power(half_to_float(l->logs[row + j]));
            if (!(weight > 0)) continue;
            const int32_t id = l->wide ? ((const int32_t *)l->ids)[row + j] : ((const uint16_t *)l->ids)[row + j];
            const int32_t slot = l->slots[id];
            if (slot >= 0 && slot < width && ids[slot] == id) logits[slot] += weight;
            else l->slots[id] = width, ids[width] = id, logits[width++] = weight;
        }
    }
    for (int64_t j = 0; j < width; j++) logits[j] = logf(logits[j]) + (float)scale;
    return width;
}

/* What may come after some paths below the text. */
typedef struct {
    const Index *index;
    const Logits *kept;
    const int32_t *paths;   /* the text's last tokens and the path, one after the other */
    const int64_t *ends;    /* [count]: where each ends */
    const int64_t *depths;  /* [count]: how many of them are the path's */
    const int64_t *newest;  /* [vocabulary]: position of each token's last occurrence in the text */
    Match *matches;         /* [count] the best one; of no length if there is none */
    int64_t *positions;     /* [count] that come */
    int32_t *ids;           /* [count, width] */
    float *logits;          /* [count, width]; minus infinity beyond the last */
    uint8_t *seen;          /* [count, width]: whether it is in the penalty window; or none */
    int64_t count, width, most, window;
    double favour;          /* a place weighs e to this times one whose match is a token shorter */
} Recall;

void tswift_recall(const Recall *g) {
    for (int64_t p = 0; p < g->count; p++) {
        const int32_t *path = g->paths + (p ? g->ends[p - 1] : 0), *end = g->paths + g->ends[p];
        int32_t *ids = g->ids + p * g->width;
        float *logits = g->logits + p * g->width;
        uint8_t *seen = g->seen + p * g->width;
        Match found[PLACES];
        int64_t places[PLACES];
        double shares[PLACES], sum = 0;
        const int64_t count = find(g->index, path, end - path, g->most, found);
        g->matches[p] = count ? found[0] : (Match){-1, 0};
        g->positions[p] = g->index->count + g->depths[p];
        for (int64_t i = 0; i < count; i++) {
            places[i] = found[i].place;
            sum += shares[i] = exp(g->favour * (found[i].length - found[0].length));
        }
        for (int64_t i = 0; i < count; i++) shares[i] /= sum;
        const int64_t width = average(g->kept, places, shares, count, ids, logits);
        for (int64_t j = width; j < g->width; j++) logits[j] = -INFINITY, ids[j] = 0;
        if (!g->seen) continue;
        for (int64_t j = 0; j < width; j++) seen[j] = g->newest[ids[j]] >= g->positions[p] - g->window;
        for (int64_t back = 1; back <= g->depths[p] && back <= g->window; back++) {
            const int32_t slot = g->kept->slots[end[-back]];
            if (slot >= 0 && slot < width && ids[slot] == end[-back]) seen[slot] = 1;
        }
    }
}
