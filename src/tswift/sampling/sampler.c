/* The sampling rule over rows of logits: penalty, filters, noise, and the best few tokens of each row; see sampler_c.py,
   which has the same structure, and proves why what is drawn is what PyTorch draws.

   Noise is computed only for tokens that the filters keep, and of these only for those that could be among the best
   with it: with u = 1 - m / 2^52 the noise -log(-log(u)) is at most -log(1 - u), which the highest bit of m bounds. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,
    MOST_RANKED = 17,      /* most candidates of a row, and one that tells the lead of the last */
    LARGE = 1 << 14 /* logits that are worth a second thread */
};

typedef void parallel_region(void (*work)(void *), void *given, unsigned threads, unsigned flags);

static const int64_t FAR = -((int64_t)1 << 62); /* position of a token that is not in the text */
static const double NEAR = 1e-8;       /* chances, or logits, that may fall on another side of an edge in PyTorch */
static const double LOG_2 = 0.69315;   /* a bit more than it is */
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

typedef struct {
    /* these four first, as program.c moves them on from level to level */
    const void *logits;         /* [rows, vocabulary], float32, or bfloat16 if half */
    const int64_t *positions;   /* [rows] of the tokens to be drawn, less `ahead`; none for no noise */
    int64_t *best;              /* [rows, count] tokens */
    double *scores;             /* [rows, count], minus infinity where there is none */
    const uint8_t *seen;        /* [rows, vocabulary] or one row for all: the tokens that are penalised; or none, or: */
    const int64_t *newest;      /* by token: the position of its last occurrence; none if that does not matter */
    const int64_t *tokens, *places; /* [rows]: of the nodes of a tree, its tokens and their positions */
    const uint8_t *ancestors;   /* [rows, rows] of the nodes */
    const double *counts;       /* by token: how often it was generated, the root included; none if that does not matter */
    const uint8_t *banned;      /* by token, or none */
    const int64_t *biased;      /* [biases] tokens */
    const double *bias;         /* [biases], added to their logits */
    const int64_t *late;        /* [lates] tokens that are not drawn at positions before `first` */
    const int32_t *ids;         /* [rows, vocabulary] or one row for all: which token each logit is of; none for its place */
    uint8_t *unsure;            /* [rows]: whether PyTorch might rank otherwise */
    double *space;              /* [threads, 2 * vocabulary] */
    int32_t *kept;              /* [threads, vocabulary] */
    uint8_t *mask;              /* [threads, vocabulary] */
    parallel_region *parallel;  /* tswift_parallel of pool.c */
    int64_t by_row, by_seen, by_ids, rows, vocabulary, half, count, ahead, window, top_k, threads, biases, lates, first;
    uint64_t seed;
    double temperature, penalty, log_min_p, eta, top_p; /* log_min_p: minus infinity for none */
    double repetition, presence, frequency; /* penalties */
} Call;

typedef struct {
    double score[MOST_RANKED];
    int64_t token[MOST_RANKED];
} Best;

INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Where the logit of a token is, by the ids of all rows, which ascend; -1 if there is none. */
static int64_t place_of(const Call *c, int64_t token) {
    if (!c->ids) return token;
    int64_t low = 0, high = c->vocabulary;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (c->ids[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < c->vocabulary && c->ids[low] == token ? low : -1;
}

static const uint8_t *penalised(const Call *c, int64_t row) {
    if (c->seen) return c->seen + row * c->by_seen;
    if (!c->newest || !c->places || c->penalty == 1) return 0;
    const int64_t from = c->places[row] - c->window, count = c->vocabulary, *newest = c->newest;
    uint8_t *restrict mask = c->mask;
    if (c->ids)
        for (int64_t t = 0; t < count; t++) mask[t] = newest[c->ids[t]] > from;
    else
        for (int64_t t = 0; t < count; t++) mask[t] = newest[t] > from;
    for (int64_t node = 0; node < c->rows; node++)
        if (c->ancestors[row * c->rows + node] && c->places[node] > from) {
            const int64_t place = place_of(c, c->tokens[node]);
            if (place >= 0) c->mask[place] = 1;
        }
    return c->mask;
}

/* Logits of a row from one token on. */
INLINE void read(const Call *c, int64_t row, int64_t first, int64_t count, double *restrict w) {
    if (c->half) {
        const uint16_t *from = (const uint16_t *)c->logits + row * c->by_row + first;
        for (int64_t t = 0; t < count; t++) {
            const uint32_t bits = (uint32_t)from[t] << 16;
            float x;
            memcpy(&x, &bits, 4);
            w[t] = x;
        }
    } else {
        const float *from = (const float *)c->logits + row * c->by_row + first;
        for (int64_t t = 0; t < count; t++) w[t] = from[t];
    }
}

/* A token's logit, less what repetition takes off it if it is in the text, and presence and frequency by how often it
   was generated. */
INLINE double lowered(const Call *c, double logit, int there, double times) {
    if (there) logit = logit > 0 ? logit / c->repetition : logit * c->repetition;
    return logit - (c->frequency * times + c->presence * (times > 0));
}

static void add_biases(const Call *c, double *restrict w) {
    for (int64_t i = 0; i < c->biases; i++) {
        const int64_t place = place_of(c, c->biased[i]);
        if (place >= 0) w[place] += c->bias[i];
    }
}

/* Lower the logits of a node's row by the text, drafted ancestors included; of a row that is no node's, by the text. */
static void lower(const Call *c, int64_t row, double *restrict w) {
    const double *restrict counts = c->counts;
    const int64_t *restrict newest = c->repetition != 1 ? c->newest : 0;
    if (!counts && !newest) return;
    if (c->ids) {
        const int32_t *ids = c->ids + row * c->by_ids;
        for (int64_t t = 0; t < c->vocabulary; t++)
            if (w[t] > -INFINITY)
                w[t] = lowered(c, w[t], newest && newest[ids[t]] > FAR, counts ? counts[ids[t]] : 0);
        return;
    }
    const uint8_t *path = c->ancestors + row * c->rows;
    for (int64_t t = 0; t < c->vocabulary; t++)
        w[t] = lowered(c, w[t], newest && newest[t] > FAR, counts ? counts[t] : 0);
    for (int64_t node = 1; node < c->rows; node++) {
        if (!path[node]) continue;
        const int64_t token = c->tokens[node];
        double times = counts ? counts[token] : 0, logit;
        for (int64_t other = 1; counts && other < c->rows; other++) times += path[other] && c->tokens[other] == token;
        read(c, row, token, 1, &logit);
        for (int64_t i = 0; newest && i < c->biases; i++) logit += c->biased[i] == token ? c->bias[i] : 0;
        w[token] = lowered(c, logit, newest != 0, times);
    }
}

/* The warped logits of a row but for the filters; returns the highest, or infinity if there is a NaN. */
static double warp(const Call *c, int64_t row, double *restrict w) {
    const int64_t count = c->vocabulary;
    const double temperature = c->temperature, penalty = c->penalty;
    const uint8_t *restrict seen = penalised(c, row);
    read(c, row, 0, count, w);
    const int first = c->repetition != 1; /* whether biases come before what lowers */
    if (first) add_biases(c, w);
    lower(c, row, w);
    if (!first) add_biases(c, w);
    if (c->banned)
        for (int64_t t = 0; t < count; t++) w[t] = c->banned[c->ids ? c->ids[t] : t] ? -INFINITY : w[t];
    if (c->positions && c->positions[row] + c->ahead < c->first)
        for (int64_t i = 0; i < c->lates; i++) {
            const int64_t place = place_of(c, c->late[i]);
            if (place >= 0) w[place] = -INFINITY;
        }
    if (temperature != 0 && temperature != 1)
        for (int64_t t = 0; t < count; t++) w[t] /= temperature;
    if (seen)
        for (int64_t t = 0; t < count; t++) {
            const double lower = w[t] / penalty, higher = w[t] * penalty;
            w[t] = !seen[t] ? w[t] : w[t] > 0 ? lower : higher;
        }
    double most[LANES], high = -INFINITY;
    int64_t broken = 0, t = 0;
    for (int lane = 0; lane < LANES; lane++) most[lane] = -INFINITY;
    for (; t + LANES <= count; t += LANES)
        for (int lane = 0; lane < LANES; lane++) most[lane] = w[t + lane] > most[lane] ? w[t + lane] : most[lane];
    for (; t < count; t++) most[t % LANES] = w[t] > most[t % LANES] ? w[t] : most[t % LANES];
    for (int lane = 0; lane < LANES; lane++) high = most[lane] > high ? most[lane] : high;
    for (t = 0; t < count; t++) broken += !(w[t] < INFINITY);
    return broken ? INFINITY : high;
}

INLINE void swap(double *x, double *y) {
    const double held = *x;
    *x = *y, *y = held;
}

/* Put the k highest of some numbers first, the lowest of these at k - 1. */
static void select_highest(double *x, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const double pivot = x[middle];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) swap(x + i++, x + j--);
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

static int falling(const void *x, const void *y) {
    const double first = *(const double *)x, second = *(const double *)y;
    return (first < second) - (first > second);
}

/* Keep what is at least so high; returns how many are. */
static int64_t keep(const double *w, int32_t *kept, int64_t count, double least) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
        kept[left] = kept[i];
        left += w[kept[i]] >= least;
    }
    return left;
}

/* The logarithm of the sum of what is kept, relative to the highest. */
static double total(const double *w, const int32_t *kept, int64_t count, double high, double *mean) {
    double sum = 0, weighted = 0;
    for (int64_t i = 0; i < count; i++) {
        const double x = w[kept[i]] - high, p = exp(x);
        sum += p, weighted += p == 0 ? 0 : p * x;
    }
    if (mean) *mean = weighted / sum;
    return log(sum);
}

/* The filters after min-p, each of what those before it have kept; returns how many are left. */
static int64_t filter(const Call *c, int64_t row, const double *w, double high, int64_t count) {
    int32_t *kept = c->kept;
    double *sorted = c->space + c->vocabulary;
    if (c->eta > 0) {
        double mean; /* of log-probabilities, relative to the highest's */
        const double sum = total(w, kept, count, high, &mean), bound = log(c->eta);
        double least = bound / 2 + (mean - sum);
        least = (least < bound ? least : bound) + sum + high;
        if (least - sum - high < -690) c->unsure[row] = 1; /* where chances lose digits */
        for (int64_t i = 0; i < count; i++)
            if (w[kept[i]] < high && fabs(w[kept[i]] - least) < NEAR * (1 + fabs(least))) c->unsure[row] = 1;
        count = keep(w, kept, count, least < high ? least : high);
    }
    if (c->top_k > 0 && c->top_k < count) {
        for (int64_t i = 0; i < count; i++) sorted[i] = w[kept[i]];
        select_highest(sorted, count, c->top_k);
        double least = sorted[0];
        for (int64_t i = 1; i < c->top_k; i++) least = sorted[i] < least ? sorted[i] : least;
        count = keep(w, kept, count, least);
    }
    if (c->top_p < 1 && count > 1) {
        const double sum = total(w, kept, count, high, 0);
        for (int64_t i = 0; i < count; i++) sorted[i] = w[kept[i]];
        double before = 0, least = high;
        int64_t known = 0; /* of the highest, in order */
        for (int64_t i = 0; i < count; i++) {
            if (i == known) { /* order some more */
                const int64_t more = known ? 8 * known : 64;
                const int64_t next = more < count ? more : count;
                select_highest(sorted + known, count - known, next - known);
                qsort(sorted + known, next - known, sizeof *sorted, falling);
                known = next;
            }
            if (i && fabs(before - c->top_p) < NEAR) c->unsure[row] = 1;
            if (i && before >= c->top_p) {
                if (sorted[i] != least && least - sorted[i] < NEAR * (1 + fabs(least))) c->unsure[row] = 1;
                break;
            }
            least = sorted[i];
            before += exp(sorted[i] - high - sum);
        }
        count = keep(w, kept, count, least);
    }
    return count;
}

INLINE void insert(Best *b, int64_t wanted, double score, int64_t token) {
    int64_t at = wanted - 1;
    if (!(score > b->score[at])) return;
    for (; at > 0 && score > b->score[at - 1]; at--) {
        b->score[at] = b->score[at - 1];
        b->token[at] = b->token[at - 1];
    }
    b->score[at] = score, b->token[at] = token;
}

static void rank_row(const Call *c, int64_t row) {
    double *w = c->space;
    const int64_t wanted = c->count + 1;
    const int noisy = c->positions && c->temperature != 0;
    Best found;
    for (int64_t i = 0; i < wanted; i++) found.score[i] = -INFINITY, found.token[i] = 0;
    c->unsure[row] = 0;
    const double high = warp(c, row, w);
    if (fabs(high) < INFINITY) {
        const double least = high + c->log_min_p;
        int64_t count = 0;
        for (int64_t start = 0; start < c->vocabulary; start += LANES) {
            const int64_t end = start + LANES < c->vocabulary ? start + LANES : c->vocabulary;
            int some = end < start + LANES; /* as a rule, none is kept of most */
            if (!some)
                for (int lane = 0; lane < LANES; lane++) some |= w[start + lane] >= least;
            for (int64_t t = start; some && t < end; t++) {
                c->kept[count] = t;
                count += w[t] >= least && w[t] > -INFINITY;
            }
        }
        count = filter(c, row, w, high, count);
        const int64_t position = noisy ? c->positions[row] + c->ahead : 0;
        const uint64_t stream = noisy ? mixed((uint64_t)(position + 1) * GOLDEN + c->seed) : 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t t = c->ids ? c->ids[row * c->by_ids + c->kept[i]] : c->kept[i];
            double score = w[c->kept[i]];
            if (noisy) {
                const uint64_t bits = mixed(stream + (uint64_t)t * GOLDEN) >> 12, rest = bits ^ ((1ull << 52) - 1);
                const int length = rest ? 64 - __builtin_clzll(rest) : 0;
                if (score + (53 - length) * LOG_2 < found.score[wanted - 1]) continue;
                score += -log(-log((bits + 0.5) * 0x1p-52));
            }
            insert(&found, wanted, score, t);
        }
        const double bound = 1e-12 + 1e-15 * fabs(found.score[0]);
        if (noisy && !(found.score[0] - found.score[1] > bound)) c->unsure[row] = 1;
    }
    for (int64_t i = 0; i < c->count; i++) {
        c->best[row * c->count + i] = found.token[i];
        c->scores[row * c->count + i] = found.score[i];
    }
}

typedef struct {
    const Call *call;
    int64_t next;    /* row that is to be taken next */
    int64_t workers; /* threads that have begun */
} Work;

static void take_rows(void *given) {
    Work *w = given;
    Call own = *w->call;
    const int64_t worker = __atomic_fetch_add(&w->workers, 1, __ATOMIC_RELAXED), count = own.vocabulary;
    own.space += worker * 2 * count, own.kept += worker * count, own.mask += worker * count;
    for (int64_t row; (row = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < own.rows;) rank_row(&own, row);
}

void tswift_rank(const Call *c) {
    Work w = {.call = c};
    if (c->threads > 1 && c->rows * c->vocabulary >= LARGE) c->parallel(take_rows, &w, c->threads, 0);
    else take_rows(&w);
}

/* Draw along the path that the drawn tokens take from the root of a tree, and nowhere else: -1 at nodes beside it, and
   where there is nothing to draw. Returns whether PyTorch might draw otherwise on it. */
int64_t tswift_follow(const Call *c, const int64_t *parents) {
    const int together = c->threads > 2 && c->rows * c->vocabulary >= LARGE; /* all take no longer than a path */
    int64_t unsure = 0;
    if (together) tswift_rank(c);
    for (int64_t at = 0, node; at < c->rows; at = node) {
        int64_t *drawn = c->best + at * c->count;
        if (!together) rank_row(c, at);
        unsure |= c->unsure[at];
        if (!(fabs(c->scores[at * c->count]) < INFINITY)) *drawn = -1;
        for (node = at + 1; node < c->rows; node++) {
            if (parents[node] == at && c->tokens[node] == *drawn) break;
            c->best[node * c->count] = -1;
        }
    }
    return unsure;
}

/* A pass over a tree and its logits by the functions of program.c, and what is drawn: nothing comes between them that
   would take what is needed next out of the processor's caches, and the other threads are awake still. */
typedef struct {
    void (*forward)(const void *, const void *);
    const void *model, *run; /* the pass */
    void (*multiply)(const void *, const float *, float *, int64_t, parallel_region *, int64_t);
    const void *lm_head;
    const float *hidden; /* of the pass, [rows, hidden] */
    float *logits;       /* [rows, vocabulary] */
} Verification;

int64_t tswift_verify(const Verification *v, const Call *c, const int64_t *parents) {
    v->forward(v->model, v->run);
    v->multiply(v->lm_head, v->hidden, v->logits, c->rows, c->parallel, c->threads);
    return tswift_follow(c, parents);
}
