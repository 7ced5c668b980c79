/* A layer's cached keys and values with a low-rank residual added where they lie, one pass (`residual.h`).

   TURN, 0 or 1 by -D: keys are turned back by their position's angle. */
#include "residual.h"

enum {
    BLOCK = 512, /* positions whose angles stay near the core while all heads use them */
    AHEAD = 16   /* positions: how far ahead the cache is fetched */
};

struct layer {
    struct residual residual;
    int64_t batches, heads, positions, threads;
};

/* A thread's part of keys or of values, block by block of positions, all heads of a block one after the other: called by each
   of a team. */
static inline __attribute__((always_inline)) void correct_half(const struct layer *of, const struct half *half, int turn) {
    const int64_t even = of->positions / (4 * of->threads) / TILE * TILE + TILE;  /* a few for each thread */
    const int64_t block = even < BLOCK ? even : BLOCK, blocks = (of->positions + block - 1) / block;
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < of->batches * blocks * of->heads; i++) {
        const int64_t head = i % of->heads, first = i / of->heads % blocks * block, batch = i / of->heads / blocks;
        const int64_t last = first + block < of->positions ? first + block : of->positions;
        correct_positions(&of->residual, half, batch, head, first, last, of->positions, AHEAD, turn);
    }
}

void correct(const struct layer *of) {
#pragma omp parallel num_threads((int)of->threads)
    {
        correct_half(of, &of->residual.keys, TURN);
        if (of->residual.values.x) correct_half(of, &of->residual.values, 0);
    }
}
