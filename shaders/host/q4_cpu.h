// Tuned bodies of the helpers of quant.h for the CPU at width 1. Sums are fp32, those within a group of
// weights integers, but for the router's; their order depends on nothing but K.
#pragma once

#include "vectors_cpu.h"

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
