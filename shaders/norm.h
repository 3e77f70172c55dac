// norm.h -- RMS normalisation of one row by one threadgroup, for norm.metal and for products that begin with it.
#pragma once
#include "lily.h"

// y[i] = act_t(x[i] * scale * w[i]), for a thread's share of n values. y is device or threadgroup memory.
#ifndef LILY_TUNED_SCALED
template <class Y>
inline void store_scaled(Y y, device const float* x, device const bfloat* w, float scale, uint n, uint first,
                         uint stride) {
    for (uint i = first; i < n; i += stride) y[i] = to_act(x[i] * scale * float(w[i]));
}
#endif

// y = act_t(x * rsqrt(mean(x^2) + eps) * w). y is device or threadgroup memory; part has SIMDS values. What other
// threads wrote is seen after a barrier.
template <uint SIMDS, class Y>
inline void normalise_row(device const float* x, device const bfloat* w, Y y, uint dim, float eps,
                          threadgroup float* part, uint tid, uint lane, uint simd) {
    const float sum = group_sum<SIMDS>(lane_squares(x, dim, tid, SIMDS * SIMD_WIDTH), part, lane, simd);
    const float scale = precise::rsqrt(sum / float(dim) + eps);
    store_scaled(y, x, w, scale, dim, tid, SIMDS * SIMD_WIDTH);
}

// normalise_row for a launch that begins with it: the norm's weights are on their way before the inputs are ready, if a
// device gains by that. K is dim, or 0 if that is known only at run time.
#ifdef LILY_NORM_HEADER
#include LILY_NORM_HEADER
#endif
#ifndef LILY_TUNED_NORM_AHEAD
template <uint SIMDS, uint K> struct norm_ahead {
    void begin(device const bfloat*, uint) thread {}
    template <class Y>
    void finish(device const float* x, device const bfloat* w, Y y, uint dim, float eps, threadgroup float* part,
                uint tid, uint lane, uint simd) const thread {
        normalise_row<SIMDS>(x, w, y, dim, eps, part, tid, lane, simd);
    }
};
#endif
