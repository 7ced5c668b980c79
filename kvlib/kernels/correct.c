/* Add a low-rank residual to a layer's cached keys and values where they lie: x += z B, z = f(x) A, one pass.

   Compiled for one kind of map, by -D:
     DIM             D, the head's dimension            RANK    r, rounded up to a multiple of 8
     REAL            float or double: what is computed in and what the weights are
     STORED          what the cache holds: 0 REAL, 1 bfloat16, 2 float16
     RMS, SQUARES, TURN      0 or 1: f(x) = x / rms(x); f(x) and its squares; keys turned back by their position's angle

   Eight ranks stand side by side in 64 bytes, in one vector or more: of the features eight bytes at a time (two floats, one
   double) meet those of all eight ranks. A sum over D so stays in its rank's lanes until the end; there is no horizontal sum
   per position and rank. Several positions at once hide the latency of the additions, and share each load of A. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The processor's own vectors: gcc takes wider ones apart through memory. */
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef REAL real;
typedef real vector __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef uint64_t eights __attribute__((vector_size(BYTES)));

enum {
    LANES = BYTES / sizeof(real),
    GROUP = 64 / sizeof(real),            /* lanes of eight ranks */
    PARTS = 64 / BYTES,                   /* vectors of eight ranks */
    STEP = 8 / sizeof(real),              /* features that a rank takes at a time */
    STEPS = (DIM + STEP - 1) / STEP,
    WIDTH = (DIM + GROUP - 1) / GROUP * GROUP,
    VECTORS = WIDTH / LANES,
    AHEAD = 16,                           /* positions: how far ahead the cache is fetched */
    BLOCK = 512,                          /* positions whose angles stay near the core while all heads use them */
    TILE = BYTES == 64 ? 8 : 4            /* positions at once: their sums fit into the registers */
};

#if STORED == 1
typedef uint16_t stored;
static inline real read_one(stored v) {
    uint32_t bits = (uint32_t)v << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline stored written(real value) {  /* to the nearest, ties to even; NaN stays NaN */
    float x = value;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (stored)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
#if STORED == 2
typedef _Float16 stored;
#else
typedef real stored;
#endif
static inline real read_one(stored v) { return v; }
static inline stored written(real v) { return (stored)v; }
#endif

/* Keys or values of one layer (B, H, T, D), steps in elements; per head A (RANK / 8, STEPS, 8, STEP) of f and, or NULL,
   of its squares, and B (RANK, WIDTH), zeros in the padding. */
struct half {
    stored *x;
    int64_t batch, head, position, element;
    const real *rows, *squares, *right;
};

struct layer {
    struct half keys, values;  /* no values, no x: they stay as they are */
    int64_t batches, heads, positions, threads;
    const real *cos, *sin;  /* (B, T, D), or NULL */
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

static inline void normalise(real *f) {
    vector sums = {0};
    real sum = 0;
    for (int d = 0; d < WIDTH; d += LANES) sums += *(vector *)(f + d) * *(vector *)(f + d);
    for (int i = 0; i < LANES; i++) sum += sums[i];
    const real weight = 1 / (real)sqrt(sum / DIM + (real)1e-12);
    for (int d = 0; d < WIDTH; d++) f[d] *= weight;
}

/* z (TILE, 8, STEP) += f A of eight ranks, whose rows are (STEPS, 8, STEP); each z stands there STEP times */
static inline void project(real f[TILE][WIDTH], const real *rows, real z[TILE][GROUP]) {
    vector sums[TILE][PARTS] = {{{0}}};
    for (int step = 0; step < STEPS; step++) {
        const vector *weights = (const vector *)(rows + step * GROUP);
        for (int p = 0; p < TILE; p++) {
            uint64_t few;
            memcpy(&few, &f[p][step * STEP], 8);
            for (int i = 0; i < PARTS; i++) sums[p][i] += (vector)(few + (eights){0}) * weights[i];
        }
    }
    for (int p = 0; p < TILE; p++)
        for (int i = 0; i < PARTS; i++) {
            const eights pair = (eights)sums[p][i];
            if (STEP == 2) sums[p][i] += (vector)(pair >> 32 | pair << 32);
            *(vector *)(z[p] + i * LANES) += sums[p][i];
        }
}

/* One tile: `count` positions of one head, from x on; cos and sin of the first of them where keys are turned. */
static inline __attribute__((always_inline)) void tile(
    stored *x, int64_t position, int64_t element, int count, const real *rows, const real *squares, const real *right,
    const real *cos, const real *sin, int turn
) {
    real f[TILE][WIDTH] __attribute__((aligned(64))), z[RANK / 8][TILE][GROUP] __attribute__((aligned(64))) = {{{0}}};
    if (count < TILE || DIM < WIDTH) memset(f, 0, sizeof f);
    for (int p = 0; p < count; p++) {
        for (int d = 0; d < DIM; d++) f[p][d] = read_one(x[p * position + d * element]);
        if (turn) turn_by(f[p], cos + p * DIM, sin + p * DIM, 1);
        if (RMS) normalise(f[p]);
    }
    for (int block = 0; block < RANK / 8; block++) project(f, rows + block * STEPS * GROUP, z[block]);
    if (SQUARES) {
        for (int p = 0; p < TILE; p++)
            for (int d = 0; d < WIDTH; d++) f[p][d] *= f[p][d];
        for (int block = 0; block < RANK / 8; block++) project(f, squares + block * STEPS * GROUP, z[block]);
    }
    for (int p = 0; p < count; p++) {
        vector delta[VECTORS] = {{0}};
        for (int r = 0; r < RANK; r++)
            for (int k = 0; k < VECTORS; k++)
                delta[k] += z[r / 8][p][r % 8 * STEP] * *(const vector *)(right + r * WIDTH + k * LANES);
        real *change = (real *)delta;
        if (turn) turn_by(change, cos + p * DIM, sin + p * DIM, -1);
        for (int d = 0; d < DIM; d++) {
            stored *one = x + p * position + d * element;
            *one = written(read_one(*one) + change[d]);
        }
    }
}

/* The tile of one head that begins at this position. */
static inline __attribute__((always_inline)) void correct_tile(
    const struct layer *of, const struct half *half, int64_t batch, int64_t head, int64_t start, int turn
) {
    const int64_t left = of->positions - start;
    const int count = left < TILE ? (int)left : TILE;
    stored *x = half->x + batch * half->batch + head * half->head + start * half->position;
    const real *rows = half->rows + head * RANK * STEPS * STEP, *right = half->right + head * RANK * WIDTH;
    const real *squares = SQUARES ? half->squares + head * RANK * STEPS * STEP : 0;
    const real *cos = turn ? of->cos + batch * of->angles + start * DIM : 0;
    const real *sin = turn ? of->sin + batch * of->angles + start * DIM : 0;
    if (half->element != 1) {
        tile(x, half->position, half->element, count, rows, squares, right, cos, sin, turn);
        return;
    }
    if (left >= AHEAD + TILE)
        for (int p = AHEAD; p < AHEAD + TILE; p++)
            for (int d = 0; d < DIM; d += 64 / sizeof(stored)) __builtin_prefetch(x + p * half->position + d, 1);
    if (count == TILE)
        tile(x, half->position, 1, TILE, rows, squares, right, cos, sin, turn);
    else
        tile(x, half->position, 1, count, rows, squares, right, cos, sin, turn);
}

/* A thread's part of keys or of values, block by block of positions, all heads of a block one after the other: called by each
   of a team. */
static inline __attribute__((always_inline)) void correct_half(const struct layer *of, const struct half *half, int turn) {
    const int64_t even = of->positions / (4 * of->threads) / TILE * TILE + TILE;  /* a few for each thread */
    const int64_t block = even < BLOCK ? even : BLOCK, blocks = (of->positions + block - 1) / block;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < of->batches * blocks * of->heads; i++) {
        const int64_t head = i % of->heads, first = i / of->heads % blocks * block, batch = i / of->heads / blocks;
        const int64_t last = first + block < of->positions ? first + block : of->positions;
        for (int64_t start = first; start < last; start += TILE) correct_tile(of, half, batch, head, start, turn);
    }
}

void correct(const struct layer *of) {
#pragma omp parallel num_threads((int)of->threads)
    {
        correct_half(of, &of->keys, TURN);
        if (of->values.x) correct_half(of, &of->values, 0);
    }
}
