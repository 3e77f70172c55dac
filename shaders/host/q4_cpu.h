// Tuned bodies of the helpers of quant.h and tile.h for the CPU at width 1. Sums are fp32, those within a group of
// 4-bit weights integers; their order depends on nothing but K.
#pragma once

#include "vectors_cpu.h"

// ---- quantised rows times one vector

#define LILY_TUNED_QUANT
constexpr uint LANES_PER_ROW = 1;
constexpr uint ROWS_PER_LANE = 256;  // enough to forget the cost of preparing x, few enough to share among threads
constexpr uint LANE_K = 4096;
constexpr uint PREFETCH = 192;  // 16-byte words: what processors fetch ahead of themselves is not enough

template <uint BITS>
struct quant_x;

// Activations of 4-bit products are 16-bit integers times a power of two of their group: what is within four binades of
// the group's largest value is exact, and so is every sum before the scales.
template <>
struct quant_x<4> {
    s16 v[LANE_K / QUANT_GROUP][4];    // short m of v[g][i] is x[64 g + 4 m + i]
    float unit[LANE_K / QUANT_GROUP];  // of a group's integers; not a number where one of x is not finite
    float sum[LANE_K / QUANT_GROUP];
    uint groups;

    LILY_INLINE void load(const act_t* x, uint count, const uint4* w) {
        groups = count / QUANT_GROUP;
        for (uint g = 0; g < groups; ++g) {
            for (uint i = 0; i < 8; ++i) __builtin_prefetch(w + (8 * g + i) * 4);  // memory need not wait meanwhile
            f8 r[8];
            i8 most = {};
#pragma GCC unroll 8
            for (uint i = 0; i < 8; ++i) {
                r[i] = load_act8(x + g * QUANT_GROUP + 8 * i);
                const i8 magnitude = (i8)r[i] & 0x7fffffff;
                most = most > magnitude ? most : magnitude;
            }
            const uint exponent = max(uint(largest8(most)) >> 23, 27u);  // at least 2^-100
            const f8 scale = splat8(as_type<float>((127 + 14 + 127 - min(exponent, 254u)) << 23));
            unit[g] = as_type<float>(exponent < 255 ? (exponent - 14) << 23 : 0x7fc00000);
            transpose8(r);
            i8 q[8];
            u8 total = {};  // what is not a number is a large integer; unsigned sums may wrap
#pragma GCC unroll 8
            for (uint i = 0; i < 8; ++i) {
                q[i] = round_int8(r[i] * scale);
                total += (u8)q[i];
            }
            for (uint i = 0; i < 4; ++i) v[g][i] = (s16)((q[i] & 0xffff) | (q[i + 4] << 16));
            sum[g] = unit[g] * float(int(total8(total)));
        }
    }
};

// The router decides between experts that may be close: its activations stay as they are. Element j of v[g][i] is
// x[64 g + 8 j + i] / 16^i (i < 7): a byte of a word that is masked but not shifted converts to a power of two times
// the weight. Weight 7 would be a sign, so it is shifted down and x is as it was.
template <>
struct quant_x<8> {
    f8 v[LANE_K / QUANT_GROUP][8];
    float unit[LANE_K / QUANT_GROUP];
    float sum[LANE_K / QUANT_GROUP];
    uint groups;

    LILY_INLINE void load(const act_t* x, uint count, const uint4*) {
        groups = count / QUANT_GROUP;
        for (uint g = 0; g < groups; ++g) {
            f8 r[8];
            for (uint i = 0; i < 8; ++i) r[i] = load_act8(x + g * QUANT_GROUP + 8 * i);
            unit[g] = 1.0f;
            sum[g] = sum8(((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7])));
            transpose8(r);
            float scale = 1.0f;
            for (uint i = 0; i < 7; ++i, scale *= 0.0625f) v[g][i] = r[i] * splat8(scale);
            v[g][7] = r[7];
        }
    }
};

// The products of the group at w, in eight partial sums.
LILY_INLINE f8 group_dot(const quant_x<4>& x, uint g, const uint4* w) {
    const u16 q = (u16)load_words8(w);
    const s16* v = x.v[g];
    const i8 low = dot_pairs16((s16)(q & 0xf), v[0]) + dot_pairs16((s16)(q >> 4 & 0xf), v[1]);
    const i8 high = dot_pairs16((s16)(q >> 8 & 0xf), v[2]) + dot_pairs16((s16)(q >> 12), v[3]);
    return __builtin_convertvector(low + high, f8);
}

// Two words hold the eight weights of a lane, so each byte is moved to where x expects it.
LILY_INLINE f8 group_dot(const quant_x<8>& x, uint g, const uint4* w) {
    const u8 front = load_words8(w), back = load_words8(w + 2);
    const u8 low = __builtin_shufflevector(front, back, 0, 2, 4, 6, 8, 10, 12, 14);
    const u8 high = __builtin_shufflevector(front, back, 1, 3, 5, 7, 9, 11, 13, 15);
    const f8* v = x.v[g];
    f8 even = float8(low & 0xff) * v[0];
    f8 odd = float8((low >> 4) & 0xff0) * v[1];
    even = fma8(float8((low >> 8) & 0xff00), v[2], even);
    odd = fma8(float8((low >> 12) & 0xff000), v[3], odd);
    even = fma8(float8((high << 16) & 0xff0000), v[4], even);
    odd = fma8(float8((high << 12) & 0xff00000), v[5], odd);
    even = fma8(float8((high >> 16) & 0xff), v[6] * splat8(0x1p24f), even);
    odd = fma8(float8(high >> 24), v[7], odd);
    return even + odd;
}

template <uint BITS>
struct quant_acc {
    float sum;

    LILY_INLINE void clear() { sum = 0; }
    LILY_INLINE void mac(const quant_x<BITS>& x, const uint4* w, const bfloat* s, const bfloat* b) {
        alignas(32) float scale[LANE_K / QUANT_GROUP];
        f8 biased = {}, scaled = {};
        float rest = 0;
        uint g = 0;
        for (; g + 8 <= x.groups; g += 8) {
            store8(scale + g, load_bfloat8(s + g) * load8(x.unit + g));
            biased = fma8(load_bfloat8(b + g), load8(x.sum + g), biased);
        }
        for (; g < x.groups; ++g) {
            scale[g] = float(s[g]) * x.unit[g];
            rest = fma(float(b[g]), x.sum[g], rest);
        }
#pragma GCC unroll 2
        for (g = 0; g < x.groups; ++g) {
            const uint4* group = w + g * (BITS / 2);
            if (BITS == 8 || g % 2 == 0) __builtin_prefetch(group + PREFETCH);
            scaled = fma8(splat8(scale[g]), group_dot(x, g, group), scaled);
        }
        sum += sum8(scaled + biased) + rest;
    }
    LILY_INLINE float total() const { return sum; }
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
