// delta_rows.h -- rows of one head's state of the gated delta rule (delta.metal), and one token's change of them.
#pragma once
#include "lily.h"

#ifndef LILY_SHAPES
constant constexpr uint DELTA_ROWS = SIMD_WIDTH == 1 ? 8 : 4;  // value rows of a simdgroup of delta_scan
#endif
constexpr uint delta_simds() { return simdgroups(4); }
constexpr uint delta_groups() { return DELTA_DIM / (DELTA_ROWS * delta_simds()); }

// Where the tokens of one head are: token t's at q + t * stride and so on. v and y begin at a threadgroup's first value
// row; gates are {g, beta}.
struct delta_stream {
    device const float* q;
    device const float* k;
    device const float* v;
    device const float* gates;
    device float* y;
    uint stride;
    uint gate_stride;
    uint y_stride;
};

#ifdef LILY_DELTA_HEADER
#include LILY_DELTA_HEADER
#endif

#ifndef LILY_TUNED_DELTA
constant constexpr uint DELTA_KEYS = DELTA_DIM / SIMD_WIDTH;  // keys of a lane

// ROWS rows, spread over the lanes of a simdgroup.
template <uint ROWS> struct delta_rows {
    float s[ROWS][DELTA_KEYS];
    void load(device const float* state, bool fresh, uint lane) thread {
        for (uint r = 0; r < ROWS; r++)
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] = fresh ? 0.0f : state[r * DELTA_DIM + lane * DELTA_KEYS + i];
    }
    void store(device float* state, uint lane) const thread {
        for (uint r = 0; r < ROWS; r++)
            for (uint i = 0; i < DELTA_KEYS; i++) state[r * DELTA_DIM + lane * DELTA_KEYS + i] = s[r][i];
    }
    // One token: head row pointers q, k, v (v and y at the first value row), gate = {g, beta}.
    template <class X, class Y> void update(X q, X k, X v, float2 gate, Y y, uint lane) thread {
        float qs[DELTA_KEYS], ks[DELTA_KEYS];
        for (uint i = 0; i < DELTA_KEYS; i++) {
            qs[i] = q[lane * DELTA_KEYS + i];
            ks[i] = k[lane * DELTA_KEYS + i];
        }
        for (uint r = 0; r < ROWS; r++) {
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] *= gate[0];
            const float error = gate[1] * (v[r] - simd_sum(lane_dot<DELTA_KEYS>(s[r], ks)));
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] = fma(ks[i], error, s[r][i]);
            const float out = simd_sum(lane_dot<DELTA_KEYS>(s[r], qs));
            if (lane == 0) y[r] = out;
        }
    }
};
#endif

// All tokens of a head, for a threadgroup whose simdgroups have ROWS value rows each.
#ifndef LILY_TUNED_DELTA_STEPS
template <uint ROWS>
inline void delta_steps(thread delta_rows<ROWS>& s, const thread delta_stream& from, uint rows, uint /*tid*/, uint lane,
                        uint simd) {
    for (uint t = 0; t < rows; t++) {
        device const float* gate = from.gates + t * from.gate_stride;
        s.update(from.q + t * from.stride, from.k + t * from.stride, from.v + t * from.stride + simd * ROWS,
                 float2(gate[0], gate[1]), from.y + t * from.y_stride + simd * ROWS, lane);
    }
}
#endif
