// rope.metal -- per-head RMS norm of q and k, partial rotary embedding, and the write of k and v into the cache.
//
//   q, k: x * rsqrt(mean(x^2) + eps) * w, then the first ROTARY_DIM dims rotate as pairs (i, i + ROTARY_DIM / 2)
//   by the angle position * inv_freq[i], rounded to fp32 as in the reference; q is scaled by HEAD_DIM^-0.5.
//
// q is stored [kv_heads, rows, group, HEAD_DIM], so that all query heads that share a KV head are one matrix. Cache
// rows are bf16 in pages of PAGE tokens. Reference: transformers Qwen3_5MoeAttention, apply_rotary_pos_emb.
#include "rope.h"

struct rope_write_args {
    uint rows;
    uint sessions;
    uint heads;
    uint kv_heads;
    uint proj_dim;
    uint pages;          // of the pool
    uint session_pages;  // of one session's table
    float eps;
};

// rope_write: one threadgroup makes the heads of one row, a simdgroup each: query heads, key heads, value heads.
//   grid: (rows, 1, 1)
//   bytes: proj = rows * (heads + 2 * kv_heads) * HEAD_DIM * 4
//   bytes: k_cache = rows * kv_heads * HEAD_DIM * 2
//   bytes: v_cache = rows * kv_heads * HEAD_DIM * 2
//   bytes: page_table = rows * 4
//   used: encode_attention_rows
KERNEL(rope_write, 4)(
    device const float*       proj       [[buffer(0)]],  // [rows, proj_dim]
    device const bfloat*      q_norm     [[buffer(1)]],  // [HEAD_DIM]
    device const bfloat*      k_norm     [[buffer(2)]],  // [HEAD_DIM]
    device const float*       inv_freq   [[buffer(3)]],  // [ROTARY_DIM / 2]
    device const uint*        page_table [[buffer(4)]],  // [sessions, session_pages]
    device const StepState*   step       [[buffer(5)]],  // [1]
    device act_t*             q          [[buffer(6)]],  // [rows, heads, HEAD_DIM]
    device bfloat*            k_cache    [[buffer(7)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    device bfloat*            v_cache    [[buffer(8)]],  // [pages, PAGE, kv_heads, HEAD_DIM]
    constant rope_write_args& args       [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    SHARED float turn[ROTARY_DIM];
    inputs_ready();
    const uint row = group.x, shared = args.heads / args.kv_heads;  // query heads of a KV head
    if (row >= step->rows) return;
    const uint position = step->position + row;
    const uint at = cache_row(page_table + step->session * args.session_pages, position) * args.kv_heads;
    device const float* queries = proj + row * args.proj_dim;
    device const float* keys = queries + args.heads * 2 * HEAD_DIM;
    device const float* values = keys + args.kv_heads * HEAD_DIM;
    make_turn(turn, inv_freq, position, tid, SIMDS * SIMD_WIDTH);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint head = simd; head < args.heads; head += SIMDS) {
        float v[HEAD_PARTS];
        make_head(v, queries + head * 2 * HEAD_DIM, q_norm, turn, args.eps, lane);
        device act_t* out = q + ((head / shared * args.rows + row) * shared + head % shared) * HEAD_DIM;
        for (uint j = 0; j < HEAD_PARTS; j++) out[j * SIMD_WIDTH + lane] = to_act(v[j] * QUERY_SCALE);
    }
    for (uint head = simd; head < args.kv_heads; head += SIMDS) {
        float v[HEAD_PARTS];
        make_head(v, keys + head * HEAD_DIM, k_norm, turn, args.eps, lane);
        for (uint j = 0; j < HEAD_PARTS; j++) k_cache[(at + head) * HEAD_DIM + j * SIMD_WIDTH + lane] = bfloat(v[j]);
        for (uint i = lane; i < HEAD_DIM; i += SIMD_WIDTH)
            v_cache[(at + head) * HEAD_DIM + i] = bfloat(values[head * HEAD_DIM + i]);
    }
    outputs_follow();
}
