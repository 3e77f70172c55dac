// attention_tile.metal -- causal attention of a chunk's rows over the paged cache (prefill), with the output gate.
//
//   y[row][head] = sigmoid(gate[row][head]) * sum_t softmax_t(q . k[t]) v[t],   t <= position of the row
//
// Softmax is online, in fp32, over tiles of 64 tokens that begin at absolute multiples of 64; no buffer grows with
// rows x length. The rows of a matrix tile are (row, query head) pairs of one KV head, so that all its query heads
// share the staged k and v. Scores come from q and k in act_t, probabilities are act_t, all sums fp32.
// Reference: transformers Qwen3_5MoeAttention, eager_attention_forward; Dao et al., FlashAttention (2022), algorithm 1.
#include "attend_tile.h"

struct attention_tile_args {
    uint rows;
    uint sessions;
    uint kv_heads;
    uint proj_dim;
    uint pages;
    uint session_pages;
};

// attention_tile: one threadgroup makes PAIRS (row, query head) pairs of one KV head.
//   grid: (kv_heads, (rows * GROUP + PAIRS - 1) / PAIRS, 1)
//   const: GROUP <= 8
//   used: encode_attention_rows
template <uint GROUP>
KERNEL(attention_tile, 4)(
    device const act_t*           q          [[buffer(0)]],  // [kv_heads, rows, GROUP, HEAD_DIM]
    device const float*           proj       [[buffer(1)]],  // [rows, proj_dim]
    device const bfloat*          k_cache    [[buffer(2)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const bfloat*          v_cache    [[buffer(3)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const uint*            page_table [[buffer(4)]],  // [sessions, session_pages]
    device const StepState*       step       [[buffer(5)]],  // [1]
    device act_t*                 y          [[buffer(6)]],  // [rows, kv_heads, GROUP, HEAD_DIM]
    constant attention_tile_args& args       [[buffer(7)]],
    GRID)
{
    SHARED act_t left[ATTEND_ROWS * TILE_K];
    SHARED act_t right[TILE_K * TILE_K];
    SHARED float scores[ATTEND_ROWS * TILE_K];
    SHARED float stats[ATTEND_ROWS * 3];
    inputs_ready();
    const uint kv_head = group.x, base = group.y * PAIRS, all = step->rows * GROUP;
    if (base >= all) return;
    const attend_job job = {q + kv_head * args.rows * GROUP * HEAD_DIM,
                            proj,
                            k_cache,
                            v_cache,
                            page_table + step->session * args.session_pages,
                            y,
                            args.kv_heads,
                            kv_head,
                            args.proj_dim,
                            step->position};
    attend_pairs<GROUP, simdgroups(4)>(job, base, min(PAIRS, all - base), left, right, scores, stats, tid, lane, simd);
    outputs_follow();
}
