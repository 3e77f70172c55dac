// Tuned bodies of the helpers of attend.h for NVIDIA GPUs: all rows of a run are on their way at once, as they are in
// the cache, and sums over lanes of many values exchange them rather than each one five times.
#pragma once

#define LILY_TUNED_ROWS
#define LILY_TUNED_ROWS_SUM
#define LILY_TUNED_ROWS_SOON

template <uint DIMS>
struct lane_rows {
    static_assert(DIMS == 8);
    uint4 x[RUN];
    LILY_INLINE void load(const bfloat* from, uint stride, uint count) {
        UNROLL for (uint t = 0; t < RUN; t++)
            x[t] = t < count ? *reinterpret_cast<const uint4*>(from + t * stride) : uint4(0u);
    }
    LILY_INLINE float at(uint t, uint i) const {
        return as_type<float>(i % 2 == 0 ? x[t][i / 2] << 16 : x[t][i / 2] & 0xffff0000u);
    }
};

// To the cache that all multiprocessors share: a row is four lines, so a run has one for each lane.
LILY_INLINE void rows_soon(const bfloat* k, const bfloat* v, uint stride, uint lane) {
    constexpr uint LINE = 64;  // elements
    static_assert(RUN * 2 * (HEAD_DIM / LINE) == SIMD_WIDTH);
    const bfloat* own = (lane % 8 < 4 ? k : v) + lane / 8 * stride + lane % 4 * LINE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(own));
}

// All rows of a run are computed: those that there are not are zeros, and their probability is zero.
LILY_INLINE constexpr uint run_rows(uint) {
    return RUN;
}
template <uint GROUP, uint DIMS>
LILY_INLINE void rows_dot(float (&p)[RUN][GROUP], const float (&q)[GROUP][DIMS], const lane_rows<DIMS>& k, uint) {
    UNROLL for (uint t = 0; t < RUN; t++)
        UNROLL for (uint h = 0; h < GROUP; h++) {
            p[t][h] = 0;
            UNROLL for (uint i = 0; i < DIMS; i++) p[t][h] = fma(q[h][i], k.at(t, i), p[t][h]);
        }
}
template <uint GROUP, uint DIMS>
LILY_INLINE void rows_add(float (&o)[GROUP][DIMS], const float (&p)[RUN][GROUP], const lane_rows<DIMS>& v,
                          uint) {
    UNROLL for (uint t = 0; t < RUN; t++)
        UNROLL for (uint h = 0; h < GROUP; h++)
            UNROLL for (uint i = 0; i < DIMS; i++) o[h][i] = fma(p[t][h], v.at(t, i), o[h][i]);
}

// Of 2 SPAN values, keeps those that this half of the lanes is for, with those of the other half added; until each lane
// has the sum of one value.
template <uint SPAN>
LILY_INLINE void exchange(float* v, uint lane) {
    const bool upper = lane & SPAN;
    UNROLL for (uint i = 0; i < SPAN; i++) {
        const float given = upper ? v[i] : v[i + SPAN], kept = upper ? v[i + SPAN] : v[i];
        v[i] = kept + simd_shuffle_xor(given, SPAN);
    }
    if constexpr (SPAN > 1) exchange<SPAN / 2>(v, lane);
}

template <uint GROUP>
LILY_INLINE void rows_sum(float (&p)[RUN][GROUP], uint count) {
    if constexpr (RUN * GROUP == SIMD_WIDTH) {
        const uint lane = threadIdx.x % SIMD_WIDTH;
        float v[SIMD_WIDTH];
        UNROLL for (uint i = 0; i < SIMD_WIDTH; i++) v[i] = p[i / GROUP][i % GROUP];
        exchange<SIMD_WIDTH / 2>(v, lane);
        UNROLL for (uint i = 0; i < SIMD_WIDTH; i++) p[i / GROUP][i % GROUP] = __shfl_sync(ALL_LANES, v[0], i);
    } else {
        UNROLL for (uint t = 0; t < RUN; t++)
            UNROLL for (uint h = 0; h < GROUP; h++) p[t][h] = simd_sum(p[t][h]);
    }
    UNROLL for (uint t = 1; t < RUN; t++)
        UNROLL for (uint h = 0; h < GROUP; h++) p[t][h] = t < count ? p[t][h] : -INFINITY;
}
