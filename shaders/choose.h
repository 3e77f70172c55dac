// choose.h -- the choice of a row's experts.
#pragma once
#include "lily.h"

#ifdef LILY_CHOICE_HEADER
#include LILY_CHOICE_HEADER
#endif

// Chooses a row's first `count` experts, for one simdgroup. ids and weights, {exp(logit - largest)} in that order, are
// device or threadgroup memory, which lane 0 may read at once; returns the weights' sum. experts <= E, or MAX_EXPERTS.
#ifndef LILY_TUNED_CHOICE
template <uint E, class I, class W>
inline float choose_experts(device const float* row, uint experts, uint count, I ids, W weights, uint lane) {
    // A lane's experts; a count that is known at compile time keeps them in registers.
    constexpr uint OWN = ((E ? E : MAX_EXPERTS) + SIMD_WIDTH - 1) / SIMD_WIDTH;
    const uint own = E ? OWN : (experts + SIMD_WIDTH - 1) / SIMD_WIDTH;
    float v[OWN];
    for (uint i = 0; i < own; i++) {
        const uint e = i * SIMD_WIDTH + lane;
        v[i] = e < experts ? row[e] : -INFINITY;
    }
    float most = 0, sum = 0;
    for (uint j = 0; j < count; j++) {
        const float high = simd_max(lane_largest(v, own));
        const uint own_best = lane_find(v, own, high) * SIMD_WIDTH + lane;
        const uint best = min(simd_min(own_best), experts - 1);  // logits that are not numbers choose some expert
        lane_put(v, own, best % SIMD_WIDTH == lane ? best / SIMD_WIDTH : own, -INFINITY);
        if (j == 0) most = high;
        const float e = precise::exp(high - most);
        sum += e;
        if (lane == 0) {
            ids[j] = best;
            weights[j] = e;
        }
    }
    return sum;
}
#endif

// What a row's router hands to the experts, for one simdgroup: its choice, the weights, which sum to 1, and behind them
// the shared expert's. ids and weights as above; they are lane 0's.
template <uint E, class I, class W>
inline void route_row(device const float* row, uint experts, uint used, I ids, W weights, uint lane) {
    const float sum = choose_experts<E>(row, experts, used, ids, weights, lane);
    if (lane != 0) return;
    for (uint j = 0; j < used; j++) weights[j] /= sum;
    weights[used] = sigmoid(read_early(row + experts));
}
