// rope.h -- what rope_write and decode attention do to a query or key head: RMS norm, then rotation.
#pragma once
#include "lily.h"

constant constexpr float QUERY_SCALE = 0.0625f;             // HEAD_DIM^-0.5
constant constexpr uint HEAD_PARTS = HEAD_DIM / SIMD_WIDTH;  // dims of a lane: lane, lane + SIMD_WIDTH, ...

// Cosines of ROTARY_DIM / 2 angles, then their sines; for a threadgroup.
inline void make_turn(threadgroup float* turn, device const float* inv_freq, uint position, uint tid, uint threads) {
    for (uint i = tid; i < ROTARY_DIM / 2; i += threads) {
        const float angle = float(position) * inv_freq[i];
        turn[i] = precise::cos(angle);
        turn[ROTARY_DIM / 2 + i] = precise::sin(angle);
    }
}

// v = a head of x, normalised and turned, for a simdgroup.
inline void make_head(thread float* v, device const float* x, device const bfloat* w, const threadgroup float* turn,
                      float eps, uint lane) {
    constexpr uint HALF = ROTARY_DIM / 2;
    const float squares = simd_sum(lane_squares(x, HEAD_DIM, lane, SIMD_WIDTH));
    const float scale = precise::rsqrt(squares / float(HEAD_DIM) + eps);
    for (uint j = 0; j < HEAD_PARTS; j++) v[j] = x[j * SIMD_WIDTH + lane] * scale * float(w[j * SIMD_WIDTH + lane]);
    for (uint j = 0; j < HALF / SIMD_WIDTH; j++) {
        const float c = turn[j * SIMD_WIDTH + lane], s = turn[HALF + j * SIMD_WIDTH + lane];
        const float a = v[j], b = v[j + HALF / SIMD_WIDTH];
        v[j] = a * c - b * s;
        v[j + HALF / SIMD_WIDTH] = b * c + a * s;
    }
}
