/* A warm-up step's loss and gradients: how far f(x) A B takes the source's vectors towards the target's, head by head.

   Compiled for one kind of map, by -D:
     DIM                 D, the head's dimension, a multiple of a vector's floats
     RANK                r
     STORED              what the caches hold: 0 float, 1 bfloat16
     RMS, SQUARES        0 or 1: f(x) is x / rms(x) in the place of x / σ; f(x) has the squares as well
     RIDGE               0 or 1: b(x) = x W + c in the place of x

   Every product has the ranks or the dimensions of its result side by side in vectors and takes the other operand number
   by number, so that nothing is transposed but weights. A block of positions becomes floats where it is used and nowhere
   else. Each head's sums are its own, prompt after prompt: how many threads there are changes nothing. */
#include <omp.h>

#include "stored.h"
#include "vectors.h"

enum {
    TALL = LANES == 16 ? 12 : 6,            /* the sums of a tile fit into the registers */
    MOST = LANES == 16 ? 4 : 2,
    BLOCK = 48,                             /* positions that are floats at a time, a multiple of TALL */
    COLUMNS = DIM * (1 + SQUARES),
    NARROW = LANES == 4 || RANK <= 4 ? 4 : LANES == 8 || RANK <= 8 ? 8 : 16,
    RANKS = (RANK + NARROW - 1) / NARROW * NARROW  /* zeros behind the last */
};

typedef float narrow __attribute__((vector_size(4 * NARROW), aligned(4), may_alias));

/* One prompt's two caches: vectors (L, 2, H, T, D) with the D side by side; steps in elements, the target's last. */
struct prompt {
    const stored *x, *y;
    int64_t layer[2], kind[2], head[2], position[2], length;
};

/* Keys' or values' weights, all contiguous: A (L, H, F, r), B (L, H, r, D), σ (L, H), W (L, H, D, D), c (L, H, D). */
struct weights {
    const float *left, *right, *sigma, *ridge, *bias;
    float *d_left, *d_right;
};

struct call {
    const struct prompt *prompts;
    struct weights weights[2];
    float *scratch;  /* `scratch_floats` for each thread */
    double *losses;  /* (L, 2, H) */
    int64_t batch, layers, heads, threads;
    double scale;    /* s */
};

struct scratch {
    float left[COLUMNS * RANKS], right[RANKS * DIM], turned[DIM * RANKS];
    float d_left[RANKS * COLUMNS], d_right[RANKS * DIM], own_left[RANKS * COLUMNS], own_right[RANKS * DIM];
    float x[BLOCK * COLUMNS], error[BLOCK * DIM], delta[BLOCK * DIM], latent[BLOCK * RANKS], back[BLOCK * RANKS], weight[BLOCK];
};

int64_t scratch_floats(void) { return sizeof(struct scratch) / sizeof(float); }

/* c (count, width) = a (count, depth) b (depth, width), for one type of vector; a's rows are `a_step` apart. */
#define PRODUCT(name, type)                                                                                               \
    static inline __attribute__((always_inline)) void name##_tile(                                                        \
        const float *a, int a_step, const float *b, float *c, int depth, int width, int wide                              \
    ) {                                                                                                                   \
        type sums[TALL][2];                                                                                               \
        for (int i = 0; i < TALL; i++)                                                                                    \
            for (int j = 0; j < wide; j++) sums[i][j] = (type){0};                                                        \
        for (int k = 0; k < depth; k++) {                                                                                 \
            type own[2];                                                                                                  \
            for (int j = 0; j < wide; j++) own[j] = ((const type *)(b + k * width))[j];                                   \
            _Pragma("GCC unroll 12") for (int i = 0; i < TALL; i++)                                                       \
                for (int j = 0; j < wide; j++) sums[i][j] += a[i * a_step + k] * own[j];                                  \
        }                                                                                                                 \
        for (int i = 0; i < TALL; i++)                                                                                    \
            for (int j = 0; j < wide; j++) ((type *)(c + i * width))[j] = sums[i][j];                                     \
    }                                                                                                                     \
    static inline void name(const float *a, int a_step, const float *b, float *c, int count, int depth, int width) {      \
        const int lanes = sizeof(type) / sizeof(float);                                                                   \
        for (int i = 0; i < count; i += TALL) {                                                                           \
            int column = 0;                                                                                               \
            for (; column + 2 * lanes <= width; column += 2 * lanes)                                                      \
                name##_tile(a + i * a_step, a_step, b + column, c + i * width + column, depth, width, 2);                 \
            if (column < width) name##_tile(a + i * a_step, a_step, b + column, c + i * width + column, depth, width, 1); \
        }                                                                                                                 \
    }

PRODUCT(to_ranks, narrow)
PRODUCT(to_dims, vector)

/* c (RANKS, width) += aᵀ b over `count` positions: a (count, RANKS), b (count, width); four rows of c at a time */
static inline __attribute__((always_inline)) void outer_tile(
    const float *a, const float *b, float *c, int count, int width, int wide
) {
    vector sums[4][MOST];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < wide; j++) sums[i][j] = ((vector *)(c + i * width))[j];
    for (int k = 0; k < count; k++) {
        vector own[MOST];
        for (int j = 0; j < wide; j++) own[j] = ((const vector *)(b + k * width))[j];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < wide; j++) sums[i][j] += a[k * RANKS + i] * own[j];
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < wide; j++) ((vector *)(c + i * width))[j] = sums[i][j];
}

static inline void add_outer(const float *a, const float *b, float *c, int count, int width) {
    int column = 0;
    for (; column + MOST * LANES <= width; column += MOST * LANES)
        for (int i = 0; i < RANKS; i += 4) outer_tile(a + i, b + column, c + i * width + column, count, width, MOST);
    for (; column < width; column += LANES)
        for (int i = 0; i < RANKS; i += 4) outer_tile(a + i, b + column, c + i * width + column, count, width, 1);
}

/* What head `task` of all (L, 2, H) reads of a prompt: the source's vectors (which 0) or the target's (1). */
static inline const stored *vectors_of(const struct call *of, const struct prompt *prompt, int64_t task, int which) {
    const int64_t layer = task / (2 * of->heads), kind = task / of->heads % 2, head = task % of->heads;
    return (which ? prompt->y : prompt->x) + layer * prompt->layer[which] + kind * prompt->kind[which] + head * prompt->head[which];
}

static inline int in_block(int64_t start, int64_t length) { return length - start < BLOCK ? (int)(length - start) : BLOCK; }

/* The block after this one, of whichever prompt or head it is, on its way into the cache: positions lie far apart. */
static void fetch(const struct call *of, int64_t task, int64_t prompt, int64_t start) {
    while (start >= of->prompts[prompt].length) {
        start = 0;
        if (++prompt < of->batch) continue;
        prompt = 0;
        if (++task >= of->layers * 2 * of->heads) return;
    }
    const struct prompt *next = of->prompts + prompt;
    const int count = in_block(start, next->length);
    for (int which = 0; which < 2; which++) {
        const stored *from = vectors_of(of, next, task, which);
        for (int p = 0; p < count; p++)
            for (int d = 0; d < DIM; d += 64 / (int)sizeof(stored))
                __builtin_prefetch(from + (start + p) * next->position[which] + d, 0, 2);
    }
}

/* Of `count` positions x, what A multiplies, (count, COLUMNS), and the weight of each: f(x) is their product. */
static void widen(const stored *x, int64_t step, int count, struct scratch *own) {
    for (int p = 0; p < count; p++) {
        float *row = own->x + p * COLUMNS;
        for (int d = 0; d < DIM; d++) row[d] = read_one(x[p * step + d]);
        if (RMS) {
            vector sums = {0};
            for (int d = 0; d < DIM; d += LANES) sums += at(row + d) * at(row + d);
            own->weight[p] = 1 / __builtin_sqrtf(total(sums) / DIM + 1e-12f);
        }
        if (SQUARES)
            for (int d = 0; d < DIM; d++) row[DIM + d] = row[d] * row[d] * (RMS ? own->weight[p] : 1.0f);
    }
}

static inline void weigh(float *rows, int count, const float *weight) {
    for (int p = 0; p < count; p++)
        for (int r = 0; r < RANKS; r++) rows[p * RANKS + r] *= weight[p];
}

/* One prompt's error, into own->own_left and own->own_right its gradients; adds |x' - y|² and |y|² to `found`. */
static void one_prompt(const struct call *of, int64_t task, int64_t number, struct scratch *own, double *found) {
    const struct prompt *prompt = of->prompts + number;
    const int64_t place = task / (2 * of->heads) * of->heads + task % of->heads;
    const struct weights *weights = of->weights + task / of->heads % 2;
    const stored *x = vectors_of(of, prompt, task, 0), *y = vectors_of(of, prompt, task, 1);
    memset(own->own_left, 0, sizeof own->own_left);
    memset(own->own_right, 0, sizeof own->own_right);
    for (int64_t start = 0; start < prompt->length; start += BLOCK) {
        /* tiles are whole: what they make of rows behind the last is never read */
        const int count = in_block(start, prompt->length), whole = (count + TALL - 1) / TALL * TALL;
        fetch(of, task, number, start + BLOCK);
        widen(x + start * prompt->position[0], prompt->position[0], count, own);
        to_ranks(own->x, COLUMNS, own->left, own->latent, whole, COLUMNS, RANKS);
        if (RMS) weigh(own->latent, count, own->weight);
        to_dims(own->latent, RANKS, own->right, own->delta, whole, RANKS, DIM);
        if (RIDGE) to_dims(own->x, COLUMNS, weights->ridge + place * DIM * DIM, own->error, whole, DIM, DIM);
        vector errors = {0}, energy = {0};
        for (int p = 0; p < count; p++) {
            const stored *wanted = y + (start + p) * prompt->position[1];
            const float *base = RIDGE ? own->error + p * DIM : own->x + p * COLUMNS;
            float target[DIM];
            for (int d = 0; d < DIM; d++) target[d] = read_one(wanted[d]);
            for (int d = 0; d < DIM; d += LANES) {
                vector error = at(base + d) - at(target + d) + at(own->delta + p * DIM + d);
                if (RIDGE) error += at(weights->bias + place * DIM + d);
                errors += error * error;
                energy += at(target + d) * at(target + d);
                *(vector *)(own->error + p * DIM + d) = error;
            }
        }
        found[0] += total(errors);
        found[1] += total(energy);
        to_ranks(own->error, DIM, own->turned, own->back, whole, DIM, RANKS);
        if (RMS) weigh(own->back, count, own->weight);
        add_outer(own->latent, own->error, own->own_right, count, DIM);
        add_outer(own->back, own->x, own->own_left, count, COLUMNS);
    }
}

/* A and B as they are multiplied: σ and s worked in, B turned as well. */
static void take_weights(const struct weights *of, int64_t place, double scale, struct scratch *own) {
    const float sigma = of->sigma[place], *left = of->left + place * COLUMNS * RANK, *right = of->right + place * RANK * DIM;
    memset(own->left, 0, sizeof own->left);
    memset(own->right, 0, sizeof own->right);
    memset(own->turned, 0, sizeof own->turned);
    for (int f = 0; f < COLUMNS; f++)
        for (int r = 0; r < RANK; r++)
            own->left[f * RANKS + r] = RMS ? left[f * RANK + r] : left[f * RANK + r] / (f < DIM ? sigma : sigma * sigma);
    for (int r = 0; r < RANK; r++)
        for (int d = 0; d < DIM; d++)
            own->turned[d * RANKS + r] = own->right[r * DIM + d] = right[r * DIM + d] * (float)(scale * sigma);
}

static void give_gradients(const struct weights *of, int64_t place, double scale, double share, const struct scratch *own) {
    const float sigma = of->sigma[place], of_right = 2 * share * scale * sigma;
    float *left = of->d_left + place * COLUMNS * RANK, *right = of->d_right + place * RANK * DIM;
    for (int f = 0; f < COLUMNS; f++) {
        const float of_left = RMS ? 2 * share : 2 * share / (f < DIM ? sigma : sigma * sigma);
        for (int r = 0; r < RANK; r++) left[f * RANK + r] = own->d_left[r * COLUMNS + f] * of_left;
    }
    for (int i = 0; i < RANK * DIM; i++) right[i] = own->d_right[i] * of_right;
}

static double one_head(const struct call *of, int64_t task, struct scratch *own) {
    const int64_t place = task / (2 * of->heads) * of->heads + task % of->heads;
    const struct weights *weights = of->weights + task / of->heads % 2;
    double loss = 0;
    take_weights(weights, place, of->scale, own);
    memset(own->d_left, 0, sizeof own->d_left);
    memset(own->d_right, 0, sizeof own->d_right);
    for (int64_t prompt = 0; prompt < of->batch; prompt++) {
        if (!of->prompts[prompt].length) continue;
        double found[2] = {0};
        one_prompt(of, task, prompt, own, found);
        const float share = 1 / found[1];
        for (int i = 0; i < RANKS * COLUMNS; i++) own->d_left[i] += own->own_left[i] * share;
        for (int i = 0; i < RANKS * DIM; i++) own->d_right[i] += own->own_right[i] * share;
        loss += found[0] / found[1];
    }
    give_gradients(weights, place, of->scale, 1.0 / (of->layers * 2 * of->heads * of->batch), own);
    return loss;
}

/* The mean over prompts, layers, heads, keys and values of |x' - y|² / |y|²; its gradients into d_left and d_right. */
double kv_mse(const struct call *of) {
    const int64_t tasks = of->layers * 2 * of->heads;
#pragma omp parallel for schedule(static) num_threads((int)of->threads)
    for (int64_t task = 0; task < tasks; task++)
        of->losses[task] = one_head(of, task, (struct scratch *)of->scratch + omp_get_thread_num());
    double loss = 0;
    for (int64_t task = 0; task < tasks; task++) loss += of->losses[task];
    return loss / (tasks * of->batch);
}
