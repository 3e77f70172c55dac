// attention.metal -- decode attention over the paged cache, with the output gate.
//
//   y[head] = sigmoid(gate[head]) * sum_t softmax_t(q . k[t]) v[t],   t <= position of the row; q is already scaled
//
// Softmax is online, in fp32. GROUP query heads share a KV head and are handled
// together, so that each cache row is read once. Gates are columns of the projection: per head [query | gate].
// Reference: transformers Qwen3_5MoeAttention, eager_attention_forward; Dao et al., FlashAttention (2022), algorithm 1.
#include "lily.h"

struct attention_args {
    uint sessions;
    uint kv_heads;
    uint proj_dim;
    uint pages;
    uint session_pages;
    uint blocks;
};

constant constexpr uint LANE_DIMS = HEAD_DIM / SIMD_WIDTH;

// The running softmax of GROUP query heads, each lane holding LANE_DIMS dims of every head.
template <uint GROUP> struct attend {
    float q[GROUP][LANE_DIMS], o[GROUP][LANE_DIMS], most[GROUP], sum[GROUP];
    void begin(device const act_t* from, uint lane) thread {
        for (uint h = 0; h < GROUP; h++) {
            most[h] = -INFINITY;
            sum[h] = 0;
            for (uint i = 0; i < LANE_DIMS; i++) {
                q[h][i] = float(from[h * HEAD_DIM + lane * LANE_DIMS + i]);
                o[h][i] = 0;
            }
        }
    }
    void token(device const bfloat* k, device const bfloat* v, uint lane) thread {
        float ks[LANE_DIMS], vs[LANE_DIMS];
        for (uint i = 0; i < LANE_DIMS; i++) {
            ks[i] = float(k[lane * LANE_DIMS + i]);
            vs[i] = float(v[lane * LANE_DIMS + i]);
        }
        for (uint h = 0; h < GROUP; h++) {
            const float score = simd_sum(lane_dot<LANE_DIMS>(q[h], ks));
            if (score > most[h]) {
                const float shrink = precise::exp(most[h] - score);
                most[h] = score;
                sum[h] *= shrink;
                for (uint i = 0; i < LANE_DIMS; i++) o[h][i] *= shrink;
            }
            const float p = precise::exp(score - most[h]);
            sum[h] += p;
            for (uint i = 0; i < LANE_DIMS; i++) o[h][i] = fma(p, vs[i], o[h][i]);
        }
    }
};

// Runs the simdgroup's share of tokens [first, last): every SIMDS-th one.
template <uint GROUP, uint SIMDS>
inline void attend_range(thread attend<GROUP>& a, device const bfloat* k_cache, device const bfloat* v_cache,
                         device const uint* table, uint kv_heads, uint kv_head, uint first, uint last, uint lane,
                         uint simd) {
    for (uint t = first + simd; t < last; t += SIMDS) {
        const uint at = (cache_row(table, t) * kv_heads + kv_head) * HEAD_DIM;
        a.token(k_cache + at, v_cache + at, lane);
    }
}

// Adds up head h over the simdgroups. out has HEAD_DIM values, relative to the returned {maximum, sum}.
template <uint GROUP, uint SIMDS>
inline float2 attend_merge(thread attend<GROUP>& a, uint h, threadgroup float* part, threadgroup float* stats,
                           threadgroup float* out, uint tid, uint lane, uint simd) {
    for (uint i = 0; i < LANE_DIMS; i++) part[simd * HEAD_DIM + lane * LANE_DIMS + i] = a.o[h][i];
    if (lane == 0) {
        stats[simd * 2] = a.most[h];
        stats[simd * 2 + 1] = a.sum[h];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float most = -INFINITY, sum = 0;
    for (uint s = 0; s < SIMDS; s++) most = max(most, stats[s * 2]);
    for (uint s = 0; s < SIMDS; s++) sum = fma(stats[s * 2 + 1], precise::exp(stats[s * 2] - most), sum);
    for (uint d = tid; d < HEAD_DIM; d += SIMDS * SIMD_WIDTH) {
        float v = 0;
        for (uint s = 0; s < SIMDS; s++) v = fma(part[s * HEAD_DIM + d], precise::exp(stats[s * 2] - most), v);
        out[d] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return float2(most, sum);
}

// attention_decode: one row; one threadgroup makes all query heads of a KV head, its simdgroups share the tokens.
//   grid: (kv_heads, 1, 1)
//   const: GROUP <= 8
//   bytes: proj = kv_heads * GROUP * HEAD_DIM * 4
//   used: encode_attention
template <uint GROUP>
KERNEL(attention_decode, 8)(
    device const act_t*      q          [[buffer(0)]],  // [kv_heads, GROUP, HEAD_DIM]
    device const float*      proj       [[buffer(1)]],  // [proj_dim]
    device const bfloat*     k_cache    [[buffer(2)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const bfloat*     v_cache    [[buffer(3)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const uint*       page_table [[buffer(4)]],  // [sessions, session_pages]
    device const StepState*  step       [[buffer(5)]],  // [1]
    device act_t*            y          [[buffer(6)]],  // [kv_heads, GROUP, HEAD_DIM]
    constant attention_args& args       [[buffer(7)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float stats[SIMDS * 2];
    SHARED float out[HEAD_DIM];
    const uint kv_head = group.x;
    inputs_ready();
    attend<GROUP> a;
    a.begin(q + kv_head * GROUP * HEAD_DIM, lane);
    attend_range<GROUP, SIMDS>(a, k_cache, v_cache, page_table + step->session * args.session_pages, args.kv_heads,
                               kv_head, 0, step->position + 1, lane, simd);
    for (uint h = 0; h < GROUP; h++) {
        const float2 stat = attend_merge<GROUP, SIMDS>(a, h, part, stats, out, tid, lane, simd);
        const uint head = kv_head * GROUP + h;
        for (uint d = tid; d < HEAD_DIM; d += SIMDS * SIMD_WIDTH)
            y[head * HEAD_DIM + d] = to_act(out[d] / stat[1] * sigmoid(proj[(head * 2 + 1) * HEAD_DIM + d]));
    }
    outputs_follow();
}

// attention_blocks: as attention_decode for one block of KV_BLOCK tokens; leaves unnormalised sums for the merge.
//   grid: (kv_heads, blocks, 1)
//   const: GROUP <= 8
//   used: encode_attention
template <uint GROUP>
KERNEL(attention_blocks, 8)(
    device const act_t*      q          [[buffer(0)]],  // [kv_heads, GROUP, HEAD_DIM]
    device const bfloat*     k_cache    [[buffer(1)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const bfloat*     v_cache    [[buffer(2)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device const uint*       page_table [[buffer(3)]],  // [sessions, session_pages]
    device const StepState*  step       [[buffer(4)]],  // [1]
    device float*            sums       [[buffer(5)]],  // [blocks, kv_heads, GROUP, HEAD_DIM]
    device float*            stats      [[buffer(6)]],  // [blocks, kv_heads, GROUP, 2]
    constant attention_args& args       [[buffer(7)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float local_stats[SIMDS * 2];
    SHARED float out[HEAD_DIM];
    const uint kv_head = group.x, first = group.y * KV_BLOCK;
    inputs_ready();
    const uint length = step->position + 1;
    if (first >= length) return;
    attend<GROUP> a;
    a.begin(q + kv_head * GROUP * HEAD_DIM, lane);
    attend_range<GROUP, SIMDS>(a, k_cache, v_cache, page_table + step->session * args.session_pages, args.kv_heads,
                               kv_head, first, min(first + KV_BLOCK, length), lane, simd);
    for (uint h = 0; h < GROUP; h++) {
        const float2 stat = attend_merge<GROUP, SIMDS>(a, h, part, local_stats, out, tid, lane, simd);
        const uint at = (group.y * args.kv_heads + kv_head) * GROUP + h;
        for (uint d = tid; d < HEAD_DIM; d += SIMDS * SIMD_WIDTH) sums[at * HEAD_DIM + d] = out[d];
        if (tid == 0) {
            stats[at * 2] = stat[0];
            stats[at * 2 + 1] = stat[1];
        }
    }
    outputs_follow();
}

// attention_merge: one threadgroup joins the blocks of one head and gates the result.
//   grid: (kv_heads * GROUP, 1, 1)
//   const: GROUP <= 8
//   bytes: proj = kv_heads * GROUP * HEAD_DIM * 4
//   used: encode_attention
template <uint GROUP>
KERNEL(attention_merge, 8)(
    device const float*      sums  [[buffer(0)]],  // [blocks, kv_heads, GROUP, HEAD_DIM]
    device const float*      stats [[buffer(1)]],  // [blocks, kv_heads, GROUP, 2]
    device const float*      proj  [[buffer(2)]],  // [proj_dim]
    device const StepState*  step  [[buffer(3)]],  // [1]
    device act_t*            y     [[buffer(4)]],  // [kv_heads, GROUP, HEAD_DIM]
    constant attention_args& args  [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    inputs_ready();
    const uint head = group.x, heads = args.kv_heads * GROUP, blocks = step->position / KV_BLOCK + 1;
    float most = -INFINITY, sum = 0;
    for (uint b = 0; b < blocks; b++) most = max(most, stats[(b * heads + head) * 2]);
    for (uint b = 0; b < blocks; b++)
        sum = fma(stats[(b * heads + head) * 2 + 1], precise::exp(stats[(b * heads + head) * 2] - most), sum);
    for (uint d = tid; d < HEAD_DIM; d += THREADS) {
        float v = 0;
        for (uint b = 0; b < blocks; b++)
            v = fma(sums[(b * heads + head) * HEAD_DIM + d], precise::exp(stats[(b * heads + head) * 2] - most), v);
        y[head * HEAD_DIM + d] = to_act(v / sum * sigmoid(proj[(head * 2 + 1) * HEAD_DIM + d]));
    }
    outputs_follow();
}
