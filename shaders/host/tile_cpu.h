// Tuned bodies of the helpers of tile.h for the CPU at width 1. Sums are fp32, those within a group of weights
// integers; their order depends on nothing but K.
#pragma once

#include "q4_cpu.h"

#define LILY_TUNED_TILE
#define LILY_TUNED_STORE
constexpr uint TILE_N = 256;     // enough to forget the cost of preparing x; the last tile may have fewer columns
constexpr uint LINE_GROUPS = 2;  // groups of 4-bit weights in a cache line

// A step is as deep as there is room for x, in whole cache lines of weights: the fewer rows, the longer the runs of
// memory that are read. The last step may have less.
template <uint BM>
LILY_INLINE uint tile_depth(uint live) {
    return BM / live * LINE_GROUPS * QUANT_GROUP;
}

LILY_INLINE uint tile_at(uint row, uint col) {
    return row * TILE_K + col;
}

LILY_INLINE void tile_put8(act_t* tile, uint row, uint col, uint4 v) {
    __builtin_memcpy(tile + tile_at(row, col), &v, sizeof v);
}

LILY_INLINE uint4 pack8(const float* v) {
    return __builtin_bit_cast(uint4, narrow_act8(load8(v)));
}

LILY_INLINE uint4 acts8(const bfloat* from) {
    return __builtin_bit_cast(uint4, narrow_act8(load_bfloat8(from)));
}

// Row-major; the last product tells how many rows matter, and only those are visited.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false>
struct tile_acc {
    static constexpr uint COLUMNS = BN;
    alignas(64) float c[BM * BN];
    uint rows, columns;  // that matter; other rows were never written

    LILY_INLINE void grow(uint live, uint width) {
        columns = width;
        for (; rows < live; ++rows) __builtin_memset(c + rows * BN, 0, BN * sizeof *c);
    }

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
    acc.rows = 0;
    acc.columns = Acc::COLUMNS;
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
inline void tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const act_t* a, const act_t* b, uint live,
                          uint columns) {
    alignas(64) float left[BM * TILE_K], panel[TILE_K * PANEL];
    acc.grow(live, columns);
    widen_rows(left, a, live);
    for (uint n = 0; n < columns; n += PANEL) {
        for (uint at = 0; at < TILE_K; at += 8)
            for (uint side = 0; side < PANEL; side += 8) {
                f8 r[8];
                for (uint i = 0; i < 8; ++i) r[i] = load_act8(b + (n + side + i) * TILE_K + at);
                transpose8(r);
                for (uint i = 0; i < 8; ++i) store8(panel + (at + i) * PANEL + side, r[i]);
            }
        multiply_panel<BN>(acc.c + n, left, panel, live);
    }
}

// acc += a b; a is [BM][64], b is [64][BN].
template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply_plain(tile_acc<BM, BN, SIMDS, true>& acc, const act_t* a, const act_t* b, uint live) {
    static_assert(BN == TILE_K);
    alignas(64) float left[BM * TILE_K], panel[TILE_K * PANEL];
    acc.grow(live, BN);
    widen_rows(left, a, live);
    for (uint n = 0; n < BN; n += PANEL) {
        for (uint k = 0; k < TILE_K; ++k)
            for (uint side = 0; side < PANEL; side += 8)
                store8(panel + k * PANEL + side, load_act8(b + k * BN + n + side));
        multiply_panel<BN>(acc.c + n, left, panel, live);
    }
}

// The live rows of a step as 16-bit integers; row r of group g is at g * rows + r. Pair 4 j + i of a group is of
// x[8 j + i] and x[8 j + 4 + i], which is how words hold 4-bit weights.
template <uint BM>
struct quant_rows {
    s16 v[LINE_GROUPS * BM][QUANT_GROUP / 16];
    float unit[LINE_GROUPS * BM];
    float sum[LINE_GROUPS * BM];
    uint groups, rows;

    template <uint THREADS, class Rows>
    LILY_INLINE void stage(act_t*, const act_t* x, Rows places, uint stride, uint live, uint depth, uint) {
        groups = depth / QUANT_GROUP;
        rows = live;
        for (uint r = 0; r < live; ++r) {
            const act_t* from = x + places.at(r) * stride;
            for (uint g = 0; g < groups; ++g) {
                i8 q[8];
                const uint at = g * live + r;
                const group_scale scale = integers_of(q, from + g * QUANT_GROUP);
                unit[at] = scale.unit;
                sum[at] = scale.sum;
                for (uint j = 0; j < 8; j += 2)
                    v[at][j / 2] = pairs8(__builtin_shufflevector(q[j], q[j + 1], 0, 1, 2, 3, 8, 9, 10, 11),
                                            __builtin_shufflevector(q[j], q[j + 1], 4, 5, 6, 7, 12, 13, 14, 15));
            }
        }
    }
};

// The words of one group of PANEL rows of weights, word j of eight rows in one vector, and their scales and biases.
template <uint BITS>
struct weight_panel {
    static constexpr uint WORDS = QUANT_GROUP * BITS / 32;
    f8 words[2][WORDS];
    f8 scale[2], bias[2];

    LILY_INLINE void load(const uint4* w, uint w_stride, const bfloat* s, const bfloat* b, uint g_stride) {
        for (uint side = 0; side < 2; ++side) {
            const uint first = 8 * side;
            for (uint part = 0; part < WORDS; part += 8) {
                f8* rows = words[side] + part;
#pragma GCC unroll 8
                for (uint r = 0; r < 8; ++r) rows[r] = (f8)load_words8(w + (first + r) * w_stride + part / 4);
                transpose8(*(f8(*)[8])rows);
            }
            scale[side] = gather_bfloat8(s + first * g_stride, g_stride);
            bias[side] = gather_bfloat8(b + first * g_stride, g_stride);
        }
    }

    // Pair p of eight rows, as quant_rows has those of x.
    LILY_INLINE s16 pair(uint side, uint p) const {
        const uint j = p / 4, shift = p % 4 * BITS;
        if constexpr (BITS == 4)
            return (s16)((u8)words[side][j] >> shift & 0x000f000f);
        else
            return pairs8((i8)((u8)words[side][2 * j] >> shift & 0xff),
                          (i8)((u8)words[side][2 * j + 1] >> shift & 0xff));
    }
};

// The same, unpacked once for many rows of x.
template <uint BITS>
struct unpacked_panel {
    s16 pairs[QUANT_GROUP / 2][2];
    f8 scale[2], bias[2];

    LILY_INLINE void load(const weight_panel<BITS>& w) {
        for (uint side = 0; side < 2; ++side) {
            for (uint p = 0; p < QUANT_GROUP / 2; p += 4)
                for (uint i = 0; i < 4; ++i) pairs[p + i][side] = w.pair(side, p + i);
            scale[side] = w.scale[side];
            bias[side] = w.bias[side];
        }
    }
    LILY_INLINE s16 pair(uint side, uint p) const { return pairs[p][side]; }
};

constexpr uint MOST_ROWS = 6;  // of x at once: what the registers of AVX2 hold sums for

LILY_INLINE s16 splat_pair(const s16* row, uint p) {
    uint pair;
    __builtin_memcpy(&pair, (const char*)row + p * sizeof pair, sizeof pair);
    return (s16)(u8{} + pair);
}

// c[ROWS][16] += x[ROWS][64] w[16][64]^T, of x from place `at` on: integers, then one step of fp32.
template <uint BN, uint ROWS, uint BM, class Panel>
inline void multiply_group(float* c, const quant_rows<BM>& x, uint at, const Panel& w) {
    i8 acc[ROWS][2] = {};
#pragma GCC unroll 1
    for (uint p = 0; p < QUANT_GROUP / 2; ++p) {
        const s16 left = w.pair(0, p), right = w.pair(1, p);
#pragma GCC unroll 8
        for (uint row = 0; row < ROWS; ++row) {
            const s16 pair = splat_pair(x.v[at + row], p);
            acc[row][0] += dot_pairs16(pair, left);
            acc[row][1] += dot_pairs16(pair, right);
        }
    }
#pragma GCC unroll 8
    for (uint row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (uint side = 0; side < 2; ++side) {
            float* to = c + row * BN + 8 * side;
            const f8 biased = fma8(w.bias[side], splat8(x.sum[at + row]), load8(to));
            const f8 scale = w.scale[side] * splat8(x.unit[at + row]);
            store8(to, fma8(__builtin_convertvector(acc[row][side], f8), scale, biased));
        }
}

template <uint BN, uint BM, class Panel>
LILY_INLINE void multiply_rows(float* c, const quant_rows<BM>& x, uint at, uint count, const Panel& w) {
    switch (count) {
        case 1: return multiply_group<BN, 1>(c, x, at, w);
        case 2: return multiply_group<BN, 2>(c, x, at, w);
        case 3: return multiply_group<BN, 3>(c, x, at, w);
        case 4: return multiply_group<BN, 4>(c, x, at, w);
        case 5: return multiply_group<BN, 5>(c, x, at, w);
        default: return multiply_group<BN, MOST_ROWS>(c, x, at, w);
    }
}

constexpr uint FEW_ROWS = 3;  // of x, for which turning weights into columns costs more than it saves

// The rows of a step in the order of quant_x<4>.
template <uint BM>
struct few_rows {
    s16 v[LINE_GROUPS * BM][4];

    LILY_INLINE explicit few_rows(const quant_rows<BM>& x) {
        for (uint at = 0; at < x.groups * x.rows; ++at) {
            const uint* from = (const uint*)x.v[at];
            uint* to = (uint*)v[at];
            for (uint p = 0; p < QUANT_GROUP / 2; ++p)
                to[p % 4 * 8 + p / 4] = from[p];
        }
    }
};

// The sum of each of eight vectors.
LILY_INLINE i8 sums8(const i8 (&v)[8]) {
    const auto neighbours = [](i8 a, i8 b) {
        return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
               __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
    };
    const i8 low = neighbours(neighbours(v[0], v[1]), neighbours(v[2], v[3]));
    const i8 high = neighbours(neighbours(v[4], v[5]), neighbours(v[6], v[7]));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
}

// multiply_group of eight rows of 4-bit weights as they lie in memory: the same integers, so the same bits.
template <uint BN, uint ROWS, uint BM>
LILY_INLINE void multiply_few(float* c, const quant_rows<BM>& x, const few_rows<BM>& few, uint at, const uint4* w,
                              uint w_stride, f8 scales, f8 biases) {
    i8 part[ROWS][8];
#pragma GCC unroll 8
    for (uint r = 0; r < 8; ++r) {
        const u16 q = (u16)load_words8(w + r * w_stride);
        const s16 nibbles[4] = {(s16)(q & 0xf), (s16)(q >> 4 & 0xf), (s16)(q >> 8 & 0xf), (s16)(q >> 12)};
#pragma GCC unroll 4
        for (uint row = 0; row < ROWS; ++row) {
            const s16* v = few.v[at + row];
            part[row][r] = (dot_pairs16(nibbles[0], v[0]) + dot_pairs16(nibbles[1], v[1])) +
                           (dot_pairs16(nibbles[2], v[2]) + dot_pairs16(nibbles[3], v[3]));
        }
    }
#pragma GCC unroll 4
    for (uint row = 0; row < ROWS; ++row) {
        const f8 biased = fma8(biases, splat8(x.sum[at + row]), load8(c + row * BN));
        const f8 sum = __builtin_convertvector(sums8(part[row]), f8);
        store8(c + row * BN, fma8(sum, scales * splat8(x.unit[at + row]), biased));
    }
}

// acc += x w^T over one step of at most FEW_ROWS rows, eight columns at a time.
template <uint BN, uint BM>
inline void multiply_few_rows(float* c, const quant_rows<BM>& x, const uint4* w, uint w_stride, const bfloat* scales,
                              const bfloat* biases, uint g_stride, uint columns) {
    constexpr uint WORDS = QUANT_GROUP / 32;
    const few_rows<BM> few(x);
    for (uint n = 0; n < columns; n += 8, w += 8 * w_stride) {
        const uint4* next = w + 8 * w_stride;
        for (uint g = 0; g < x.groups; ++g) {
            if (g % LINE_GROUPS == 0)
                for (uint r = 0; r < 8; ++r) __builtin_prefetch(next + r * w_stride + g * WORDS);
            const f8 scale = gather_bfloat8(scales + n * g_stride + g, g_stride);
            const f8 bias = gather_bfloat8(biases + n * g_stride + g, g_stride);
            const uint4* from = w + g * WORDS;
            if (x.rows == 1)
                multiply_few<BN, 1>(c + n, x, few, g, from, w_stride, scale, bias);
            else if (x.rows == 2)
                multiply_few<BN, 2>(c + n, x, few, 2 * g, from, w_stride, scale, bias);
            else
                multiply_few<BN, 3>(c + n, x, few, 3 * g, from, w_stride, scale, bias);
        }
    }
}

// acc += x w^T over one step, PANEL columns and at most MOST_ROWS rows at a time.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const quant_rows<BM>& x, const act_t*, const uint4* w,
                                uint w_stride, const bfloat* scales, const bfloat* biases, uint g_stride, uint live,
                                uint columns, uint) {
    acc.grow(live, columns);
    if constexpr (BITS == 4)
        if (live <= FEW_ROWS)
            return multiply_few_rows<BN>(acc.c, x, w, w_stride, scales, biases, g_stride, columns);
    const uint blocks = (live + MOST_ROWS - 1) / MOST_ROWS;
    constexpr uint WORDS = QUANT_GROUP * BITS / 128;  // of a group
    for (uint n = 0; n < columns; n += PANEL) {
        // What comes next: other rows, or at the end the first ones' next step.
        const uint4* next = n + PANEL < columns ? w + (n + PANEL) * w_stride : w + x.groups * WORDS;
        for (uint g = 0; g < x.groups; ++g) {
            const uint at = n * g_stride + g;
            weight_panel<BITS> panel;
            if (BITS == 8 || g % LINE_GROUPS == 0)
                for (uint r = 0; r < PANEL; ++r) __builtin_prefetch(next + r * w_stride + g * WORDS);
            panel.load(w + n * w_stride + g * WORDS, w_stride, scales + at, biases + at, g_stride);
            if (blocks == 1) {
                multiply_rows<BN>(acc.c + n, x, g * x.rows, live, panel);
                continue;
            }
            unpacked_panel<BITS> unpacked;
            unpacked.load(panel);
            for (uint block = 0, r = 0; block < blocks; ++block) {
                const uint count = (live - r) / (blocks - block);
                multiply_rows<BN>(acc.c + n + r * BN, x, g * x.rows + r, count, unpacked);
                r += count;
            }
        }
    }
}

template <class Acc, class Rows>
inline void tile_store(Acc& acc, float* y, Rows rows, uint stride, uint live, float factor) {
    for (uint r = 0; r < live; ++r) {
        float* to = y + rows.at(r) * stride;
        for (uint i = 0; i < acc.columns; i += 8) store8(to + i, splat8(factor) * load8(acc.c + r * Acc::COLUMNS + i));
    }
}

template <class Acc>
inline void tile_add(Acc& acc, float* y, uint stride, uint live) {
    for (uint r = 0; r < live; ++r)
        for (uint i = 0; i < acc.columns; i += 8) {
            float* to = y + r * stride + i;
            store8(to, load8(to) + load8(acc.c + r * Acc::COLUMNS + i));
        }
}

template <class Acc>
inline void tile_store_acts(Acc& acc, act_t* y, uint stride, uint live) {
    for (uint r = 0; r < live; ++r)
        for (uint i = 0; i < acc.columns; i += 8) store_act8(y + r * stride + i, load8(acc.c + r * Acc::COLUMNS + i));
}
