// Tuned bodies of the helpers of quant.h and tile.h for the CPU at width 1. Sums are fp32, those within a group of
// weights integers, but for the router's; their order depends on nothing but K.
#pragma once

#include "vectors_cpu.h"

// ---- quantised rows times one vector

#define LILY_TUNED_QUANT
constexpr uint LANES_PER_ROW = 1;
constexpr uint ROWS_PER_LANE = 256;  // enough to forget the cost of preparing x, few enough to share among threads
constexpr uint LANE_K = 4096;
constexpr uint PREFETCH = 192;  // 16-byte words: what processors fetch ahead of themselves is not enough

struct group_scale {
    float unit;  // of a group's integers; not a number where one of x is not finite
    float sum;   // of the group
};

// A group of activations as 16-bit integers times a power of two of their own: what is within four binades of the
// group's largest value is exact, and so is every sum before the scales. Lane m of v[i] is x[8 i + m].
LILY_INLINE group_scale integers_of(i8 (&v)[8], const act_t* x) {
    f8 r[8];
    i8 most = {};
#pragma GCC unroll 8
    for (uint i = 0; i < 8; ++i) {
        r[i] = load_act8(x + 8 * i);
        const i8 magnitude = (i8)r[i] & 0x7fffffff;
        most = most > magnitude ? most : magnitude;
    }
    const uint exponent = max(uint(largest8(most)) >> 23, 27u);  // at least 2^-100
    const f8 scale = splat8(as_type<float>((127 + 14 + 127 - min(exponent, 254u)) << 23));
    const float unit = as_type<float>(exponent < 255 ? (exponent - 14) << 23 : 0x7fc00000);
    u8 total = {};  // what is not a number is a large integer; unsigned sums may wrap
#pragma GCC unroll 8
    for (uint i = 0; i < 8; ++i) {
        v[i] = round_int8(r[i] * scale);
        total += (u8)v[i];
    }
    return {unit, unit * float(int(total8(total)))};
}

LILY_INLINE s16 pairs8(i8 low, i8 high) {
    return (s16)((low & 0xffff) | (high << 16));
}

template <uint BITS>
struct quant_x;

template <>
struct quant_x<4> {
    s16 v[LANE_K / QUANT_GROUP][4];  // short m of v[g][i] is of x[64 g + 4 m + i]
    float unit[LANE_K / QUANT_GROUP];
    float sum[LANE_K / QUANT_GROUP];
    uint groups;

    LILY_INLINE void load(const act_t* x, uint count, const uint4* w) {
        groups = count / QUANT_GROUP;
        for (uint g = 0; g < groups; ++g) {
            for (uint i = 0; i < 8; ++i) __builtin_prefetch(w + (8 * g + i) * 4);  // memory need not wait meanwhile
            i8 q[8];
            const group_scale scale = integers_of(q, x + g * QUANT_GROUP);
            unit[g] = scale.unit;
            sum[g] = scale.sum;
            transpose8((f8(&)[8])q);
            for (uint i = 0; i < 4; ++i) v[g][i] = pairs8(q[i], q[i + 4]);
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

// A group of 8-bit weights as quant_x<8> multiplies them. Two words hold the eight weights of a lane, so each byte is
// moved to where x expects it.
struct weights_of_8_bits {
    f8 w[8];

    LILY_INLINE explicit weights_of_8_bits(const uint4* from) {
        const u8 front = load_words8(from), back = load_words8(from + 2);
        const u8 low = __builtin_shufflevector(front, back, 0, 2, 4, 6, 8, 10, 12, 14);
        const u8 high = __builtin_shufflevector(front, back, 1, 3, 5, 7, 9, 11, 13, 15);
        w[0] = float8(low & 0xff);
        w[1] = float8((low >> 4) & 0xff0);
        w[2] = float8((low >> 8) & 0xff00);
        w[3] = float8((low >> 12) & 0xff000);
        w[4] = float8((high << 16) & 0xff0000);
        w[5] = float8((high << 12) & 0xff00000);
        w[6] = float8((high >> 16) & 0xff) * splat8(0x1p24f);
        w[7] = float8(high >> 24);
    }

    LILY_INLINE f8 dot(const f8* v) const {
        f8 even = w[0] * v[0], odd = w[1] * v[1];
        for (uint i = 2; i < 8; i += 2) {
            even = fma8(w[i], v[i], even);
            odd = fma8(w[i + 1], v[i + 1], odd);
        }
        return even + odd;
    }
};

LILY_INLINE f8 group_dot(const quant_x<8>& x, uint g, const uint4* w) {
    return weights_of_8_bits(w).dot(x.v[g]);
}

// sum of bias times sum of x, over the groups of a row; eight partial sums and the rest.
template <class X>
LILY_INLINE void add_biases(const X& x, const bfloat* b, f8& eight, float& rest) {
    uint g = 0;
    for (; g + 8 <= x.groups; g += 8) eight = fma8(load_bfloat8(b + g), load8(x.sum + g), eight);
    for (; g < x.groups; ++g) rest = fma(float(b[g]), x.sum[g], rest);
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
        for (; g + 8 <= x.groups; g += 8) store8(scale + g, load_bfloat8(s + g) * load8(x.unit + g));
        for (; g < x.groups; ++g) scale[g] = float(s[g]) * x.unit[g];
        add_biases(x, b, biased, rest);
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

// Several rows of x share the conversion of 8-bit weights; each has the bits of quant_acc.
#define LILY_TUNED_MANY
constexpr uint MV_X = 4;

template <uint BITS, uint SPLIT>
inline void mv_many(const act_t* x, uint count, const uint4* w, const bfloat* scales, const bfloat* biases, uint k,
                    uint row, uint left, float* part, uint, uint) {
    static_assert(BITS == 8);
    const uint rows = min(ROWS_PER_LANE, left);
    for (uint i = 0; i < count * ROWS_PER_LANE; ++i) part[i] = 0;
    for (uint at = 0; at < k; at += LANE_K) {
        quant_x<BITS> xs[MV_X];
        for (uint r = 0; r < count; ++r) xs[r].load(x + r * k + at, min(LANE_K, k - at), w);
        for (uint n = 0; n < rows; ++n) {
            const uint4* from = w + (row + n) * (k / 16) + at / 16;
            const uint g0 = (row + n) * (k / QUANT_GROUP) + at / QUANT_GROUP;
            f8 scaled[MV_X] = {};
            for (uint g = 0; g < xs[0].groups; ++g) {
                const weights_of_8_bits group(from + 4 * g);
                const f8 scale = splat8(float(scales[g0 + g]));
#pragma GCC unroll 4
                for (uint r = 0; r < MV_X; ++r)
                    if (r < count) scaled[r] = fma8(scale, group.dot(xs[r].v[g]), scaled[r]);
            }
            for (uint r = 0; r < count; ++r) {
                f8 biased = {};
                float rest = 0;
                add_biases(xs[r], biases + g0, biased, rest);
                part[r * ROWS_PER_LANE + n] += sum8(scaled[r] + biased) + rest;
            }
        }
    }
}

// ---- matrix tiles

#define LILY_TUNED_TILE
constexpr uint TILE_N = 256;      // enough to forget the cost of preparing x; the last tile may have fewer columns
constexpr uint TILE_DEPTH = 128;  // a cache line of a row's weights; the last step may have less

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

// The live rows of a step as 16-bit integers. Pair 4 j + i of a group is of x[8 j + i] and x[8 j + 4 + i], which is how
// words hold 4-bit weights.
template <uint BM>
struct quant_rows {
    s16 v[TILE_DEPTH / QUANT_GROUP][BM][QUANT_GROUP / 16];
    float unit[TILE_DEPTH / QUANT_GROUP][BM];
    float sum[TILE_DEPTH / QUANT_GROUP][BM];
    uint groups;

    template <uint THREADS, class Rows>
    LILY_INLINE void stage(act_t*, const act_t* x, Rows rows, uint stride, uint live, uint depth, uint) {
        groups = depth / QUANT_GROUP;
        for (uint r = 0; r < live; ++r) {
            const act_t* from = x + rows.at(r) * stride;
            for (uint g = 0; g < groups; ++g) {
                i8 q[8];
                const group_scale scale = integers_of(q, from + g * QUANT_GROUP);
                unit[g][r] = scale.unit;
                sum[g][r] = scale.sum;
                for (uint j = 0; j < 8; j += 2)
                    v[g][r][j / 2] = pairs8(__builtin_shufflevector(q[j], q[j + 1], 0, 1, 2, 3, 8, 9, 10, 11),
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

// c[ROWS][16] += x[ROWS][64] w[16][64]^T of group g, rows r and on: integers, then one step of fp32.
template <uint BN, uint ROWS, uint BM, class Panel>
inline void multiply_group(float* c, const quant_rows<BM>& x, uint g, uint r, const Panel& w) {
    i8 acc[ROWS][2] = {};
#pragma GCC unroll 1
    for (uint p = 0; p < QUANT_GROUP / 2; ++p) {
        const s16 left = w.pair(0, p), right = w.pair(1, p);
#pragma GCC unroll 8
        for (uint row = 0; row < ROWS; ++row) {
            const s16 pair = splat_pair(x.v[g][r + row], p);
            acc[row][0] += dot_pairs16(pair, left);
            acc[row][1] += dot_pairs16(pair, right);
        }
    }
#pragma GCC unroll 8
    for (uint row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (uint side = 0; side < 2; ++side) {
            float* at = c + (r + row) * BN + 8 * side;
            const f8 biased = fma8(w.bias[side], splat8(x.sum[g][r + row]), load8(at));
            const f8 scale = w.scale[side] * splat8(x.unit[g][r + row]);
            store8(at, fma8(__builtin_convertvector(acc[row][side], f8), scale, biased));
        }
}

template <uint BN, uint BM, class Panel>
LILY_INLINE void multiply_rows(float* c, const quant_rows<BM>& x, uint g, uint r, uint count, const Panel& w) {
    switch (count) {
        case 1: return multiply_group<BN, 1>(c, x, g, r, w);
        case 2: return multiply_group<BN, 2>(c, x, g, r, w);
        case 3: return multiply_group<BN, 3>(c, x, g, r, w);
        case 4: return multiply_group<BN, 4>(c, x, g, r, w);
        case 5: return multiply_group<BN, 5>(c, x, g, r, w);
        default: return multiply_group<BN, MOST_ROWS>(c, x, g, r, w);
    }
}

// acc += x w^T over one step, PANEL columns and at most MOST_ROWS rows at a time.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_tile_multiply(tile_acc<BM, BN, SIMDS>& acc, const quant_rows<BM>& x, const act_t*, const uint4* w,
                                uint w_stride, const bfloat* scales, const bfloat* biases, uint g_stride, uint live,
                                uint columns, uint) {
    acc.grow(live, columns);
    const uint blocks = (live + MOST_ROWS - 1) / MOST_ROWS;
    for (uint n = 0; n < columns; n += PANEL) {
        for (uint r = 0; r < PANEL; ++r) __builtin_prefetch(w + (n + r) * w_stride + TILE_DEPTH * BITS / 128);
        for (uint g = 0; g < x.groups; ++g) {
            const uint at = n * g_stride + g;
            weight_panel<BITS> panel;
            panel.load(w + n * w_stride + g * (QUANT_GROUP * BITS / 128), w_stride, scales + at, biases + at, g_stride);
            if (blocks == 1) {
                multiply_rows<BN>(acc.c + n, x, g, 0, live, panel);
                continue;
            }
            unpacked_panel<BITS> unpacked;
            unpacked.load(panel);
            for (uint block = 0, r = 0; block < blocks; ++block) {
                const uint count = (live - r) / (blocks - block);
                multiply_rows<BN>(acc.c + n, x, g, r, count, unpacked);
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
