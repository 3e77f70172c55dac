// reduce.h -- what the head and the sampler share: the softmax statistics of logits, and moving a step on.
#pragma once
#include "lily.h"

// One block's statistics, or several joined: the largest logit, its lowest index, and sum(exp(scale * (l - largest))).
struct logit_stats {
    float most;
    uint index;
    float sum;
};

// The larger logit wins; equal ones go to the lower index.
inline bool before(float a, uint ai, float b, uint bi) { return a > b || (a == b && ai < bi); }

#ifndef LILY_TUNED_EXPS
// The best of a lane's logits, every stride-th one; {most, index} is {-inf, NO_TOKEN} before, and after if none is one.
inline void lane_best(device const float* logits, uint first, uint last, uint stride, thread float& most,
                      thread uint& index) {
    for (uint i = first; i < last; i += stride)
        if (before(logits[i], i, most, index)) {
            most = logits[i];
            index = i;
        }
}

// sum of exp(scale * (l - most)) over a lane's logits. Sums of 64 are summed, because one lane may own a vocabulary.
inline float lane_exps(device const float* logits, uint first, uint last, uint stride, float scale, float most) {
    float sum = 0;
    for (uint run = first; run < last; run += 64 * stride) {
        float few = 0;
        for (uint i = run; i < min(run + 64 * stride, last); i += stride)
            few += precise::exp(scale * (logits[i] - most));
        sum += few;
    }
    return sum;
}
#endif

// Replaces every thread's candidate by the best one of the threadgroup. part and at have SIMDS values.
template <uint SIMDS>
inline void group_best(thread float& most, thread uint& index, threadgroup float* part, threadgroup uint* at, uint lane,
                       uint simd) {
    const float high = simd_max(most);
    const uint low = simd_min(most == high ? index : NO_TOKEN);
    if (lane == 0) {
        part[simd] = high;
        at[simd] = low;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    most = part[0];
    index = at[0];
    for (uint j = 1; j < SIMDS; j++)
        if (before(part[j], at[j], most, index)) {
            most = part[j];
            index = at[j];
        }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The statistics of logits [first, last); every thread gets them. part and at have SIMDS values.
template <uint SIMDS>
inline logit_stats block_stats(device const float* logits, uint first, uint last, float scale, threadgroup float* part,
                               threadgroup uint* at, uint tid, uint lane, uint simd) {
    logit_stats s;
    s.most = -INFINITY;
    s.index = NO_TOKEN;
    lane_best(logits, first + tid, last, SIMDS * SIMD_WIDTH, s.most, s.index);
    group_best<SIMDS>(s.most, s.index, part, at, lane, simd);
    float sum = 0;
    // A block of logits that are all -inf has no weight.
    if (s.most > -INFINITY) sum = lane_exps(logits, first + tid, last, SIMDS * SIMD_WIDTH, scale, s.most);
    s.sum = group_sum<SIMDS>(sum, part, lane, simd);
    return s;
}

// Joins the blocks' statistics {largest, sum} and their indices, for a simdgroup; every lane gets them.
inline logit_stats join_stats(device const float* stats, device const uint* indices, uint blocks, float scale,
                              uint lane) {
    logit_stats s;
    s.most = -INFINITY;
    s.index = NO_TOKEN;
    for (uint b = lane; b < blocks; b += SIMD_WIDTH)
        if (before(stats[b * 2], indices[b], s.most, s.index)) {
            s.most = stats[b * 2];
            s.index = indices[b];
        }
    const float high = simd_max(s.most);
    s.index = simd_min(s.most == high ? s.index : NO_TOKEN);
    s.most = high;
    float sum = 0;
    for (uint b = lane; b < blocks; b += SIMD_WIDTH)
        if (stats[b * 2] > -INFINITY)
            sum = fma(stats[b * 2 + 1], precise::exp(scale * (stats[b * 2] - s.most)), sum);
    s.sum = simd_sum(sum);
    return s;
}

// Ends a step: the token goes to the next step's input and to the ring, and the state moves past the step's rows.
inline void finish_step(device StepState* step, device uint* tokens, device uint* ring, uint token, float logprob) {
    device uint* place = ring + step->ticket % TOKEN_RING * 2;
    place[0] = token;
    place[1] = as_type<uint>(logprob);
    tokens[0] = token;
    step->position += step->rows;
    step->generation = (step->generation + 1) % GENERATIONS;
    step->rows = 1;
    step->last_token = token;
    step->ticket += 1;
}
