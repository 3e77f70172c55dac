// ablation.metal -- prefill and decode without one of their design decisions, to measure what that decision gains.
//
// Prefill has the bits of what it stands for, but where a CPU multiplies integers: expanded weights are act_t.
#include "attend.h"
#include "delta_rows.h"
#include "tile.h"

struct delta_memory_args {
    uint rows;
    uint sessions;
    uint key_heads;
    uint value_heads;
};

// delta_scan_memory: delta_scan with the state in memory, from which every token takes it and to which it returns it.
//   grid: (delta_groups(), value_heads, 1)
//   used: bench
KERNEL(delta_scan_memory, 4)(
    device const float*         qkv   [[buffer(0)]],  // [rows, 2 * key_heads + value_heads, DELTA_DIM]
    device const float*         gates [[buffer(1)]],  // [rows, value_heads, 2]
    device const StepState*     step  [[buffer(2)]],  // [1]
    device float*               state [[buffer(3)]],  // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
    device float*               y     [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]
    constant delta_memory_args& args  [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    const uint head = group.y, row = (group.x * SIMDS + simd) * DELTA_ROWS;
    const uint key_head = head / (args.value_heads / args.key_heads);
    const uint stride = (2 * args.key_heads + args.value_heads) * DELTA_DIM;
    inputs_ready();
    device float* from = state + ((state_now(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM;
    device float* to = state + ((state_next(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM;
    for (uint t = 0; t < step->rows; t++) {
        device const float* x = qkv + t * stride;
        device const float* gate = gates + (t * args.value_heads + head) * 2;
        delta_rows<DELTA_ROWS> s;
        s.load(from, t == 0 && step->position == 0, lane);
        s.update(x + key_head * DELTA_DIM, x + (args.key_heads + key_head) * DELTA_DIM,
                 x + (2 * args.key_heads + head) * DELTA_DIM + row, float2(gate[0], gate[1]),
                 y + (t * args.value_heads + head) * DELTA_DIM + row, lane);
        s.store(to, lane);
        from = to;
    }
    outputs_follow();
}

struct expand_args {
    uint n;
    uint k;
};

// expand_weights: one threadgroup writes one row of a 4-bit matrix as act_t.
//   grid: (n, 1, 1)
//   used: bench
KERNEL(expand_weights, 2)(
    device const uint4*   w      [[buffer(0)]],  // [n, k / 32]
    device const bfloat*  scales [[buffer(1)]],  // [n, k / 64]
    device const bfloat*  biases [[buffer(2)]],  // [n, k / 64]
    device act_t*         y      [[buffer(3)]],  // [n, k]
    constant expand_args& args   [[buffer(4)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(2) * SIMD_WIDTH;
    inputs_ready();
    const uint row = group.x, k = args.k;
    device const uint* words = (device const uint*)(w + row * (k / 32));
    for (uint at = tid * 8; at < k; at += THREADS * 8) {
        const uint g = row * (k / QUANT_GROUP) + at / QUANT_GROUP;
        const float s = float(scales[g]), b = float(biases[g]);
        float v[8];
        for (uint i = 0; i < 8; i++) v[i] = fma(s, quant_at<4>(words[at / 8], i), b);
        *(device uint4*)(y + row * k + at) = pack8(v);
    }
    outputs_follow();
}

struct expanded_mm_args {
    uint rows;
    uint used;
    uint experts;
    uint n;
    uint k;
};

// acc += the tile of x w^T over 64 of k. Ends with a barrier; x must be staged since the last one.
template <uint BM, uint SIMDS>
inline void multiply_expanded(thread tile_acc<BM, TILE_N, SIMDS>& acc, threadgroup act_t* xs, threadgroup act_t* ws,
                              device const act_t* w, uint k, uint live, uint columns, uint tid) {
    stage_rows<TILE_N, SIMDS * SIMD_WIDTH>(ws, w, own_rows(), k, columns, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply<BM, TILE_N, SIMDS>(acc, xs, ws, live, columns);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// expanded_mm_gate_up: expert_mm_gate_up from expanded weights.
//   grid: ((n + TILE_N - 1) / TILE_N, rows * used / BM + experts, 1)
//   const: BM <= 128
//   used: bench
template <uint BM>
KERNEL(expanded_mm_gate_up, 4)(
    device const act_t*        x          [[buffer(0)]],  // [rows, k]
    device const uint*         pairs      [[buffer(1)]],  // [rows * used]
    device const uint4*        tiles      [[buffer(2)]],  // [rows * used / BM + experts]
    device const uint*         tile_count [[buffer(3)]],  // [1]
    device const act_t*        w          [[buffer(4)]],  // [experts, 2 * n, k]
    device act_t*              h          [[buffer(5)]],  // [rows * used, n]
    constant expanded_mm_args& args       [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    SHARED act_t xs[BM * TILE_K];
    SHARED act_t ws[TILE_N * TILE_K];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * TILE_N, columns = min(TILE_N, args.n - col), live = tile[2];
    const uint gate_row = tile[0] * 2 * args.n + col, up_row = gate_row + args.n;
    tile_acc<BM, TILE_N, SIMDS> gate, up;
    tile_clear(gate, lane, simd);
    tile_clear(up, lane, simd);
    for (uint at = 0; at < k; at += TILE_K) {
        stage_rows<BM, SIMDS * SIMD_WIDTH>(xs, x + at, pair_rows{pairs + tile[1], args.used}, k, live, tid);
        multiply_expanded<BM, SIMDS>(gate, xs, ws, w + gate_row * k + at, k, live, columns, tid);
        multiply_expanded<BM, SIMDS>(up, xs, ws, w + up_row * k + at, k, live, columns, tid);
    }
    tile_swiglu(gate, up);
    tile_store_acts(gate, h + tile[1] * args.n + col, args.n, live);
    outputs_follow();
}

// expanded_mm_down: expert_mm_down from expanded weights.
//   grid: ((n + TILE_N - 1) / TILE_N, rows * used / BM + experts, 1)
//   const: BM <= 128
//   used: bench
template <uint BM>
KERNEL(expanded_mm_down, 4)(
    device const act_t*        h          [[buffer(0)]],  // [rows * used, k]
    device const uint*         pairs      [[buffer(1)]],  // [rows * used]
    device const uint4*        tiles      [[buffer(2)]],  // [rows * used / BM + experts]
    device const uint*         tile_count [[buffer(3)]],  // [1]
    device const act_t*        w          [[buffer(4)]],  // [experts, n, k]
    device float*              y          [[buffer(5)]],  // [rows * used, n]
    constant expanded_mm_args& args       [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    SHARED act_t xs[BM * TILE_K];
    SHARED act_t ws[TILE_N * TILE_K];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * TILE_N, columns = min(TILE_N, args.n - col), live = tile[2];
    device const act_t* own = w + (tile[0] * args.n + col) * k;
    tile_acc<BM, TILE_N, SIMDS> acc;
    tile_clear(acc, lane, simd);
    for (uint at = 0; at < k; at += TILE_K) {
        stage_rows<BM, SIMDS * SIMD_WIDTH>(xs, h + tile[1] * k + at, own_rows(), k, live, tid);
        multiply_expanded<BM, SIMDS>(acc, xs, ws, own + at, k, live, columns, tid);
    }
    tile_store(acc, y + col, pair_rows{pairs + tile[1], 1}, args.n, live, float(SWIGLU_SHIFT));
    outputs_follow();
}

struct attention_apart_args {
    uint sessions;
    uint kv_heads;
    uint proj_dim;
    uint pages;
    uint session_pages;
    uint blocks;
    uint block;
    float eps;
};

// attention_blocks_apart: attention_blocks with a threadgroup for each query head, which reads its KV head's rows.
//   grid: (kv_heads * GROUP, blocks, 1)
//   const: GROUP <= 8
//   used: bench
template <uint GROUP>
KERNEL(attention_blocks_apart, 8)(
    device const float*            proj       [[buffer(0)]],   // [proj_dim]
    device const bfloat*           q_norm     [[buffer(1)]],   // [HEAD_DIM]
    device const bfloat*           k_norm     [[buffer(2)]],   // [HEAD_DIM]
    device const float*            inv_freq   [[buffer(3)]],   // [ROTARY_DIM / 2]
    device const uint*             page_table [[buffer(4)]],   // [sessions, session_pages]
    device const StepState*        step       [[buffer(5)]],   // [1]
    device bfloat*                 k_cache    [[buffer(6)]],   // [pages, PAGE, kv_heads, HEAD_DIM]
    device bfloat*                 v_cache    [[buffer(7)]],   // [pages, PAGE, kv_heads, HEAD_DIM]
    device float*                  sums       [[buffer(8)]],   // [blocks, kv_heads, GROUP, HEAD_DIM]
    device float*                  stats      [[buffer(9)]],   // [blocks, kv_heads, GROUP, 2]
    constant attention_apart_args& args       [[buffer(10)]],
    GRID)
{
    constexpr uint SIMDS = attend_simds();
    SHARED float turn[ROTARY_DIM];
    SHARED act_t q[GROUP * HEAD_DIM];
    SHARED float part[SIMDS * HEAD_DIM];
    SHARED float part_stats[SIMDS * 2];
    const uint kv_head = group.x / GROUP, head = group.x % GROUP, first = group.y * args.block;
    const uint position = step->position, last = min(first + args.block, position + 1);
    device const uint* table = page_table + step->session * args.session_pages;
    const uint own = (cache_row(table, position) * args.kv_heads + kv_head) * HEAD_DIM;
    const attend_span span = {k_cache, v_cache, table, args.kv_heads, kv_head, first, last};
    attend_row<1, SIMDS> a;
    if (first <= position) a.begin(span, position, lane, simd);
    inputs_ready();
    if (first > position) return;
    // Every head's threadgroup writes the row's k and v, the same ones.
    attend_prepare<GROUP, SIMDS>(proj, q_norm, k_norm, inv_freq, position, args.kv_heads, kv_head, args.eps,
                                 last == position + 1, k_cache + own, v_cache + own, turn, q, tid, lane, simd);
    const uint at = group.y * args.kv_heads * GROUP + group.x;
    a.finish(span, q + head * HEAD_DIM, sums + at * HEAD_DIM, stats + at * 2, part, part_stats, tid, lane, simd);
    outputs_follow();
}
