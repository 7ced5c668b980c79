/* What a cache holds, by -D STORED: 0 what is computed in (-D REAL, float unless it is given), 1 bfloat16, 2 float16. */
#pragma once
#include <stdint.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif

typedef REAL real;

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
