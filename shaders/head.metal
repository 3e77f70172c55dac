// head.metal -- logits, greedy choice, log probabilities.
//
//   logits = W h;   token = argmax(logits), ties to the lowest id;   logprob(t) = logits[t] - log(sum(exp(logits)))
//
// Logits are kept per session and generation, so that steps which were queued and then discarded leave the ones before
// them intact. Reference: transformers Qwen3_5MoeForConditionalGeneration.forward (lm_head).
#include "quant.h"
#include "reduce.h"

struct head_args {
    uint sessions;
    uint vocab;
    uint hidden;
};

// head_logits: as qmv, into the next generation's logits.
//   grid: ((vocab + MV_SETS * mv_rows(K) - 1) / (MV_SETS * mv_rows(K)), 1, 1)
//   const: K = hidden
//   bytes: logits = vocab * 4
//   used: encode_head
template <uint K>
KERNEL(head_logits, 8)(
    device const act_t*     x      [[buffer(0)]],  // [hidden]
    device const uint4*     w      [[buffer(1)]],  // [vocab, hidden / 32]
    device const bfloat*    scales [[buffer(2)]],  // [vocab, hidden / 64]
    device const bfloat*    biases [[buffer(3)]],  // [vocab, hidden / 64]
    device const StepState* step   [[buffer(4)]],  // [1]
    device float*           logits [[buffer(5)]],  // [sessions, GENERATIONS, vocab]
    constant head_args&     args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), SPLIT = mv_split(K), APART = mv_rows(K), ROWS = MV_SETS * APART;
    SHARED float part[MV_SETS * SIMDS * MV_ROWS];
    const uint k = K ? K : args.hidden, first = group.x * ROWS, left = args.vocab - first;
    mv_ahead<4, SPLIT, K, MV_SETS> ahead;
    ahead.begin(w, scales, biases, k, first, APART, left, lane, simd);
    inputs_ready();
    mv_finish(ahead, x, w, scales, biases, k, first, APART, left, part, lane, simd);
    outputs_follow();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < min(ROWS, left); i += SIMDS * SIMD_WIDTH)
        logits[state_next(step) * args.vocab + first + i] = mv_row<SPLIT>(part, i);
}

// head_reduce: one threadgroup finds the statistics {largest, sum of exp} and the argmax of VOCAB_BLOCK logits.
//   grid: ((vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 1, 1)
//   bytes: logits = vocab * 4
//   used: encode_tail
KERNEL(head_reduce, 8)(
    device const float*     logits  [[buffer(0)]],  // [sessions, GENERATIONS, vocab]
    device const StepState* step    [[buffer(1)]],  // [1]
    device float*           stats   [[buffer(2)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device uint*            indices [[buffer(3)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    constant head_args&     args    [[buffer(4)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    SHARED uint at[SIMDS];
    inputs_ready();
    const uint first = group.x * VOCAB_BLOCK;
    const logit_stats s = block_stats<SIMDS>(logits + state_next(step) * args.vocab, first,
                                             min(first + VOCAB_BLOCK, args.vocab), 1.0f, part, at, tid, lane, simd);
    if (tid == 0) {
        stats[group.x * 2] = s.most;
        stats[group.x * 2 + 1] = s.sum;
        indices[group.x] = s.index;
    }
    outputs_follow();
}

// head_pick: takes the argmax that choice_indices tell, and ends the step. stats are those of the raw logits.
//   grid: (1, 1, 1)
//   bytes: logits = 4
//   bytes: ring = 8
//   reads: step = 24
//   used: encode_tail
KERNEL(head_pick, 1)(
    device const float* logits         [[buffer(0)]],  // [sessions, GENERATIONS, vocab]
    device const float* stats          [[buffer(1)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const uint*  indices        [[buffer(2)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    device const float* choice_stats   [[buffer(3)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, 2]
    device const uint*  choice_indices [[buffer(4)]],  // [(vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK]
    device StepState*   step           [[buffer(5)]],  // [1]
    device uint*        tokens         [[buffer(6)]],  // [1]
    device uint*        ring           [[buffer(7)]],  // [TOKEN_RING, 2]
    constant head_args& args           [[buffer(8)]],
    GRID)
{
    inputs_ready();
    const uint blocks = (args.vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    const logit_stats raw = join_stats(stats, indices, blocks, 1.0f, lane);
    const uint token = min(join_stats(choice_stats, choice_indices, blocks, 1.0f, lane).index, args.vocab - 1);
    if (tid != 0) return;
    const float logit = logits[state_next(step) * args.vocab + token];
    finish_step(step, tokens, ring, token, logit - raw.most - precise::log(raw.sum));
    outputs_follow();
}

// One row's log probability of `target` (if there is one) and its `top` most likely tokens.
template <uint SIMDS>
inline void write_logprobs(device const float* row, uint vocab, uint top, uint target, device float* logprob,
                           device uint* top_ids, device float* top_logprobs, threadgroup float* part,
                           threadgroup uint* at, uint tid, uint lane, uint simd) {
    const logit_stats all = block_stats<SIMDS>(row, 0, vocab, 1.0f, part, at, tid, lane, simd);
    const float norm = all.most + precise::log(all.sum);
    if (tid == 0 && target < vocab) logprob[0] = row[target] - norm;
    float last = all.most;
    uint last_index = all.index;
    for (uint j = 0; j < top; j++) {
        if (tid == 0) {
            top_ids[j] = last_index;
            top_logprobs[j] = last - norm;
        }
        float most = -INFINITY;
        uint index = NO_TOKEN;
        for (uint i = tid; i < vocab; i += SIMDS * SIMD_WIDTH)
            if (before(last, last_index, row[i], i) && before(row[i], i, most, index)) {
                most = row[i];
                index = i;
            }
        group_best<SIMDS>(most, index, part, at, lane, simd);
        last = most;
        last_index = index;
    }
}

struct logprob_rows_args {
    uint rows;
    uint vocab;
    uint top;
    uint first;  // of the step's rows, the first that the slots hold
};

// logprob_rows: one threadgroup makes one row's log probability of its target and its `top` most likely tokens.
//   grid: (rows, 1, 1)
//   used: encode_score
KERNEL(logprob_rows, 8)(
    device const float*         logits       [[buffer(0)]],  // [rows, vocab]
    device const uint*          targets      [[buffer(1)]],  // [rows]
    device const StepState*     step         [[buffer(2)]],  // [1]
    device float*               logprobs     [[buffer(3)]],  // [rows]
    device uint*                top_ids      [[buffer(4)]],  // [rows, top]
    device float*               top_logprobs [[buffer(5)]],  // [rows, top]
    constant logprob_rows_args& args         [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    SHARED uint at[SIMDS];
    inputs_ready();
    const uint r = group.x;
    if (r + args.first >= step->rows) return;
    write_logprobs<SIMDS>(logits + r * args.vocab, args.vocab, args.top, min(targets[r], args.vocab - 1), logprobs + r,
                          top_ids + r * args.top, top_logprobs + r * args.top, part, at, tid, lane, simd);
    outputs_follow();
}

struct logprob_next_args {
    uint sessions;
    uint vocab;
    uint top;
};

// logprob_next: one threadgroup makes the `top` most likely tokens of the next generation's logits.
//   grid: (1, 1, 1)
//   bytes: logits = vocab * 4
//   used: encode_top
KERNEL(logprob_next, 8)(
    device const float*         logits       [[buffer(0)]],  // [sessions, GENERATIONS, vocab]
    device const StepState*     step         [[buffer(1)]],  // [1]
    device uint*                top_ids      [[buffer(2)]],  // [top]
    device float*               top_logprobs [[buffer(3)]],  // [top]
    constant logprob_next_args& args         [[buffer(4)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    SHARED uint at[SIMDS];
    inputs_ready();
    write_logprobs<SIMDS>(logits + state_next(step) * args.vocab, args.vocab, args.top, NO_TOKEN, top_logprobs, top_ids,
                          top_logprobs, part, at, tid, lane, simd);
    outputs_follow();
}
