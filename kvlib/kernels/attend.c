/* One new token's attention over a cached prefix and the tokens after it, in one pass over keys and values.

   Compiled for one shape of head, by -D:
     DIM             D, the head's dimension            ROWS    queries that share a KV head
     STORED          what the cache holds: 0 float, 1 bfloat16, 2 float16; everything is computed in float
     RANK            with what `residual.h` asks for: the prefix is corrected as it is read, a few positions ahead of the products
                     that read them; none, or 0: it is read as it is

   The positions are cut into blocks that all threads share. A block's scores and weights stay in the processor's cache; what it
   comes to (largest score, sum of weights, weighted sum of values) is put together at the end, as one softmax over all would. */
#include <math.h>

#include "stored.h"
#include "vectors.h"

#if RANK
#include "residual.h"
#endif

enum { WIDTH = (DIM + LANES - 1) / LANES, BLOCK = 256, AHEAD = 16, FEW = 32 };

/* A segment of the cache: keys and values (B, H, T, D), steps in elements, rows of D side by side. */
struct segment {
    const stored *keys, *values;
    int64_t key_batch, key_head, key_position, value_batch, value_head, value_position, positions;
};

struct step {
    struct segment prefix, new;
    float *read;                  /* (B, H, ROWS, D), scaled, for the prefix; made here where there is a key_dense */
    const float *query;           /* the same for the new positions */
    float *bias;                  /* (B, H, ROWS) on the prefix's scores, or NULL; made here where there is a key_bias */
    /* Of keys and values that are read as x W + c: W (H, D, D) and c (H, D), each or NULL */
    const float *key_dense, *key_bias, *value_dense, *value_bias;
    const uint8_t *valid;         /* (B, T) of the prefix, or NULL */
    float *out, *out_new, *share; /* (B, H, ROWS, D) of the prefix, of the new positions or, when NULL, both in `out`; the prefix's
                                     part of the weights (B, H, ROWS) */
    float *scratch;               /* (B * H, blocks, ROWS, D + 2) */
    int64_t batches, heads, threads;
#if RANK
    struct residual residual;     /* of the prefix's keys and values, which are corrected for good */
#endif
};

static inline void load_row(const stored *x, vector row[WIDTH]) {
#if STORED == 0
    if (DIM % LANES == 0) {
        for (int k = 0; k < WIDTH; k++) row[k] = *(const vector *)(x + k * LANES);
        return;
    }
    row[WIDTH - 1] = (vector){0};
    memcpy(row, x, DIM * 4);
#else
    float *one = (float *)row;
    if (DIM % LANES) row[WIDTH - 1] = (vector){0};
    for (int d = 0; d < DIM; d++) one[d] = read_one(x[d]);
#endif
}

/* e^x of x <= 0, to about one unit in the last place; NaN stays NaN. Unlike `exponential` it is 0 below -87, so that what is
   masked has no weight at all. */
static inline vector weight_of(vector x) {
    const whole low = x < -87.0f;
    x = (vector)(((whole)x & ~low));
    const vector magic = (vector){0} + 12582912.0f;
    const vector n = (x * 1.44269504f + magic) - magic;
    const vector f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vector y = f * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    const whole power = (__builtin_convertvector(n, whole) + 127) << 23;
    return (vector)((whole)(y * (vector)power) & ~low);
}

/* Scores of `count` positions: s (ROWS, BLOCK), from the first on */
static inline void scores(const stored *keys, int64_t position, int count, const vector q[ROWS][WIDTH], float (*s)[BLOCK], int from) {
    for (int p = 0; p < count; p++) {
        vector row[WIDTH];
        const stored *key = keys + p * position;
        for (int d = 0; d < DIM; d += 64 / sizeof(stored)) __builtin_prefetch(key + AHEAD * position + d);
        load_row(key, row);
        for (int r = 0; r < ROWS; r++) {
            vector sum = row[0] * q[r][0];
            for (int k = 1; k < WIDTH; k++) sum += row[k] * q[r][k];
            s[r][from + p] = total(sum);
        }
    }
}

/* sums (ROWS, WIDTH) += the values of `count` positions, each times its weight s (ROWS, BLOCK), from the first on */
static inline void weigh(const stored *values, int64_t position, int count, float (*s)[BLOCK], int from, vector sums[ROWS][WIDTH]) {
    for (int p = 0; p < count; p++) {
        vector row[WIDTH];
        const stored *value = values + p * position;
        for (int d = 0; d < DIM; d += 64 / sizeof(stored)) __builtin_prefetch(value + AHEAD * position + d);
        load_row(value, row);
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < WIDTH; k++) sums[r][k] += s[r][from + p] * row[k];
    }
}

/* Some positions of a prompt and KV head, of the prefix or of the new ones. */
struct place {
    int64_t batch, head, start;
    int count, of_prefix;
};

/* How many positions are read at a time: all of a block, or what was just corrected. */
static inline int corrected(const struct step *of, const struct place *at, int p, int value) {
#if RANK
    const struct half *half = value ? &of->residual.values : &of->residual.keys;
    if (at->of_prefix && half->x) {
        const int few = at->count - p < FEW ? at->count - p : FEW;
        const int64_t first = at->start + p, last = first + few, all = of->prefix.positions;
        if (value)
            correct_positions(&of->residual, half, at->batch, at->head, first, last, all, AHEAD, 0);
        else
            correct_positions(&of->residual, half, at->batch, at->head, first, last, all, AHEAD, TURN);
        return few;
    }
#endif
    return at->count - p;
}

/* What a block comes to, for each row: largest score, sum of weights, weighted sum of values. */
static void block(const struct step *of, const struct place *at, float *result) {
    const struct segment *from = at->of_prefix ? &of->prefix : &of->new;
    const int64_t n = at->batch * of->heads + at->head;
    const stored *keys = from->keys + at->batch * from->key_batch + at->head * from->key_head + at->start * from->key_position;
    const stored *values =
        from->values + at->batch * from->value_batch + at->head * from->value_head + at->start * from->value_position;
    const float *query = (at->of_prefix ? of->read : of->query) + n * ROWS * DIM;
    const float *bias = at->of_prefix && of->bias ? of->bias + n * ROWS : 0;
    const uint8_t *valid = at->of_prefix && of->valid ? of->valid + at->batch * from->positions + at->start : 0;
    const int count = at->count;
    float s[ROWS][BLOCK] __attribute__((aligned(64)));
    vector q[ROWS][WIDTH], sums[ROWS][WIDTH];
    memset(q, 0, sizeof q);
    memset(sums, 0, sizeof sums);
    for (int r = 0; r < ROWS; r++) memcpy(q[r], query + r * DIM, DIM * 4);
    for (int p = 0, few; p < count; p += few) {
        few = corrected(of, at, p, 0);
        scores(keys + p * from->key_position, from->key_position, few, (const vector(*)[WIDTH])q, s, p);
    }
    for (int r = 0; r < ROWS; r++) {
        float largest = -INFINITY, *own = result + r * (DIM + 2);
        vector weights = {0};
        for (int p = count; p < BLOCK; p++) s[r][p] = -INFINITY;
        if (bias) for (int p = 0; p < count; p++) s[r][p] += bias[r];
        if (valid) for (int p = 0; p < count; p++) if (!valid[p]) s[r][p] = -INFINITY;
        for (int p = 0; p < count; p++) largest = s[r][p] > largest ? s[r][p] : largest;
        const float floor = largest == -INFINITY ? 0 : largest;
        for (int p = 0; p < BLOCK; p += LANES) {
            vector *few = (vector *)(s[r] + p);
            *few = weight_of(*few - floor);
            weights += *few;
        }
        own[0] = largest, own[1] = total(weights);
    }
    for (int p = 0, few; p < count; p += few) {
        few = corrected(of, at, p, 1);
        weigh(values + p * from->value_position, from->value_position, few, s, p, sums);
    }
    for (int r = 0; r < ROWS; r++) memcpy(result + r * (DIM + 2) + 2, sums[r], DIM * 4);
}

/* Block `i` of prompt and KV head n, the prefix's first. */
static void one(const struct step *of, int64_t n, int64_t i, int64_t of_prefix, float *result) {
    const int first = i < of_prefix;
    const int64_t start = (first ? i : i - of_prefix) * BLOCK, left = (first ? of->prefix : of->new).positions - start;
    block(of, &(struct place){n / of->heads, n % of->heads, start, left < BLOCK ? (int)left : BLOCK, first}, result);
}

static inline float product(const float *x, const float *y) {
    vector sums = {0};
    float rest = 0;
    int d = 0;
    for (; d + LANES <= DIM; d += LANES) sums += *(const vector *)(x + d) * *(const vector *)(y + d);
    for (; d < DIM; d++) rest += x[d] * y[d];
    return total(sums) + rest;
}

/* The queries of one prompt and KV head as they read unmapped keys: q (k W + c) = (q W^T) k + q c */
static void read_through(const struct step *of, int64_t n) {
    const int64_t head = n % of->heads;
    for (int r = 0; r < ROWS; r++) {
        const float *q = of->query + (n * ROWS + r) * DIM;
        if (of->key_bias) of->bias[n * ROWS + r] = product(q, of->key_bias + head * DIM);
        if (of->key_dense)
            for (int d = 0; d < DIM; d++)
                of->read[(n * ROWS + r) * DIM + d] = product(q, of->key_dense + (head * DIM + d) * DIM);
    }
}

/* out += what the prefix comes to, `sums`, through the values' map: o W + share c */
static inline void map_values(const struct step *of, int64_t head, const float *sums, float share, float *out) {
    if (of->value_dense)
        for (int d = 0; d < DIM; d++) {
            const float *row = of->value_dense + (head * DIM + d) * DIM;
            for (int e = 0; e < DIM; e++) out[e] += sums[d] * row[e];
        }
    else
        for (int e = 0; e < DIM; e++) out[e] += sums[e];
    if (of->value_bias)
        for (int e = 0; e < DIM; e++) out[e] += share * of->value_bias[head * DIM + e];
}

void attend(const struct step *of) {
    const int64_t of_prefix = (of->prefix.positions + BLOCK - 1) / BLOCK, all = of->batches * of->heads;
    const int64_t blocks = of_prefix + (of->new.positions + BLOCK - 1) / BLOCK, size = ROWS * (DIM + 2);
#pragma omp parallel num_threads((int)of->threads)
    {
        if (of->key_dense || of->key_bias) {
#pragma omp for schedule(static)
            for (int64_t n = 0; n < all; n++) read_through(of, n);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < all * blocks; i++) one(of, i / blocks, i % blocks, of_prefix, of->scratch + i * size);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < all * ROWS; i++) {
            const int64_t n = i / ROWS, r = i % ROWS;
            const float *found = of->scratch + n * blocks * size + r * (DIM + 2);
            float largest = -INFINITY, weight = 0, share = 0, sums[2][DIM] = {{0}};
            for (int64_t b = 0; b < blocks; b++) largest = found[b * size] > largest ? found[b * size] : largest;
            for (int64_t b = 0; b < blocks; b++) {
                const float *part = found + b * size, scale = part[0] == -INFINITY ? 0 : expf(part[0] - largest);
                weight += scale * part[1];
                if (b < of_prefix) share += scale * part[1];
                for (int d = 0; d < DIM; d++) sums[b >= of_prefix][d] += scale * part[2 + d];
            }
            float *out = of->out + i * DIM, *apart = of->out_new ? of->out_new + i * DIM : out;
            of->share[i] = share / weight;
            for (int d = 0; d < DIM; d++) sums[0][d] /= weight, sums[1][d] /= weight;
            memset(out, 0, DIM * 4);
            memcpy(apart, sums[1], DIM * 4);
            map_values(of, n % of->heads, sums[0], of->share[i], out);
        }
    }
}
