/* A low-rank residual on cached keys or values, added where they lie: x += z B, z = f(x) A, a few positions at a time.

   Compiled for one kind of map, by -D:
     DIM             D, the head's dimension            RANK    r, rounded up to a multiple of 8
     REAL            float or double: what is computed in and what the weights are; STORED as in `stored.h`
     RMS, SQUARES    0 or 1: f(x) = x / rms(x); f(x) and its squares

   Eight ranks stand side by side in 64 bytes, in one vector or more: of the features eight bytes at a time (two floats, one
   double) meet those of all eight ranks. A sum over D so stays in its rank's lanes until the end; there is no horizontal sum
   per position and rank. Several positions at once hide the latency of the additions, and share each load of A. */
#include <math.h>

#include "stored.h"
#include "vectors.h"

typedef real reals __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef uint64_t eights __attribute__((vector_size(BYTES)));

enum {
    REALS = BYTES / sizeof(real),
    GROUP = 64 / sizeof(real),            /* lanes of eight ranks */
    PARTS = 64 / BYTES,                   /* vectors of eight ranks */
    STEP = 8 / sizeof(real),              /* features that a rank takes at a time */
    STEPS = (DIM + STEP - 1) / STEP,
    PADDED = (DIM + GROUP - 1) / GROUP * GROUP,
    TILE = BYTES == 64 ? 8 : 4            /* positions at once: their sums fit into the registers */
};

/* Keys or values of one layer (B, H, T, D), steps in elements; per head A (RANK / 8, STEPS, 8, STEP) of f and, or NULL,
   of its squares, and B (RANK, PADDED), zeros in the padding. */
struct half {
    stored *x;
    int64_t batch, head, position, element;
    const real *rows, *squares, *right;
};

/* A layer's residual. No x: that half stays as it is. */
struct residual {
    struct half keys, values;
    const real *cos, *sin;  /* (B, T, D): keys are turned back by their position's angle; or NULL */
    int64_t angles;         /* from one prompt's to the next one's */
};

/* R(-p) f, or R(p) f: two numbers half a head apart at a time; sign is 1 to turn back */
static inline void turn_by(real *f, const real *cos, const real *sin, real sign) {
    enum { HALF = DIM / 2 };
    for (int d = 0; d < HALF; d++) {
        const real first = f[d], second = f[HALF + d];
        f[d] = first * cos[d] + sign * second * sin[d];
        f[HALF + d] = second * cos[HALF + d] - sign * first * sin[HALF + d];
    }
}

static inline real squared(const real *f) {
    reals sums = {0};
    for (int d = 0; d < PADDED; d += REALS) sums += *(const reals *)(f + d) * *(const reals *)(f + d);
    if (sizeof(real) == 4) return total((vector)sums);
    real sum = 0;
    for (int i = 0; i < REALS; i++) sum += sums[i];
    return sum;
}

/* 1 / rms(f) of each position, f's positions `next` apart */
static inline __attribute__((always_inline)) void normals(const real *f, int64_t next, real *weights) {
    real sums[TILE];
    for (int p = 0; p < TILE; p++) sums[p] = squared(f + p * next) / DIM + (real)1e-12;
    for (int p = 0; p < TILE; p++) weights[p] = 1 / (sizeof(real) == 4 ? (real)sqrtf((float)sums[p]) : (real)sqrt(sums[p]));
}

/* z (TILE, 8, STEP) += f A of eight ranks, f's positions `next` apart, A's rows (STEPS, 8, STEP); each z stands there STEP times */
static inline __attribute__((always_inline)) void project(const real *f, int64_t next, const real *rows, real z[TILE][GROUP]) {
    reals sums[TILE][PARTS] = {{{0}}};
    for (int step = 0; step < STEPS; step++) {
        const reals *weights = (const reals *)(rows + step * GROUP);
        for (int p = 0; p < TILE; p++) {
            uint64_t few;
            memcpy(&few, f + p * next + step * STEP, 8);
            for (int i = 0; i < PARTS; i++) sums[p][i] += (reals)(few + (eights){0}) * weights[i];
        }
    }
    for (int p = 0; p < TILE; p++)
        for (int i = 0; i < PARTS; i++) {
            const eights pair = (eights)sums[p][i];
            if (STEP == 2) sums[p][i] += (reals)(pair >> 32 | pair << 32);
            *(reals *)(z[p] + i * REALS) += sums[p][i];
        }
}

/* z (TILE, 8, STEP) times each position's weight */
static inline void scale(real z[TILE][GROUP], const real *weights) {
    for (int p = 0; p < TILE; p++)
        for (int i = 0; i < GROUP; i++) z[p][i] *= weights[p];
}

/* One tile: `count` positions of one head, from x on; cos and sin of the first of them where keys are turned. */
static inline __attribute__((always_inline)) void tile(
    stored *x, int64_t position, int64_t element, int count, const real *rows, const real *squares, const real *right,
    const real *cos, const real *sin, int turn
) {
    real copy[TILE][PADDED] __attribute__((aligned(64))), z[RANK / 8][TILE][GROUP] __attribute__((aligned(64))) = {{{0}}};
    /* what is computed with is what is stored: read where it lies */
    const int as_it_is = STORED == 0 && DIM == PADDED && !turn && element == 1 && count == TILE;
    const real *f = as_it_is ? (const real *)x : copy[0];
    const int64_t next = as_it_is ? position : PADDED;
    if (count < TILE || DIM < PADDED) memset(copy, 0, sizeof copy);
    for (int p = 0; p < count && !as_it_is; p++) {
        for (int d = 0; d < DIM; d++) copy[p][d] = read_one(x[p * position + d * element]);
        if (turn) turn_by(copy[p], cos + p * DIM, sin + p * DIM, 1);
    }
    real weights[TILE];
    if (RMS) normals(f, next, weights);
    for (int block = 0; block < RANK / 8; block++) project(f, next, rows + block * STEPS * GROUP, z[block]);
    for (int block = 0; block < RANK / 8 && RMS; block++) scale(z[block], weights);
    if (SQUARES) {
        for (int p = 0; p < TILE; p++)
            for (int d = 0; d < PADDED; d++) copy[p][d] = f[p * next + d] * f[p * next + d] * (RMS ? weights[p] * weights[p] : 1);
        for (int block = 0; block < RANK / 8; block++) project(copy[0], PADDED, squares + block * STEPS * GROUP, z[block]);
    }
    for (int p = 0; p < count; p++) {
        reals delta[PADDED / REALS] = {{0}};
        for (int r = 0; r < RANK; r++)
            for (int k = 0; k < PADDED / REALS; k++)
                delta[k] += z[r / 8][p][r % 8 * STEP] * *(const reals *)(right + r * PADDED + k * REALS);
        real *change = (real *)delta;
        if (turn) turn_by(change, cos + p * DIM, sin + p * DIM, -1);
        for (int d = 0; d < DIM; d++) {
            stored *one = x + p * position + d * element;
            *one = written(read_one(*one) + change[d]);
        }
    }
}

/* Positions `start` to `stop` of one prompt and head of keys, which `turn` turns, or of values; what is up to `ahead` positions
   further, before `whole`, is fetched meanwhile. */
static inline __attribute__((always_inline)) void correct_positions(
    const struct residual *of, const struct half *half, int64_t batch, int64_t head, int64_t start, int64_t stop, int64_t whole,
    int ahead, int turn
) {
    stored *x = half->x + batch * half->batch + head * half->head;
    const real *rows = half->rows + head * RANK * STEPS * STEP, *right = half->right + head * RANK * PADDED;
    const real *squares = SQUARES ? half->squares + head * RANK * STEPS * STEP : 0;
    for (int64_t p = start; p < stop; p += TILE) {
        const int count = stop - p < TILE ? (int)(stop - p) : TILE;
        const real *cos = turn ? of->cos + batch * of->angles + p * DIM : 0;
        const real *sin = turn ? of->sin + batch * of->angles + p * DIM : 0;
        stored *few = x + p * half->position;
        if (half->element != 1) {
            tile(few, half->position, half->element, count, rows, squares, right, cos, sin, turn);
            continue;
        }
        if (whole - p >= ahead + TILE)
            for (int i = ahead; i < ahead + TILE; i++)
                for (int d = 0; d < DIM; d += 64 / sizeof(stored)) __builtin_prefetch(few + i * half->position + d, 1);
        if (count == TILE)
            tile(few, half->position, 1, TILE, rows, squares, right, cos, sin, turn);
        else
            tile(few, half->position, 1, count, rows, squares, right, cos, sin, turn);
    }
}
