/* The processor's own vectors of floats, and what is computed on them. gcc takes wider ones apart through memory. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

typedef float vector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(BYTES)));

enum { LANES = BYTES / 4 };

static inline vector at(const float *x) { return *(const vector *)x; }

static inline vector larger(vector a, vector b) { return (vector)(((whole)a & (a > b)) | ((whole)b & ~(a > b))); }

/* e^x for x <= 0: 2^n times a polynomial in what is left, to a few units in the last place. NaN stays NaN. */
static inline vector exponential(vector x) {
    const vector least = (vector){0} - 87.0f;
    x = (vector)(((whole)x & ~(x < least)) | ((whole)least & (x < least)));
    const vector shifted = x * 1.44269504f + 12582912.0f;  /* rounds to a whole number, which its low bits then are */
    const vector n = shifted - 12582912.0f;
    const vector r = x - n * 0.693359375f + n * 2.12194440e-4f;  /* log 2 in two parts */
    vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (vector)(((whole)shifted << 23) + 0x3f800000);
}

/* The sum of all lanes, by halves. */
static inline float total(vector v) {
#ifdef __clang__
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
#else
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    whole lanes;
    memcpy(&lanes, numbers, BYTES);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) v += __builtin_shuffle(v, lanes ^ half);
#endif
    return v[0];
}
