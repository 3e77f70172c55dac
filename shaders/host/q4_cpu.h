// Tuned bodies of the helpers of lily.h, quant.h and tile.h for the CPU at width 1, in vectors of eight
// floats. One text for every instruction set: the compiler splits a vector where the hardware has shorter
// ones; intrinsics appear only where it has no other way to the instruction. Sums are fp32, in an order that
// depends on nothing but K.
#pragma once

#include "shape.h"

using f8 = float __attribute__((vector_size(32)));
using u8 = uint32_t __attribute__((vector_size(32)));
using i8 = int32_t __attribute__((vector_size(32)));
using h8 = ushort __attribute__((vector_size(16)));

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
    return (f8)(__builtin_convertvector(bits, u8) << 16);
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

// to_act(), as a float again.
LILY_INLINE f8 round_act8(f8 x) {
    if constexpr (std::is_same_v<act_t, half>)
        return widen_half8(narrow_half8(clamp_half8(x)));
    else
        return (f8)round_bfloat8(x);
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

// ---- sums of one lane

#define LILY_TUNED_LANE_DOT
template <uint N>
LILY_INLINE float lane_dot(const float* a, const float* b) {
    if constexpr (N % 8 != 0) {
        float sum = 0;
        for (uint i = 0; i < N; ++i) sum = fma(a[i], b[i], sum);
        return sum;
    } else {
        constexpr uint CHAINS = N % 32 == 0 ? 4 : 1;  // independent sums hide the latency of an addition
        f8 sum[CHAINS] = {};
        for (uint i = 0; i < N; i += 8 * CHAINS)
            for (uint c = 0; c < CHAINS; ++c) sum[c] = fma8(load8(a + i + 8 * c), load8(b + i + 8 * c), sum[c]);
        for (uint c = 1; c < CHAINS; ++c) sum[0] += sum[c];
        return sum8(sum[0]);
    }
}

#define LILY_TUNED_LARGEST
inline float lane_largest(const float* v, uint n) {
    f8 high = splat8(-kInfinity);
    uint i = 0;
    for (; i + 8 <= n; i += 8) {
        const f8 x = load8(v + i);
        high = high < x ? x : high;  // a NaN is never larger
    }
    float most = -kInfinity;
    for (; i < n; ++i) most = max(most, v[i]);
    for (uint j = 0; j < 8; ++j) most = max(most, high[j]);
    return most;
}
inline uint lane_find(const float* v, uint n, float wanted) {
    uint i = 0;
    for (; i + 8 <= n; i += 8) {
        const i8 same = load8(v + i) == splat8(wanted);
        if (((same[0] | same[1]) | (same[2] | same[3])) | ((same[4] | same[5]) | (same[6] | same[7]))) break;
    }
    while (i < n && v[i] != wanted) ++i;
    return i;
}

#define LILY_TUNED_SQUARES
inline float lane_squares(const float* x, uint n, uint, uint) {
    f8 sum[4] = {};
    uint i = 0;
    for (; i + 32 <= n; i += 32)
        for (uint c = 0; c < 4; ++c) sum[c] = fma8(load8(x + i + 8 * c), load8(x + i + 8 * c), sum[c]);
    float rest = 0;
    for (; i < n; ++i) rest = fma(x[i], x[i], rest);
    return sum8((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

#define LILY_TUNED_SCALED
inline void store_scaled(act_t* y, const float* x, const bfloat* w, float scale, uint n, uint, uint) {
    for (uint i = 0; i < n; i += 8) {  // sizes are multiples of 64
        const h8 rounded = narrow_act8(load8(x + i) * splat8(scale) * load_bfloat8(w + i));
        __builtin_memcpy(y + i, &rounded, sizeof rounded);
    }
}

// ---- quantised rows times one vector

#define LILY_TUNED_QUANT
constexpr uint LANES_PER_ROW = 1;
constexpr uint ROWS_PER_LANE = 64;  // enough to forget the cost of preparing x; every matrix has so many rows
constexpr uint LANE_K = 4096;

// Element j of v[g][i] is x[64 g + 8 j + i] / 16^i (i < 7): word j of a group of 4-bit weights, masked to
// weight i but not shifted, converts to 16^i times the weight. Weight 7 would be a sign, so it is shifted
// down and x is as it was.
struct quant_x {
    f8 v[LANE_K / QUANT_GROUP][8];
    float sum[LANE_K / QUANT_GROUP];
    uint groups;

    LILY_INLINE void load(const act_t* x, uint count) {
        groups = count / QUANT_GROUP;
        for (uint g = 0; g < groups; ++g) {
            f8 r[8];
            for (uint i = 0; i < 8; ++i) r[i] = load_act8(x + g * QUANT_GROUP + 8 * i);
            sum[g] = sum8(((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7])));
            transpose8(r);
            float scale = 1.0f;
            for (uint i = 0; i < 7; ++i, scale *= 0.0625f) v[g][i] = r[i] * splat8(scale);
            v[g][7] = r[7];
        }
    }
};

LILY_INLINE f8 group_dot4(const f8* x, const uint4* w) {
    const u8 q = load_words8(w);
    f8 even = float8(q & 0xf) * x[0];
    f8 odd = float8(q & 0xf0) * x[1];
    even = fma8(float8(q & 0xf00), x[2], even);
    odd = fma8(float8(q & 0xf000), x[3], odd);
    even = fma8(float8(q & 0xf0000), x[4], even);
    odd = fma8(float8(q & 0xf00000), x[5], odd);
    even = fma8(float8(q & 0xf000000), x[6], even);
    odd = fma8(float8(q >> 28), x[7], odd);
    return even + odd;
}

// Two words hold what x[0...7] expects in one, so each byte is moved to where its 4-bit weight would be.
LILY_INLINE f8 group_dot8(const f8* x, const uint4* w) {
    const u8 front = load_words8(w), back = load_words8(w + 2);
    const u8 low = __builtin_shufflevector(front, back, 0, 2, 4, 6, 8, 10, 12, 14);
    const u8 high = __builtin_shufflevector(front, back, 1, 3, 5, 7, 9, 11, 13, 15);
    f8 even = float8(low & 0xff) * x[0];
    f8 odd = float8((low >> 4) & 0xff0) * x[1];
    even = fma8(float8((low >> 8) & 0xff00), x[2], even);
    odd = fma8(float8((low >> 12) & 0xff000), x[3], odd);
    even = fma8(float8((high << 16) & 0xff0000), x[4], even);
    odd = fma8(float8((high << 12) & 0xff00000), x[5], odd);
    even = fma8(float8((high >> 16) & 0xff), x[6] * splat8(0x1p24f), even);
    odd = fma8(float8(high >> 24), x[7], odd);
    return even + odd;
}

template <uint BITS>
struct quant_acc {
    f8 scaled;
    f8 biased;
    float rest;

    LILY_INLINE void clear() {
        scaled = biased = f8{};
        rest = 0;
    }
    LILY_INLINE void mac(const quant_x& x, const uint4* w, const bfloat* s, const bfloat* b) {
        alignas(32) float scale[LANE_K / QUANT_GROUP];
        uint g = 0;
        for (; g + 8 <= x.groups; g += 8) {
            store8(scale + g, load_bfloat8(s + g));
            biased = fma8(load_bfloat8(b + g), load8(x.sum + g), biased);
        }
        for (; g < x.groups; ++g) {
            scale[g] = float(s[g]);
            rest = fma(float(b[g]), x.sum[g], rest);
        }
        f8 acc = scaled;
#pragma GCC unroll 2
        for (g = 0; g < x.groups; ++g) {
            const f8 dot = BITS == 4 ? group_dot4(x.v[g], w + 2 * g) : group_dot8(x.v[g], w + 4 * g);
            acc = fma8(splat8(scale[g]), dot, acc);
        }
        scaled = acc;
    }
    LILY_INLINE float total() const { return sum8(scaled + biased) + rest; }
};

// ---- matrix tiles

#define LILY_TUNED_TILE
LILY_INLINE uint tile_at(uint row, uint col) {
    return row * TILE_K + col;
}

LILY_INLINE void tile_put8(act_t* tile, uint row, uint col, uint4 v) {
    __builtin_memcpy(tile + tile_at(row, col), &v, sizeof v);
}

// Eight consecutive values as bits of act_t. They were stored a moment ago in pieces of at most 16 bytes, and a wider
// load would have to wait until those have left for the cache.
LILY_INLINE uint4 pack8(const float* v) {
    using f4 = float __attribute__((vector_size(16)));
    f4 low, high;
    __builtin_memcpy(&low, v, sizeof low);
    __builtin_memcpy(&high, v + 4, sizeof high);
    const f8 all = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_bit_cast(uint4, narrow_act8(all));
}

// Row-major; the last product tells how many rows matter, and only those are visited.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false>
struct tile_acc {
    static constexpr uint COLUMNS = BN;
    alignas(64) float c[BM * BN];
    uint rows = BM;

    LILY_INLINE float& operator[](uint i) { return c[i]; }
};

template <class Acc>
LILY_INLINE uint tile_capacity(const Acc& acc) {
    return acc.rows * Acc::COLUMNS;
}
template <class Acc>
LILY_INLINE bool tile_valid(const Acc&, uint) {
    return true;
}
template <class Acc>
LILY_INLINE uint tile_row(const Acc&, uint i) {
    return i / Acc::COLUMNS;
}
template <class Acc>
LILY_INLINE uint tile_col(const Acc&, uint i) {
    return i % Acc::COLUMNS;
}
template <class Acc>
LILY_INLINE void tile_clear(Acc& acc, uint, uint) {
    for (float& value : acc.c) value = 0;
}

constexpr uint PANEL = 16;  // columns of the right operand that a register block spans
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__aarch64__)
constexpr uint BLOCK_ROWS = 6;
#else
constexpr uint BLOCK_ROWS = 2;
#endif

// c[ROWS][16] += a[ROWS][64] panel[64][16], in registers.
template <uint ROWS, uint BN>
LILY_INLINE void multiply_block(float* c, const float* a, const float* panel) {
    f8 acc[ROWS][2];
#pragma GCC unroll 8
    for (uint r = 0; r < ROWS; ++r) {
        acc[r][0] = load8(c + r * BN);
        acc[r][1] = load8(c + r * BN + 8);
    }
#pragma GCC unroll 1
    for (uint k = 0; k < TILE_K; ++k) {
        const f8 left = load8(panel + k * PANEL), right = load8(panel + k * PANEL + 8);
#pragma GCC unroll 8
        for (uint r = 0; r < ROWS; ++r) {
            const f8 x = splat8(a[r * TILE_K + k]);
            acc[r][0] = fma8(x, left, acc[r][0]);
            acc[r][1] = fma8(x, right, acc[r][1]);
        }
    }
#pragma GCC unroll 8
    for (uint r = 0; r < ROWS; ++r) {
        store8(c + r * BN, acc[r][0]);
        store8(c + r * BN + 8, acc[r][1]);
    }
}

template <uint BN>
inline void multiply_panel(float* c, const float* a, const float* panel, uint rows) {
    uint m = 0;
    for (; m + BLOCK_ROWS <= rows; m += BLOCK_ROWS) multiply_block<BLOCK_ROWS, BN>(c + m * BN, a + m * TILE_K, panel);
    for (; m + 2 <= rows; m += 2) multiply_block<2, BN>(c + m * BN, a + m * TILE_K, panel);
    if (m < rows) multiply_block<1, BN>(c + m * BN, a + m * TILE_K, panel);
}

LILY_INLINE void widen_rows(float* to, const act_t* from, uint rows) {
    for (uint i = 0; i < rows * TILE_K; i += 8) store8(to + i, load_act8(from + i));
}

// acc += a b^T; a is [BM][64], b is [BN][64].
template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* a, const act_t* b) {
    alignas(64) float left[BM * TILE_K], panel[TILE_K * PANEL];
    widen_rows(left, a, BM);
    for (uint n = 0; n < BN; n += PANEL) {
        for (uint at = 0; at < TILE_K; at += 8)
            for (uint side = 0; side < PANEL; side += 8) {
                f8 r[8];
                for (uint i = 0; i < 8; ++i) r[i] = load_act8(b + (n + side + i) * TILE_K + at);
                transpose8(r);
                for (uint i = 0; i < 8; ++i) store8(panel + (at + i) * PANEL + side, r[i]);
            }
        multiply_panel<BN>(acc.c + n, left, panel, BM);
    }
}

// acc += a b; a is [BM][64], b is [64][BN].
template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply_plain(tile_acc<BM, BN, SIMDS, true>& acc, const act_t* a, const act_t* b) {
    static_assert(BN == TILE_K);
    alignas(64) float left[BM * TILE_K], panel[TILE_K * PANEL];
    widen_rows(left, a, BM);
    for (uint n = 0; n < BN; n += PANEL) {
        for (uint k = 0; k < TILE_K; ++k)
            for (uint side = 0; side < PANEL; side += 8)
                store8(panel + k * PANEL + side, load_act8(b + k * BN + n + side));
        multiply_panel<BN>(acc.c + n, left, panel, BM);
    }
}

// panel[k][side + r] = weight k of row r, rounded once to act_t, for eight rows. Word j of all rows fills one
// vector.
template <uint BITS>
LILY_INLINE void dequantise_rows8(float* panel, const uint4* w, uint w_stride, const bfloat* s, const bfloat* b,
                                  uint g_stride) {
    constexpr uint PER_WORD = 32 / BITS;
    f8 scale, bias;
    for (uint r = 0; r < 8; ++r) {
        scale[r] = float(s[r * g_stride]);
        bias[r] = float(b[r * g_stride]);
    }
    for (uint part = 0; part < TILE_K; part += 8 * PER_WORD) {
        f8 words[8];
        for (uint r = 0; r < 8; ++r) words[r] = (f8)load_words8(w + r * w_stride + part * BITS / 128);
        transpose8(words);
        for (uint j = 0; j < 8; ++j)
            for (uint i = 0; i < PER_WORD; ++i) {
                const f8 q = float8(((u8)words[j] >> (BITS * i)) & ((1u << BITS) - 1));
                store8(panel + (part + j * PER_WORD + i) * PANEL, round_act8(fma8(scale, q, bias)));
            }
    }
}

// acc += x w^T over one group of 64. The expanded weights live in a panel of 16 rows that stays in the first
// cache.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* xs, const act_t*, const uint4* w,
                                uint w_stride, const bfloat* scales, const bfloat* biases, uint g_stride, uint live,
                                uint) {
    alignas(64) float left[BM * TILE_K], panel[TILE_K * PANEL];
    acc.rows = live;
    widen_rows(left, xs, live);
    for (uint n = 0; n < BN; n += PANEL) {
        for (uint side = 0; side < PANEL; side += 8)
            dequantise_rows8<BITS>(panel + side, w + (n + side) * w_stride, w_stride, scales + (n + side) * g_stride,
                                   biases + (n + side) * g_stride, g_stride);
        multiply_panel<BN>(acc.c + n, left, panel, live);
    }
}
