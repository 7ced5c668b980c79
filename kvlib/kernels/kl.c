/* KL(softmax(native) ‖ softmax(path)) of rows of logits, and its gradient in the path's logits, over one row at a time,
   which stays in the processor's cache: three passes for what torch's operators need ten. */
#include <math.h>

#include "vectors.h"

enum { PIECE = 1024 };  /* entries whose sums are floats; those of the pieces are added up in double */

static inline double over_lanes(vector x) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline float largest(const float *x, int64_t entries) {
    vector found = (vector){0} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= entries; i += LANES) found = larger(at(x + i), found);
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) most = found[lane] > most ? found[lane] : most;
    for (; i < entries; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* `count` entries, LANES or fewer: the exponentials in their place, and sums of native's, of the path's, of p (n - h) */
static inline __attribute__((always_inline)) void entries(float *native, float *path, float n_most, float h_most, vector *sums) {
    const vector n = at(native) - n_most, h = at(path) - h_most, e_n = exponential(n), e_h = exponential(h);
    sums[0] += e_n;
    sums[1] += e_h;
    sums[2] += e_n * (n - h);
    *(vector *)native = e_n;
    *(vector *)path = e_h;
}

/* Overwrites both rows: path becomes (softmax(path) - softmax(native)) * scale. */
static double one_row(float *native, float *path, int64_t width, float scale) {
    const float n_most = largest(native, width), h_most = largest(path, width);
    const int64_t full = width - width % LANES;
    double totals[3] = {0};
    for (int64_t start = 0; start < full; start += PIECE) {
        vector sums[3] = {{0}};
        const int64_t stop = start + PIECE < full ? start + PIECE : full;
        for (int64_t i = start; i < stop; i += LANES) entries(native + i, path + i, n_most, h_most, sums);
        for (int k = 0; k < 3; k++) totals[k] += over_lanes(sums[k]);
    }
    for (int64_t i = full; i < width; i++) {
        const float n = native[i] - n_most, h = path[i] - h_most, e_n = expf(n), e_h = expf(h);
        totals[0] += e_n;
        totals[1] += e_h;
        totals[2] += e_n * (n - h);
        native[i] = e_n;
        path[i] = e_h;
    }
    const float of_native = scale / totals[0], of_path = scale / totals[1];
    for (int64_t i = 0; i < width; i++) path[i] = path[i] * of_path - native[i] * of_native;
    return totals[2] / totals[0] - log(totals[0]) + log(totals[1]);
}

void kl(float *native, float *path, float *found, int64_t rows, int64_t width, float scale, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t row = 0; row < rows; row++) found[row] = one_row(native + row * width, path + row * width, width, scale);
}
