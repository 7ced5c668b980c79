/* Attention of a few new positions over a frozen prefix, forward and backward, straight from the stored cache.

   Compiled for one kind of map, by -D:
     DIM                 D, the head's dimension, a multiple of a vector's floats
     STORED              what the cache holds: 0 float, 1 bfloat16
     RMS, SQUARES        0 or 1: behind x stand x / rms(x), and the squares of the last of these
     CORRECTED           0 or 1: keys are floats, D wide and nothing behind them

   Scores lie with their rows side by side, (T, R): the maximum, the exponentials and the sum of a row need no horizontal
   sum, and all products are of two kinds without a transposition of the cache. A block of positions becomes floats where
   it is used and nowhere else, so that the cache is read once in each direction and nothing of its length is written but
   the exponentials, which the backward pass reads. */
#include <omp.h>

#include "stored.h"
#include "vectors.h"

/* The sums of a tile fit into the registers. */
#if BYTES == 64
enum { TALL = 12, SIX = 6 };
#else
enum { TALL = 6, SIX = 3 };
#endif

enum {
    BLOCK = 48,                             /* positions that are floats at a time */
    VALUES = DIM * (1 + RMS + SQUARES),     /* columns of what is read */
    KEYS = CORRECTED ? DIM : VALUES,
    MOST = 4                                /* vectors of columns that stay in registers */
};

/* One prompt's prefix: (H, T, D) each, a position's D side by side; steps from head to head in elements. */
struct prefix {
    const void *keys;
    const stored *values;
    float *p;            /* (H, T, R): exponentials of the scores */
    float *d_keys;       /* (H, T, D), or NULL */
    int64_t key_head, value_head, d_head, length;
};

/* R is a multiple of LANES; (B, H, R) rows, each with KEYS or VALUES columns or with one. */
struct call {
    const struct prefix *prefixes;
    const float *q;      /* (B, H, R, KEYS) */
    const float *column; /* forward: the new positions' score; backward: the gradient of their share */
    float *out;          /* (B, H, R, VALUES): what was read; backward: its gradient */
    float *share;        /* the new positions' part of the probabilities */
    float *inverse;      /* 1 / the sum of the exponentials */
    float *d_q;          /* (B, H, R, KEYS) */
    float *d_column;
    float *scratch;      /* `room` floats for each thread */
    int64_t room, batch, heads, rows, threads;
};

/* c (count, width) = a (count, depth) b (depth, width), all rows whole vectors; a's rows lie side by side. */
static inline __attribute__((always_inline)) void tile(
    const float *a, int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_step, int depth, int count, int wide
) {
    vector sums[TALL][2];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = (vector){0};
    for (int k = 0; k < depth; k++) {
        const vector *right = (const vector *)(b + k * b_step);
        vector own[2];
        for (int j = 0; j < wide; j++) own[j] = right[j];
#pragma GCC unroll 12
        for (int i = 0; i < count; i++) {
            const float one = a[i * a_step + k];
            for (int j = 0; j < wide; j++) sums[i][j] += one * own[j];
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < wide; j++) ((vector *)(c + i * c_step))[j] = sums[i][j];
}

static void times(
    const float *a, int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_step, int depth, int count, int width
) {
    for (int column = 0; column < width; column += 2 * LANES) {
        const int pair = width - column > LANES;
        int i = 0;
        for (; i + TALL <= count; i += TALL) {
            const float *x = a + i * a_step;
            float *y = c + i * c_step + column;
            if (pair) tile(x, a_step, b + column, b_step, y, c_step, depth, TALL, 2);
            else tile(x, a_step, b + column, b_step, y, c_step, depth, TALL, 1);
        }
        for (; i < count; i++) {
            const float *x = a + i * a_step;
            float *y = c + i * c_step + column;
            if (pair) tile(x, a_step, b + column, b_step, y, c_step, depth, 1, 2);
            else tile(x, a_step, b + column, b_step, y, c_step, depth, 1, 1);
        }
    }
}

/* c (few, wide vectors) += aᵀ b over `depth` positions: a (depth, ·), b (depth, ·) */
static inline __attribute__((always_inline)) void outer(
    const float *a, int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_step, int depth, int few, int wide
) {
    vector sums[SIX][MOST];
    for (int i = 0; i < few; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = ((vector *)(c + i * c_step))[j];
    for (int k = 0; k < depth; k++) {
        const vector *right = (const vector *)(b + k * b_step);
        vector own[MOST];
        for (int j = 0; j < wide; j++) own[j] = right[j];
#pragma GCC unroll 6
        for (int i = 0; i < few; i++) {
            const float one = a[k * a_step + i];
            for (int j = 0; j < wide; j++) sums[i][j] += one * own[j];
        }
    }
    for (int i = 0; i < few; i++)
        for (int j = 0; j < wide; j++) ((vector *)(c + i * c_step))[j] = sums[i][j];
}

static void add_outer(
    const float *a, int64_t a_step, const float *b, int64_t b_step, float *c, int64_t c_step, int depth, int rows, int width
) {
    int column = 0;
    for (; column + MOST * LANES <= width; column += MOST * LANES) {
        int i = 0;
        for (; i + SIX <= rows; i += SIX)
            outer(a + i, a_step, b + column, b_step, c + i * c_step + column, c_step, depth, SIX, MOST);
        for (; i < rows; i++)
            outer(a + i, a_step, b + column, b_step, c + i * c_step + column, c_step, depth, 1, MOST);
    }
    for (; column < width; column += LANES)
        for (int i = 0; i < rows; i++)
            outer(a + i, a_step, b + column, b_step, c + i * c_step + column, c_step, depth, 1, 1);
}

/* `count` positions of the cache as floats, with what a map reads of them: (count, VALUES) */
static void widen(const stored *x, int count, float *wide) {
    for (int p = 0; p < count; p++) {
        float *own = wide + p * VALUES;
        for (int d = 0; d < DIM; d++) own[d] = read_one(x[p * DIM + d]);
        const float *last = own;
        if (RMS) {
            vector sums = {0};
            float sum = 0;
            for (int d = 0; d < DIM; d += LANES) sums += *(vector *)(own + d) * *(vector *)(own + d);
            for (int i = 0; i < LANES; i++) sum += sums[i];
            const float weight = 1 / __builtin_sqrtf(sum / DIM + 1e-12f);
            for (int d = 0; d < DIM; d++) own[DIM + d] = own[d] * weight;
            last = own + DIM;
        }
        if (SQUARES)
            for (int d = 0; d < DIM; d++) own[VALUES - DIM + d] = last[d] * last[d];
    }
}

static inline const float *keys_of(const struct prefix *of, int64_t head, int64_t start, int count, float *wide) {
    if (CORRECTED) return (const float *)of->keys + head * of->key_head + start * DIM;
    widen((const stored *)of->keys + head * of->key_head + start * DIM, count, wide);
    return wide;
}

/* x (rows, width) -> (width, rows) */
static void turn(const float *x, int rows, int width, float *turned) {
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < width; d++) turned[d * rows + r] = x[r * width + d];
}

static inline int in_block(int64_t start, int64_t length) { return length - start < BLOCK ? (int)(length - start) : BLOCK; }

static void read_one_head(const struct call *of, int64_t prompt, int64_t head, float *scratch) {
    const struct prefix *prefix = of->prefixes + prompt;
    const int64_t place = (prompt * of->heads + head) * of->rows, length = prefix->length;
    const int rows = (int)of->rows;
    float *p = prefix->p + head * length * rows, *wide = scratch, *turned = wide + BLOCK * VALUES;
    float *most = turned + KEYS * rows, *sums = most + rows, *out = of->out + place * VALUES;
    turn(of->q + place * KEYS, rows, KEYS, turned);
    memcpy(most, of->column + place, rows * sizeof(float));
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int count = in_block(start, length);
        const float *keys = keys_of(prefix, head, start, count, wide);
        times(keys, KEYS, turned, rows, p + start * rows, rows, KEYS, count, rows);
        for (int r = 0; r < rows; r += LANES) {
            vector found = *(vector *)(most + r);
            for (int k = 0; k < count; k++) found = larger(*(vector *)(p + (start + k) * rows + r), found);
            *(vector *)(most + r) = found;
        }
    }
    memset(out, 0, rows * VALUES * sizeof(float));
    for (int r = 0; r < rows; r += LANES) {
        const vector own = exponential(*(vector *)(of->column + place + r) - *(vector *)(most + r));
        *(vector *)(sums + r) = *(vector *)(of->share + place + r) = own;
    }
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int count = in_block(start, length);
        for (int r = 0; r < rows; r += LANES) {
            vector sum = *(vector *)(sums + r);
            const vector top = *(vector *)(most + r);
            for (int k = 0; k < count; k++) {
                vector *own = (vector *)(p + (start + k) * rows + r);
                sum += *own = exponential(*own - top);
            }
            *(vector *)(sums + r) = sum;
        }
        widen(prefix->values + head * prefix->value_head + start * DIM, count, wide);
        add_outer(p + start * rows, rows, wide, VALUES, out, VALUES, count, rows, VALUES);
    }
    for (int r = 0; r < rows; r++) {
        const float inverse = 1 / sums[r];
        of->inverse[place + r] = inverse;
        of->share[place + r] *= inverse;
        for (int d = 0; d < VALUES; d++) out[r * VALUES + d] *= inverse;
    }
}

static void read_one_head_back(const struct call *of, int64_t prompt, int64_t head, float *scratch) {
    const struct prefix *prefix = of->prefixes + prompt;
    const int64_t place = (prompt * of->heads + head) * of->rows, length = prefix->length;
    const int rows = (int)of->rows;
    const float *p = prefix->p + head * length * rows;
    float *wide = scratch, *turned = wide + BLOCK * VALUES, *sums = turned + VALUES * rows, *d_p = sums + rows;
    float *d_q = of->d_q + place * KEYS;
    turn(of->out + place * VALUES, rows, VALUES, turned);
    memset(sums, 0, rows * sizeof(float));
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int count = in_block(start, length);
        widen(prefix->values + head * prefix->value_head + start * DIM, count, wide);
        times(wide, VALUES, turned, rows, d_p + start * rows, rows, VALUES, count, rows);
        for (int r = 0; r < rows; r += LANES) {
            vector sum = *(vector *)(sums + r);
            for (int64_t k = start; k < start + count; k++)
                sum += *(vector *)(p + k * rows + r) * *(vector *)(d_p + k * rows + r);
            *(vector *)(sums + r) = sum;
        }
    }
    for (int r = 0; r < rows; r += LANES) {  /* the sum of p times its gradient, over all there is to read */
        const vector share = *(vector *)(of->share + place + r), column = *(vector *)(of->column + place + r);
        const vector sum = *(vector *)(sums + r) * *(vector *)(of->inverse + place + r) + share * column;
        *(vector *)(sums + r) = sum;
        *(vector *)(of->d_column + place + r) = share * (column - sum);
    }
    memset(d_q, 0, rows * KEYS * sizeof(float));
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int count = in_block(start, length);
        for (int r = 0; r < rows; r += LANES) {
            const vector sum = *(vector *)(sums + r), inverse = *(vector *)(of->inverse + place + r);
            for (int64_t k = start; k < start + count; k++) {
                vector *own = (vector *)(d_p + k * rows + r);
                *own = (*own - sum) * (*(vector *)(p + k * rows + r) * inverse);
            }
        }
        const float *keys = keys_of(prefix, head, start, count, wide);
        add_outer(d_p + start * rows, rows, keys, KEYS, d_q, KEYS, count, rows, KEYS);
        if (prefix->d_keys)
            times(
                d_p + start * rows, rows, of->q + place * KEYS, KEYS, prefix->d_keys + head * prefix->d_head + start * DIM, DIM,
                rows, count, DIM
            );
    }
}

void attend(const struct call *of) {
#pragma omp parallel for schedule(dynamic) num_threads((int)of->threads)
    for (int64_t i = 0; i < of->batch * of->heads; i++)
        read_one_head(of, i / of->heads, i % of->heads, of->scratch + omp_get_thread_num() * of->room);
}

void attend_back(const struct call *of) {
#pragma omp parallel for schedule(dynamic) num_threads((int)of->threads)
    for (int64_t i = 0; i < of->batch * of->heads; i++)
        read_one_head_back(of, i / of->heads, i % of->heads, of->scratch + omp_get_thread_num() * of->room);
}
