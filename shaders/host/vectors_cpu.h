// Vectors of eight floats for the tuned bodies of the CPU at width 1. One text for every instruction set: the compiler
// splits a vector where the hardware has shorter ones; intrinsics appear only where it has no other way to the
// instruction.
#pragma once

#include "shape.h"

using f8 = float __attribute__((vector_size(32)));
using u8 = uint32_t __attribute__((vector_size(32)));
using i8 = int32_t __attribute__((vector_size(32)));
using h8 = ushort __attribute__((vector_size(16)));
using s16 = short __attribute__((vector_size(32)));
using u16 = ushort __attribute__((vector_size(32)));

LILY_INLINE f8 splat8(float x) {
    return f8{x, x, x, x, x, x, x, x};
}

LILY_INLINE f8 load8(const float* p) {
    f8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

LILY_INLINE void store8(float* p, f8 v) {
    __builtin_memcpy(p, &v, sizeof v);
}

LILY_INLINE u8 load_words8(const void* p) {
    u8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

LILY_INLINE h8 load_shorts8(const void* p) {
    h8 v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

LILY_INLINE f8 float8(u8 v) {
    return __builtin_convertvector((i8)v, f8);
}

// a * b + c as fma() of the shim has it.
LILY_INLINE f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    f8 r;
    for (int i = 0; i < 8; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

// To the nearest integer, even; |x| <= 2^15. The addition rounds where a float's last bit is 1.
LILY_INLINE i8 round_int8(f8 x) {
    return (i8)(x + splat8(0x1.8p23f)) - 0x4b400000;
}

// Sums of pairs of products.
LILY_INLINE i8 dot_pairs16(s16 a, s16 b) {
#if defined(__AVX2__)
    return (i8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    __m128i x[2], y[2];
    __builtin_memcpy(x, &a, sizeof a);
    __builtin_memcpy(y, &b, sizeof b);
    for (int i = 0; i < 2; ++i) x[i] = _mm_madd_epi16(x[i], y[i]);
    return __builtin_bit_cast(i8, x);
#else
    return ((i8)a << 16 >> 16) * ((i8)b << 16 >> 16) + ((i8)a >> 16) * ((i8)b >> 16);
#endif
}

LILY_INLINE uint total8(u8 v) {
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

LILY_INLINE int largest8(i8 v) {
    i8 other = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v = v > other ? v : other;
    other = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v = v > other ? v : other;
    return max(v[0], v[1]);
}

LILY_INLINE f8 widen_half8(h8 bits) {
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps((__m128i)bits);
#else
    // Moving the exponent by a multiplication is exact and also right for subnormal halves.
    const u8 h = __builtin_convertvector(bits, u8);
    const u8 magnitude = h & 0x7fff;
    const f8 value = (f8)(magnitude << 13) * splat8(0x1p112f);
    const u8 special = (u8)(magnitude >= 0x7c00) & 0x7f800000;
    return (f8)((u8)value | special | (h & 0x8000) << 16);
#endif
}

LILY_INLINE f8 widen_bfloat8(h8 bits) {
#if defined(__AVX2__)
    const u8 wide = (u8)_mm256_cvtepu16_epi32((__m128i)bits);  // the compiler does it in two halves
#else
    const u8 wide = __builtin_convertvector(bits, u8);
#endif
    return (f8)(wide << 16);
}

// Rounds to half, nearest even; |x| <= 65504 or NaN.
LILY_INLINE h8 narrow_half8(f8 x) {
#if defined(__F16C__)
    return (h8)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const u8 bits = (u8)x, magnitude = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
    const u8 normal = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
    const u8 subnormal = (u8)((f8)magnitude + splat8(0.5f)) - 0x3f000000;  // the addition rounds at 2^-24
    const u8 small = (u8)(magnitude < 0x38800000), nan = (u8)(magnitude > 0x7f800000);
    const u8 finite = (small & subnormal) | (~small & normal);
    return __builtin_convertvector(((nan & 0x7e00) | (~nan & finite)) | sign, h8);
#endif
}

// Rounds to bfloat, nearest even, but leaves the bits where a float has them.
LILY_INLINE u8 round_bfloat8(f8 x) {
    const u8 bits = (u8)x, nan = (u8)((bits & 0x7fffffff) > 0x7f800000);
    const u8 finite = bits + 0x7fff + ((bits >> 16) & 1);
    return ((nan & (bits | 0x400000)) | (~nan & finite)) & 0xffff0000;
}

LILY_INLINE h8 narrow_bfloat8(f8 x) {
    return __builtin_convertvector(round_bfloat8(x) >> 16, h8);
}

// Into the range of a finite half; a NaN stays one, as in clamp().
LILY_INLINE f8 clamp_half8(f8 x) {
    const f8 least = splat8(-65504.0f), most = splat8(65504.0f);
#if defined(__AVX__)
    return (f8)_mm256_min_ps((__m256)most, _mm256_max_ps((__m256)least, (__m256)x));
#else
    x = x < least ? least : x;
    return x > most ? most : x;
#endif
}

LILY_INLINE f8 load_bfloat8(const bfloat* p) {
    return widen_bfloat8(load_shorts8(p));
}

LILY_INLINE f8 gather_bfloat8(const bfloat* p, uint stride) {
    h8 bits;
#pragma GCC unroll 8
    for (uint i = 0; i < 8; ++i) __builtin_memcpy((char*)&bits + 2 * i, p + i * stride, 2);
    return widen_bfloat8(bits);
}

LILY_INLINE f8 load_act8(const act_t* p) {
    if constexpr (std::is_same_v<act_t, half>)
        return widen_half8(load_shorts8(p));
    else
        return widen_bfloat8(load_shorts8(p));
}

// to_act(), as bits.
LILY_INLINE h8 narrow_act8(f8 x) {
    if constexpr (std::is_same_v<act_t, half>)
        return narrow_half8(clamp_half8(x));
    else
        return narrow_bfloat8(x);
}

LILY_INLINE void store_act8(act_t* p, f8 x) {
    const h8 rounded = narrow_act8(x);
    __builtin_memcpy(p, &rounded, sizeof rounded);
}

LILY_INLINE float sum8(f8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

LILY_INLINE void transpose8(f8 r[8]) {
    f8 a[8], b[8];
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 2; ++i) {
        b[4 * i] = __builtin_shufflevector(a[4 * i], a[4 * i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        b[4 * i + 1] = __builtin_shufflevector(a[4 * i], a[4 * i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        b[4 * i + 2] = __builtin_shufflevector(a[4 * i + 1], a[4 * i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        b[4 * i + 3] = __builtin_shufflevector(a[4 * i + 1], a[4 * i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = __builtin_shufflevector(b[i], b[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
        r[4 + i] = __builtin_shufflevector(b[i], b[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// sum8() of each.
LILY_INLINE f8 sums8(f8 (&v)[8]) {
    transpose8(v);
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
