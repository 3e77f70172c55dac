// Tuned body of choose_experts for NVIDIA GPUs: the largest of all lanes' values is found in one instruction, as an
// integer, and what does not decide about the next choice waits until all are made.
#pragma once

#define LILY_TUNED_CHOICE

template <uint E, class I, class W>
LILY_INLINE float choose_experts(const float* row, uint experts, uint count, I ids, W weights, uint lane) {
    constexpr uint OWN = ((E ? E : MAX_EXPERTS) + SIMD_WIDTH - 1) / SIMD_WIDTH;
    static_assert(MAX_USED <= SIMD_WIDTH, "a lane for each choice");
    uint v[OWN];
    UNROLL for (uint i = 0; i < OWN; i++) {
        const uint e = i * SIMD_WIDTH + lane;
        v[i] = e < experts ? order_of(read_early(row + e) + 0.0f) : 0;  // -0 is no less than 0
    }
    uint chosen = 0;
    float logit = 0, first = 0;
    for (uint j = 0; j < count; j++) {
        uint own = v[0];
        UNROLL for (uint i = 1; i < OWN; i++) own = max(own, v[i]);
        const uint most = __reduce_max_sync(ALL_LANES, own);
        uint places = 0;
        UNROLL for (uint i = 0; i < OWN; i++) places |= v[i] == most ? 1u << i : 0;
        const uint place = places ? (__ffs(places) - 1) * SIMD_WIDTH + lane : MAX_EXPERTS;
        const uint best = min(simd_min(place), experts - 1);
        UNROLL for (uint i = 0; i < OWN; i++) v[i] = best == i * SIMD_WIDTH + lane ? 0 : v[i];
        if (j == 0) first = value_of(most);
        if (j == lane) {
            chosen = best;
            logit = value_of(most);
        }
    }
    const float weight = precise::exp(logit - first);
    float sum = 0;
    for (uint j = 0; j < count; j++) sum += __shfl_sync(ALL_LANES, weight, j);
    if (lane < count) {
        ids[lane] = chosen;
        weights[lane] = weight;
    }
    __syncwarp();
    return sum;
}
