/* x W^T + b of a few rows x: every weight is read once, and that as fast as memory gives it.

   Four of W's rows are read side by side, for all rows of x while they are near the core, and the next four are fetched. */
#include "vectors.h"

enum { SIDE = 4 };

/* x (rows, in), weight (out, in), bias (out) or NULL, y (rows, out), one after the other */
struct product {
    const float *x, *weight, *bias;
    float *y;
    int64_t rows, out, in, threads;
};

/* y of `count` rows of W from `first` on and one row of x; what is `ahead` floats further is fetched. */
static inline __attribute__((always_inline)) void few(
    const struct product *of, int64_t row, int64_t first, int count, int64_t ahead
) {
    const float *x = of->x + row * of->in, *w = of->weight + first * of->in;
    vector sums[SIDE] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= of->in; i += LANES) {
        const vector own = at(x + i);
        for (int o = 0; o < count; o++) {
            if (ahead) __builtin_prefetch(w + o * of->in + i + ahead);
            sums[o] += own * at(w + o * of->in + i);
        }
    }
    for (int o = 0; o < count; o++) {
        float sum = total(sums[o]);
        for (int64_t d = i; d < of->in; d++) sum += x[d] * w[o * of->in + d];
        of->y[row * of->out + first + o] = of->bias ? sum + of->bias[first + o] : sum;
    }
}

void multiply(const struct product *of) {
#pragma omp parallel for num_threads((int)of->threads) schedule(static)
    for (int64_t first = 0; first < of->out; first += SIDE)
        for (int64_t row = 0; row < of->rows; row++) {
            if (first + SIDE <= of->out)
                few(of, row, first, SIDE, row ? 0 : SIDE * of->in);
            else
                few(of, row, first, (int)(of->out - first), 0);
        }
}
