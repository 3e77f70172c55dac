// attend.h -- the running softmax of decode attention, for one simdgroup.
#pragma once
#include "lily.h"

constant constexpr uint LANE_DIMS = HEAD_DIM / SIMD_WIDTH;
#ifndef LILY_SHAPES
constant constexpr uint RUN = SIMD_WIDTH == 1 ? 16 : 1;  // tokens that a simdgroup attends to at a time
#endif
static_assert(PAGE % RUN == 0 && KV_BLOCK % RUN == 0, "a run lies in one page");

#ifdef LILY_ROWS_HEADER
#include LILY_ROWS_HEADER
#endif

#ifndef LILY_TUNED_ROWS
// One lane's dims of up to RUN rows of K or V, `stride` elements apart.
template <uint DIMS> struct lane_rows {
    float x[RUN][DIMS];
    void load(device const bfloat* from, uint stride, uint count) thread {
        for (uint t = 0; t < count; t++)
            for (uint i = 0; i < DIMS; i++) x[t][i] = float(from[t * stride + i]);
    }
};

// p[t][h] = sum_i q[h][i] k[t][i]
template <uint GROUP, uint DIMS>
inline void rows_dot(thread float (&p)[RUN][GROUP], const thread float (&q)[GROUP][DIMS],
                     const thread lane_rows<DIMS>& k, uint count) {
    for (uint t = 0; t < count; t++)
        for (uint h = 0; h < GROUP; h++) p[t][h] = lane_dot<DIMS>(q[h], k.x[t]);
}

// o[h][i] += sum_t p[t][h] v[t][i]
template <uint GROUP, uint DIMS>
inline void rows_add(thread float (&o)[GROUP][DIMS], const thread float (&p)[RUN][GROUP],
                     const thread lane_rows<DIMS>& v, uint count) {
    for (uint t = 0; t < count; t++)
        for (uint h = 0; h < GROUP; h++)
            for (uint i = 0; i < DIMS; i++) o[h][i] = fma(p[t][h], v.x[t][i], o[h][i]);
}
#endif

// The RUN rows of K and of V that a simdgroup reads next, `stride` elements apart.
#ifndef LILY_TUNED_ROWS_SOON
inline void rows_soon(device const bfloat*, device const bfloat*, uint /*stride*/, uint /*lane*/) {}
#endif

// p[t][h] = the sum of the lanes' p[t][h], for run_rows(count) tokens; those that there are not get -inf.
#ifndef LILY_TUNED_ROWS_SUM
inline uint run_rows(uint count) { return count; }
template <uint GROUP> inline void rows_sum(thread float (&p)[RUN][GROUP], uint count) {
    for (uint t = 0; t < count; t++)
        for (uint h = 0; h < GROUP; h++) p[t][h] = simd_sum(p[t][h]);
}
#endif

// The running softmax of GROUP query heads, each lane holding LANE_DIMS dims of every head.
template <uint GROUP> struct attend {
    float q[GROUP][LANE_DIMS], o[GROUP][LANE_DIMS], most[GROUP], sum[GROUP];
    void begin(const threadgroup act_t* from, uint lane) thread {
        for (uint h = 0; h < GROUP; h++) {
            most[h] = -INFINITY;
            sum[h] = 0;
            load_acts(q[h], from + h * HEAD_DIM + lane * LANE_DIMS, LANE_DIMS);
            for (uint i = 0; i < LANE_DIMS; i++) o[h][i] = 0;
        }
    }
    // count <= RUN rows of k and v.
    void tokens(device const bfloat* k, device const bfloat* v, uint stride, uint count, uint lane) thread {
        lane_rows<LANE_DIMS> ks, vs;
        ks.load(k + lane * LANE_DIMS, stride, count);
        vs.load(v + lane * LANE_DIMS, stride, count);
        float p[RUN][GROUP] = {}, high[GROUP];
        const uint rows = run_rows(count);
        rows_dot(p, q, ks, rows);
        rows_sum(p, count);
        for (uint h = 0; h < GROUP; h++) high[h] = most[h];
        for (uint t = 0; t < rows; t++)
            for (uint h = 0; h < GROUP; h++) high[h] = max(high[h], p[t][h]);
        for (uint h = 0; h < GROUP; h++) {
            if (high[h] == most[h]) continue;
            const float shrink = precise::exp(most[h] - high[h]);
            most[h] = high[h];
            sum[h] *= shrink;
            for (uint i = 0; i < LANE_DIMS; i++) o[h][i] *= shrink;
        }
        for (uint t = 0; t < rows; t++)
            for (uint h = 0; h < GROUP; h++) {
                p[t][h] = precise::exp(p[t][h] - most[h]);
                sum[h] += p[t][h];
            }
        rows_add(o, p, vs, rows);
    }
};
