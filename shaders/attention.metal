// attention.metal -- decode attention over the paged cache, with the output gate.
//
//   y[head] = sigmoid(gate[head]) * sum_t softmax_t(q . k[t]) v[t],   t <= position of the row
//
// Softmax is online, in fp32. GROUP query heads share a KV head and are handled together, so that each cache row is
// read once. The row's own q, k and v are made from the projection as by rope_write; its columns are [query | gate] per
// head, then keys, then values.
// Reference: transformers Qwen3_5MoeAttention, eager_attention_forward; Dao et al., FlashAttention (2022), algorithm 1.
#include "attend.h"

struct attention_args {
    uint sessions;
    uint kv_heads;
    uint proj_dim;
    uint pages;
    uint session_pages;
    uint blocks;
    uint block;  // tokens of one
    float eps;
};

// attention_decode: one row; one threadgroup makes all query heads of a KV head, its simdgroups share the tokens.
//   grid: (kv_heads, 1, 1)
//   const: GROUP <= 8
//   bytes: k_cache = kv_heads * HEAD_DIM * 2
//   bytes: v_cache = kv_heads * HEAD_DIM * 2
//   reads: k_cache = session_pages * PAGE * kv_heads * HEAD_DIM * 2
//   reads: v_cache = session_pages * PAGE * kv_heads * HEAD_DIM * 2
//   used: encode_attention_row
template <uint GROUP>
KERNEL(attention_decode, 8)(
    device const float*      proj       [[buffer(0)]],  // [proj_dim]
    device const bfloat*     q_norm     [[buffer(1)]],  // [HEAD_DIM]
    device const bfloat*     k_norm     [[buffer(2)]],  // [HEAD_DIM]
    device const float*      inv_freq   [[buffer(3)]],  // [ROTARY_DIM / 2]
    device const uint*       page_table [[buffer(4)]],  // [sessions, session_pages]
    device const StepState*  step       [[buffer(5)]],  // [1]
    device bfloat*           k_cache    [[buffer(6)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device bfloat*           v_cache    [[buffer(7)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device act_t*            y          [[buffer(8)]],  // [kv_heads, GROUP, HEAD_DIM]
    constant attention_args& args       [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = attend_simds(), THREADS = SIMDS * SIMD_WIDTH;
    SHARED float turn[ROTARY_DIM];
    SHARED act_t q[GROUP * HEAD_DIM];
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float part_stats[SIMDS * 2];
    SHARED float out[GROUP * HEAD_DIM];
    SHARED float stats[GROUP * 2];
    const uint kv_head = group.x, position = step->position;
    device const uint* table = page_table + step->session * args.session_pages;
    const uint own = (cache_row(table, position) * args.kv_heads + kv_head) * HEAD_DIM;
    const attend_span span = {k_cache, v_cache, table, args.kv_heads, kv_head, 0, position + 1};
    attend_row<GROUP, SIMDS> a;
    a.begin(span, position, lane, simd);
    inputs_ready();
    attend_prepare<GROUP, SIMDS>(proj, q_norm, k_norm, inv_freq, position, args.kv_heads, kv_head, args.eps, true,
                                 k_cache + own, v_cache + own, turn, q, tid, lane, simd);
    a.finish(span, q, out, stats, part, part_stats, tid, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL_TILE
    for (uint h = 0; h < GROUP; h++) {
        const uint head = kv_head * GROUP + h;
        device const float* gates = proj + (head * 2 + 1) * HEAD_DIM;
        threadgroup float* sums = out + h * HEAD_DIM;
        for (uint d = tid; d < HEAD_DIM; d += THREADS) sums[d] = sums[d] / stats[h * 2 + 1] * sigmoid(gates[d]);
        store_shared_acts(y + head * HEAD_DIM, sums, HEAD_DIM, tid, THREADS);
    }
    outputs_follow();
}

// attention_blocks: as attention_decode for one block of tokens; leaves unnormalised sums for the merge.
//   grid: (kv_heads, blocks, 1)
//   const: GROUP <= 8
//   bytes: proj = kv_heads * (GROUP + 2) * HEAD_DIM * 4
//   bytes: k_cache = kv_heads * HEAD_DIM * 2
//   bytes: v_cache = kv_heads * HEAD_DIM * 2
//   reads: k_cache = blocks * block * kv_heads * HEAD_DIM * 2
//   reads: v_cache = blocks * block * kv_heads * HEAD_DIM * 2
//   used: encode_attention_row
template <uint GROUP>
KERNEL(attention_blocks, 8)(
    device const float*      proj       [[buffer(0)]],   // [proj_dim]
    device const bfloat*     q_norm     [[buffer(1)]],   // [HEAD_DIM]
    device const bfloat*     k_norm     [[buffer(2)]],   // [HEAD_DIM]
    device const float*      inv_freq   [[buffer(3)]],   // [ROTARY_DIM / 2]
    device const uint*       page_table [[buffer(4)]],   // [sessions, session_pages]
    device const StepState*  step       [[buffer(5)]],   // [1]
    device bfloat*           k_cache    [[buffer(6)]],   // [pages, PAGE, kv_heads, HEAD_DIM]
    device bfloat*           v_cache    [[buffer(7)]],   // [pages, PAGE, kv_heads, HEAD_DIM]
    device float*            sums       [[buffer(8)]],   // [blocks, kv_heads, GROUP, HEAD_DIM]
    device float*            stats      [[buffer(9)]],   // [blocks, kv_heads, GROUP, 2]
    constant attention_args& args       [[buffer(10)]],
    GRID)
{
    constexpr uint SIMDS = attend_simds();
    SHARED float turn[ROTARY_DIM];
    SHARED act_t q[GROUP * HEAD_DIM];
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float part_stats[SIMDS * 2];
    const uint kv_head = group.x, first = group.y * args.block;
    const uint position = step->position, last = min(first + args.block, position + 1);
    device const uint* table = page_table + step->session * args.session_pages;
    const uint own = (cache_row(table, position) * args.kv_heads + kv_head) * HEAD_DIM;
    const attend_span span = {k_cache, v_cache, table, args.kv_heads, kv_head, first, last};
    attend_row<GROUP, SIMDS> a;
    if (first <= position) a.begin(span, position, lane, simd);
    inputs_ready();
    if (first > position) return;
    attend_prepare<GROUP, SIMDS>(proj, q_norm, k_norm, inv_freq, position, args.kv_heads, kv_head, args.eps,
                                 last == position + 1, k_cache + own, v_cache + own, turn, q, tid, lane, simd);
    const uint at = (group.y * args.kv_heads + kv_head) * GROUP;
    a.finish(span, q, sums + at * HEAD_DIM, stats + at * 2, part, part_stats, tid, lane, simd);
    outputs_follow();
}

struct attention_merge_args {
    uint kv_heads;
    uint proj_dim;
    uint blocks;
    uint block;
};

// attention_merge: one threadgroup joins the blocks of one head and gates the result.
//   grid: (kv_heads * GROUP, 1, 1)
//   const: GROUP <= 8
//   bytes: proj = kv_heads * GROUP * HEAD_DIM * 4
//   used: encode_attention_row
template <uint GROUP>
KERNEL(attention_merge, 8)(
    device const float*            sums  [[buffer(0)]],  // [blocks, kv_heads, GROUP, HEAD_DIM]
    device const float*            stats [[buffer(1)]],  // [blocks, kv_heads, GROUP, 2]
    device const float*            proj  [[buffer(2)]],  // [proj_dim]
    device const StepState*        step  [[buffer(3)]],  // [1]
    device act_t*                  y     [[buffer(4)]],  // [kv_heads, GROUP, HEAD_DIM]
    constant attention_merge_args& args  [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH;
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float weights[SIMDS];
    SHARED float out[HEAD_DIM];
    inputs_ready();
    const uint head = group.x, heads = args.kv_heads * GROUP, blocks = step->position / args.block + 1;
    device const float* gates = proj + (head * 2 + 1) * HEAD_DIM;
    float most = -INFINITY, sum = 0, own[LANE_DIMS];
    for (uint b = lane; b < blocks; b += SIMD_WIDTH) most = max(most, stats[(b * heads + head) * 2]);
    most = simd_max(most);
    for (uint i = 0; i < LANE_DIMS; i++) own[i] = 0;
    for (uint b = simd; b < blocks; b += SIMDS) {
        const uint at = b * heads + head;
        const float weight = precise::exp(stats[at * 2] - most);
        sum = fma(stats[at * 2 + 1], weight, sum);
        device const float* from = sums + at * HEAD_DIM + lane * LANE_DIMS;
        for (uint i = 0; i < LANE_DIMS; i++) own[i] = fma(from[i], weight, own[i]);
    }
    for (uint i = 0; i < LANE_DIMS; i++) part[simd * HEAD_DIM + lane * LANE_DIMS + i] = own[i];
    if (lane == 0) weights[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0;
    for (uint s = 0; s < SIMDS; s++) sum += weights[s];
    for (uint d = tid; d < HEAD_DIM; d += THREADS) {
        float total = 0;
        for (uint s = 0; s < SIMDS; s++) total += part[s * HEAD_DIM + d];
        out[d] = total / sum * sigmoid(gates[d]);
    }
    store_shared_acts(y + head * HEAD_DIM, out, HEAD_DIM, tid, THREADS);
    outputs_follow();
}
