// Tuned bodies of the helpers of lily.h, norm.h, reduce.h and attend.h for the CPU at width 1, where one lane has all
// values of a threadgroup. Sums are fp32, in an order that depends on nothing but how many values there are.
#pragma once

#include "vectors_cpu.h"

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
    f8 high[4];
    for (uint c = 0; c < 4; ++c) high[c] = splat8(-kInfinity);
    uint i = 0;
    for (; i + 32 <= n; i += 32)
#pragma GCC unroll 4
        for (uint c = 0; c < 4; ++c) {
            const f8 x = load8(v + i + 8 * c);
            high[c] = high[c] < x ? x : high[c];  // a NaN is never larger
        }
    float most = -kInfinity;
    for (; i < n; ++i) most = max(most, v[i]);
    for (uint c = 0; c < 4; ++c)
        for (uint j = 0; j < 8; ++j) most = max(most, high[c][j]);
    return most;
}
inline uint lane_find(const float* v, uint n, float wanted) {
    uint i = 0;
    for (; i + 32 <= n; i += 32) {
        i8 same = load8(v + i) == splat8(wanted);
        for (uint c = 8; c < 32; c += 8) same |= load8(v + i + c) == splat8(wanted);
        if (((same[0] | same[1]) | (same[2] | same[3])) | ((same[4] | same[5]) | (same[6] | same[7]))) break;
    }
    while (i < n && v[i] != wanted) ++i;
    return i;
}
inline void lane_put(float* v, uint n, uint place, float value) {
    if (place < n) v[place] = value;
}

#define LILY_TUNED_EXPS
inline void lane_best(const float* logits, uint first, uint last, uint, float& most, uint& index) {
    const float high = lane_largest(logits + first, last - first);
    const uint at = first + lane_find(logits + first, last - first, high);
    if (at == last) return;
    most = high;
    index = at;
}
inline float lane_exps(const float* logits, uint first, uint last, uint, float scale, float most) {
    float sum = 0;
    for (uint i = first; i < last;) {
        float few[8] = {};
        const uint end = min(i + 512, last);
        for (; i + 8 <= end; i += 8)
            for (uint j = 0; j < 8; ++j) few[j] += precise::exp(scale * (logits[i + j] - most));
        for (; i < end; ++i) few[0] += precise::exp(scale * (logits[i] - most));
        sum += sum8(load8(few));
    }
    return sum;
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

#define LILY_TUNED_ACTS
inline void load_acts(float* to, const act_t* from, uint n) {
    for (uint i = 0; i < n; i += 8) store8(to + i, load_act8(from + i));  // n is a multiple of 8
}
inline void store_acts(act_t* to, uint, const float* from, uint, uint n) {
    for (uint i = 0; i < n; i += 8) store_act8(to + i, load8(from + i));
}

#define LILY_TUNED_SCALED
inline void store_scaled(act_t* y, const float* x, const bfloat* w, float scale, uint n, uint, uint) {
    for (uint i = 0; i < n; i += 8) store_act8(y + i, load8(x + i) * splat8(scale) * load_bfloat8(w + i));
}

#define LILY_TUNED_ROWS
template <uint DIMS>
struct lane_rows {
    const bfloat* x;
    uint stride;
    LILY_INLINE void load(const bfloat* from, uint stride_, uint count) {
        x = from;
        stride = stride_;
        for (uint t = 0; t < count; ++t)
            for (uint i = 0; i < DIMS; i += 32) __builtin_prefetch(from + t * stride + i);
    }
};

template <uint RUN, uint GROUP, uint DIMS>
inline void rows_dot(float (&p)[RUN][GROUP], const float (&q)[GROUP][DIMS], const lane_rows<DIMS>& k, uint count) {
    for (uint t = 0; t < count; ++t) {
        static_assert(GROUP <= 8);
        f8 sum[8] = {};
        for (uint i = 0; i < DIMS; i += 8) {
            const f8 x = load_bfloat8(k.x + t * k.stride + i);
#pragma GCC unroll 8
            for (uint h = 0; h < GROUP; ++h) sum[h] = fma8(load8(q[h] + i), x, sum[h]);
        }
        if constexpr (GROUP == 8) {
            store8(p[t], sums8(sum));
        } else {
            for (uint h = 0; h < GROUP; ++h) p[t][h] = sum8(sum[h]);
        }
    }
}

template <uint RUN, uint GROUP, uint DIMS>
inline void rows_add(float (&o)[GROUP][DIMS], const float (&p)[RUN][GROUP], const lane_rows<DIMS>& v, uint count) {
    constexpr uint HEADS = GROUP < 4 ? GROUP : 4;  // that registers can hold 16 dims of
    for (uint i = 0; i < DIMS; i += 16)
        for (uint first = 0; first < GROUP; first += HEADS) {
            f8 sum[HEADS][2];
            const uint n = min(HEADS, GROUP - first);
#pragma GCC unroll 4
            for (uint h = 0; h < HEADS; ++h)
                for (uint j = 0; j < 2; ++j) sum[h][j] = h < n ? load8(o[first + h] + i + 8 * j) : f8{};
            for (uint t = 0; t < count; ++t) {
                const bfloat* x = v.x + t * v.stride + i;
                const f8 low = load_bfloat8(x), high = load_bfloat8(x + 8);
#pragma GCC unroll 4
                for (uint h = 0; h < HEADS; ++h) {
                    const f8 weight = splat8(h < n ? p[t][first + h] : 0.0f);
                    sum[h][0] = fma8(weight, low, sum[h][0]);
                    sum[h][1] = fma8(weight, high, sum[h][1]);
                }
            }
#pragma GCC unroll 4
            for (uint h = 0; h < HEADS; ++h)
                for (uint j = 0; j < 2 && h < n; ++j) store8(o[first + h] + i + 8 * j, sum[h][j]);
        }
}

// Rows of one head's state of the delta rule, eight at a time.
#define LILY_TUNED_DELTA
template <uint ROWS>
struct delta_rows {
    static_assert(ROWS == 8);
    alignas(32) float s[ROWS][DELTA_DIM];

    LILY_INLINE void load(const float* state, bool fresh, uint) {
        if (fresh)
            __builtin_memset(s, 0, sizeof s);
        else
            __builtin_memcpy(s, state, sizeof s);
    }
    LILY_INLINE void store(float* state, uint) const { __builtin_memcpy(state, s, sizeof s); }

    LILY_INLINE void update(const float* q, const float* k, const float* v, float2 gate, float* y, uint) {
        f8 sum[ROWS] = {};
        for (uint i = 0; i < DELTA_DIM; i += 8) {
            const f8 key = load8(k + i);
#pragma GCC unroll 8
            for (uint r = 0; r < ROWS; ++r) sum[r] = fma8(load8(s[r] + i), key, sum[r]);
        }
        const f8 error = splat8(gate[1]) * (load8(v) - splat8(gate[0]) * sums8(sum));
        f8 out[ROWS];
#pragma GCC unroll 2
        for (uint first = 0; first < ROWS; first += 4) {  // what registers can hold
            f8 part[4] = {};
            for (uint i = 0; i < DELTA_DIM; i += 8) {
                const f8 key = load8(k + i), query = load8(q + i);
#pragma GCC unroll 4
                for (uint r = 0; r < 4; ++r) {
                    float* row = s[first + r] + i;
                    const f8 next = fma8(key, splat8(error[first + r]), load8(row) * splat8(gate[0]));
                    store8(row, next);
                    part[r] = fma8(next, query, part[r]);
                }
            }
            for (uint r = 0; r < 4; ++r) out[first + r] = part[r];
        }
        store8(y, sums8(out));
    }
};
