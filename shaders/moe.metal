// moe.metal -- mixture of experts: routing, experts, combine.
//
//   p = softmax(router logits);  the `used` largest are chosen (ties: lowest index) and renormalised to sum to 1
//   y = x + sum_j p_j * down_j(silu(gate_j h) * (up_j h)) + sigmoid(shared gate) * down_s(silu(gate_s h) * (up_s h))
//
// Row e < experts of the router's matrix is an expert, row `experts` the shared expert's gate, the rest padding.
// Expert outputs stay apart as [rows, used, hidden]; the owner of a row adds them in order, the shared expert last: no
// float atomics, the same bits in decode and prefill whatever the order of the experts' own work. Prefill orders the
// (row, choice) pairs by expert on the device: histogram per block, scan, scatter, map of tiles.
// Reference: transformers Qwen3_5MoeSparseMoeBlock.
#include "tile.h"

struct moe_route_args {
    uint rows;
    uint n;  // width of a row of logits
    uint experts;
    uint used;
};

// moe_route: one simdgroup chooses one row's experts. weights: the choices' in order, then the shared expert's.
//   grid: (rows, 1, 1)
//   bytes: logits = rows * (experts + 1) * 4
//   used: encode_moe
KERNEL(moe_route, 1)(
    device const float*      logits  [[buffer(0)]],  // [rows, n]
    device const StepState*  step    [[buffer(1)]],  // [1]
    device uint*             ids     [[buffer(2)]],  // [rows, used]
    device float*            weights [[buffer(3)]],  // [rows, used + 1]
    constant moe_route_args& args    [[buffer(4)]],
    GRID)
{
    constexpr uint OWN = MAX_EXPERTS / SIMD_WIDTH;
    inputs_ready();
    if (group.x >= step->rows) return;
    device const float* row = logits + group.x * args.n;
    float v[OWN];
    for (uint i = 0; i < OWN; i++) {
        const uint e = i * SIMD_WIDTH + lane;
        v[i] = e < args.experts ? row[e] : -INFINITY;
    }
    device float* out = weights + group.x * (args.used + 1);
    float most = 0, sum = 0;
    for (uint j = 0; j < args.used; j++) {
        float high = -INFINITY;
        for (uint i = 0; i * SIMD_WIDTH < args.experts; i++) high = max(high, v[i]);
        high = simd_max(high);
        uint best = MAX_EXPERTS;
        for (uint i = 0; i * SIMD_WIDTH < args.experts; i++)
            if (v[i] == high) best = min(best, i * SIMD_WIDTH + lane);
        best = min(simd_min(best), args.experts - 1);  // logits that are not numbers choose some expert
        for (uint i = 0; i * SIMD_WIDTH < args.experts; i++)
            if (i * SIMD_WIDTH + lane == best) v[i] = -INFINITY;
        if (j == 0) most = high;
        const float e = precise::exp(high - most);
        sum += e;
        if (lane == 0) {
            ids[group.x * args.used + j] = best;
            out[j] = e;
        }
    }
    if (lane == 0) {
        for (uint j = 0; j < args.used; j++) out[j] /= sum;
        out[args.used] = sigmoid(row[args.experts]);
    }
    outputs_follow();
}

struct moe_order_args {
    uint rows;
    uint used;
    uint experts;
    uint tile;  // rows of an expert's matrix tile
};

constexpr uint order_blocks(uint pairs) { return (pairs + ROUTE_BLOCK - 1) / ROUTE_BLOCK; }

// moe_histogram: one threadgroup counts the experts of ROUTE_BLOCK pairs.
//   grid: ((rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, 1, 1)
//   used: encode_expert_tiles
KERNEL(moe_histogram, 8)(
    device const uint*       ids    [[buffer(0)]],  // [rows, used]
    device const StepState*  step   [[buffer(1)]],  // [1]
    device uint*             counts [[buffer(2)]],  // [(rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, experts]
    constant moe_order_args& args   [[buffer(3)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    inputs_ready();
    const uint first = group.x * ROUTE_BLOCK, last = min(first + ROUTE_BLOCK, step->rows * args.used);
    for (uint e = tid; e < args.experts; e += THREADS) {
        uint count = 0;
        for (uint i = first; i < last; i++) count += ids[i] == e ? 1 : 0;
        counts[group.x * args.experts + e] = count;
    }
    outputs_follow();
}

// moe_scan: one threadgroup turns counts into places: where each block's pairs of each expert go, and the map of
// matrix tiles {expert, first place, pairs, 0}, experts in order.
//   grid: (1, 1, 1)
//   used: encode_expert_tiles
KERNEL(moe_scan, 8)(
    device const uint*       counts     [[buffer(0)]],  // [(rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, experts]
    device const StepState*  step       [[buffer(1)]],  // [1]
    device uint*             places     [[buffer(2)]],  // [(rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, experts]
    device uint4*            tiles      [[buffer(3)]],  // [rows * used / tile + experts]
    device uint*             tile_count [[buffer(4)]],  // [1]
    constant moe_order_args& args       [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH;
    SHARED uint total[MAX_EXPERTS];
    SHARED uint start[MAX_EXPERTS];
    SHARED uint tile_start[MAX_EXPERTS];
    inputs_ready();
    const uint blocks = order_blocks(step->rows * args.used);
    for (uint e = tid; e < args.experts; e += THREADS) {
        uint sum = 0;
        for (uint b = 0; b < blocks; b++) sum += counts[b * args.experts + e];
        total[e] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) {
        uint pairs = 0, made = 0;
        for (uint i = 0; i < args.experts; i += SIMD_WIDTH) {
            const uint e = i + lane;
            const uint n = e < args.experts ? total[e] : 0, t = (n + args.tile - 1) / args.tile;
            const uint before = simd_prefix_exclusive_sum(n), tiles_before = simd_prefix_exclusive_sum(t);
            if (e < args.experts) {
                start[e] = pairs + before;
                tile_start[e] = made + tiles_before;
            }
            pairs += simd_sum(n);
            made += simd_sum(t);
        }
        if (lane == 0) tile_count[0] = made;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = tid; e < args.experts; e += THREADS) {
        uint place = start[e];
        for (uint b = 0; b < blocks; b++) {
            places[b * args.experts + e] = place;
            place += counts[b * args.experts + e];
        }
        for (uint i = 0; i * args.tile < total[e]; i++)
            tiles[tile_start[e] + i] = uint4(e, start[e] + i * args.tile, min(args.tile, total[e] - i * args.tile), 0);
    }
    outputs_follow();
}

// moe_scatter: one threadgroup puts ROUTE_BLOCK pairs in their places, equal experts in the order of their rows.
//   grid: ((rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, 1, 1)
//   used: encode_expert_tiles
KERNEL(moe_scatter, 8)(
    device const uint*       ids    [[buffer(0)]],  // [rows, used]
    device const uint*       places [[buffer(1)]],  // [(rows * used + ROUTE_BLOCK - 1) / ROUTE_BLOCK, experts]
    device const StepState*  step   [[buffer(2)]],  // [1]
    device uint*             pairs  [[buffer(3)]],  // [rows * used]
    constant moe_order_args& args   [[buffer(4)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(8) * SIMD_WIDTH;
    SHARED uint own[ROUTE_BLOCK];
    inputs_ready();
    const uint first = group.x * ROUTE_BLOCK, all = step->rows * args.used;
    if (first >= all) return;
    const uint count = min(ROUTE_BLOCK, all - first);
    for (uint i = tid; i < count; i += THREADS) own[i] = ids[first + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < count; i += THREADS) {
        uint rank = 0;
        for (uint j = 0; j < i; j++) rank += own[j] == own[i] ? 1 : 0;
        pairs[places[group.x * args.experts + own[i]] + rank] = first + i;
    }
    outputs_follow();
}

struct expert_mv_args {
    uint hidden;
    uint inner;
    uint shared_inner;
    uint experts;
    uint used;
};

// Two quantised products of one vector at once, or one when PAIR is 1: rows `first` and `first + second`.
template <uint PAIR, uint SPLIT>
inline void expert_partials(device const act_t* x, device const uint4* w, device const bfloat* scales,
                            device const bfloat* biases, uint k, uint first, uint second, threadgroup float* part,
                            uint simds, uint lane, uint simd) {
    for (uint p = 0; p < PAIR; p++) {
        const uint row = first + p * second + simd / SPLIT * MV_ROWS;
        quant_acc<4> acc[ROWS_PER_LANE];
        for (uint r = 0; r < ROWS_PER_LANE; r++) acc[r].clear();
        mv_accumulate<4, SPLIT>(acc, x, w + row * (k / 32), scales + row * (k / QUANT_GROUP),
                                biases + row * (k / QUANT_GROUP), k, lane, simd % SPLIT);
        mv_reduce<4>(acc, part + (p * simds + simd) * MV_ROWS, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// expert_mv_gate_up: decode; one threadgroup makes mv_rows(K) values of one chosen expert, the shared one last.
//   grid: (larger(inner, shared_inner) / mv_rows(K), used + 1, 1)
//   const: K = hidden
//   bytes: w = used * inner * hidden
//   bytes: scales = used * inner * hidden / 16
//   bytes: biases = used * inner * hidden / 16
//   used: encode_expert_row
template <uint K>
KERNEL(expert_mv_gate_up, 8)(
    device const act_t*      x             [[buffer(0)]],   // [hidden]
    device const uint*       ids           [[buffer(1)]],   // [used]
    device const uint4*      w             [[buffer(2)]],   // [experts, 2 * inner, hidden / 32]
    device const bfloat*     scales        [[buffer(3)]],   // [experts, 2 * inner, hidden / 64]
    device const bfloat*     biases        [[buffer(4)]],   // [experts, 2 * inner, hidden / 64]
    device const uint4*      shared_w      [[buffer(5)]],   // [2 * shared_inner, hidden / 32]
    device const bfloat*     shared_scales [[buffer(6)]],   // [2 * shared_inner, hidden / 64]
    device const bfloat*     shared_biases [[buffer(7)]],   // [2 * shared_inner, hidden / 64]
    device act_t*            h             [[buffer(8)]],   // [used * inner + shared_inner]
    constant expert_mv_args& args          [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), ROWS = mv_rows(K), SPLIT = mv_split(K);
    SHARED float part[2 * SIMDS * MV_ROWS];
    inputs_ready();
    const bool routed = group.y < args.used;
    const uint k = K ? K : args.hidden, inner = routed ? args.inner : args.shared_inner, first = group.x * ROWS;
    if (first >= inner) return;
    const uint matrix = routed ? ids[group.y] * 2 * inner : 0;
    expert_partials<2, SPLIT>(x, routed ? w : shared_w, routed ? scales : shared_scales,
                              routed ? biases : shared_biases, k, matrix + first, inner, part, SIMDS, lane, simd);
    for (uint i = tid; i < ROWS; i += SIMDS * SIMD_WIDTH) {
        const float gate = mv_row<SPLIT>(part, i), up = mv_row<SPLIT>(part + SIMDS * MV_ROWS, i);
        h[group.y * args.inner + first + i] = to_act(silu(gate) * up * (1.0f / float(SWIGLU_SHIFT)));
    }
    outputs_follow();
}

// expert_mv_down: decode; one threadgroup makes mv_rows(0) values of one chosen expert's output, the shared one last.
//   grid: (hidden / mv_rows(0), used + 1, 1)
//   bytes: w = used * inner * hidden / 2
//   bytes: scales = used * inner * hidden / 32
//   bytes: biases = used * inner * hidden / 32
//   used: encode_expert_row
KERNEL(expert_mv_down, 8)(
    device const act_t*      h             [[buffer(0)]],   // [used * inner + shared_inner]
    device const uint*       ids           [[buffer(1)]],   // [used]
    device const uint4*      w             [[buffer(2)]],   // [experts, hidden, inner / 32]
    device const bfloat*     scales        [[buffer(3)]],   // [experts, hidden, inner / 64]
    device const bfloat*     biases        [[buffer(4)]],   // [experts, hidden, inner / 64]
    device const uint4*      shared_w      [[buffer(5)]],   // [hidden, shared_inner / 32]
    device const bfloat*     shared_scales [[buffer(6)]],   // [hidden, shared_inner / 64]
    device const bfloat*     shared_biases [[buffer(7)]],   // [hidden, shared_inner / 64]
    device float*            y             [[buffer(8)]],   // [used + 1, hidden]
    constant expert_mv_args& args          [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), ROWS = mv_rows(0), SPLIT = mv_split(0);
    SHARED float part[SIMDS * MV_ROWS];
    inputs_ready();
    const bool routed = group.y < args.used;
    const uint k = routed ? args.inner : args.shared_inner, first = group.x * ROWS;
    const uint matrix = routed ? ids[group.y] * args.hidden : 0;
    expert_partials<1, SPLIT>(h + group.y * args.inner, routed ? w : shared_w, routed ? scales : shared_scales,
                              routed ? biases : shared_biases, k, matrix + first, 0, part, SIMDS, lane, simd);
    for (uint i = tid; i < ROWS; i += SIMDS * SIMD_WIDTH)
        y[group.y * args.hidden + first + i] = mv_row<SPLIT>(part, i) * float(SWIGLU_SHIFT);
    outputs_follow();
}

struct expert_mm_args {
    uint rows;
    uint used;
    uint experts;
    uint n;  // columns of the result
    uint k;
};

// Stages 64 columns of the tile's pairs: row pairs[i] / used of x.
template <uint BM, uint THREADS>
inline void stage_pairs(threadgroup act_t* tile, device const act_t* x, device const uint* pairs, uint used,
                        uint stride, uint live, uint tid) {
    for (uint t = tid; t < BM * (TILE_K / 8); t += THREADS) {
        const uint row = t / (TILE_K / 8), col = t % (TILE_K / 8) * 8;
        tile_put8(tile, row, col,
                  row < live ? *(device const uint4*)(x + pairs[row] / used * stride + col) : uint4(0u));
    }
}

// expert_mm_gate_up: prefill; one threadgroup makes the same BM x TILE_N tile of gate and up of one expert's pairs.
//   grid: (n / TILE_N, rows * used / BM + experts, 1)
//   const: BM <= 128
//   used: encode_expert_tiles
template <uint BM>
KERNEL(expert_mm_gate_up, 4)(
    device const act_t*      x          [[buffer(0)]],  // [rows, k]
    device const uint*       pairs      [[buffer(1)]],  // [rows * used]
    device const uint4*      tiles      [[buffer(2)]],  // [rows * used / BM + experts]
    device const uint*       tile_count [[buffer(3)]],  // [1]
    device const uint4*      w          [[buffer(4)]],  // [experts, 2 * n, k / 32]
    device const bfloat*     scales     [[buffer(5)]],  // [experts, 2 * n, k / 64]
    device const bfloat*     biases     [[buffer(6)]],  // [experts, 2 * n, k / 64]
    device act_t*            h          [[buffer(7)]],  // [rows * used, n]
    constant expert_mm_args& args       [[buffer(8)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4), THREADS = SIMDS * SIMD_WIDTH;
    SHARED act_t xs[BM * TILE_K];
    SHARED act_t ws[TILE_N * TILE_K];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * TILE_N, live = tile[2];
    const uint gate_row = tile[0] * 2 * args.n + col, up_row = gate_row + args.n;
    tile_acc<BM, TILE_N, SIMDS> gate, up;
    gate.clear();
    up.clear();
    for (uint at = 0; at < k; at += TILE_K) {
        const uint g = at / QUANT_GROUP, groups = k / QUANT_GROUP;
        stage_pairs<BM, THREADS>(xs, x + at, pairs + tile[1], args.used, k, live, tid);
        quant_tile_multiply<4, BM, TILE_N, SIMDS>(gate, xs, ws, w + gate_row * (k / 32) + at / 32, k / 32,
                                                  scales + gate_row * groups + g, biases + gate_row * groups + g,
                                                  groups, live, tid);
        quant_tile_multiply<4, BM, TILE_N, SIMDS>(up, xs, ws, w + up_row * (k / 32) + at / 32, k / 32,
                                                  scales + up_row * groups + g, biases + up_row * groups + g, groups,
                                                  live, tid);
    }
    for (uint i = 0; i < gate.capacity(); i++)
        if (gate.valid(i) && gate.row(i) < live)
            h[(tile[1] + gate.row(i)) * args.n + col + gate.col(i)] =
                to_act(silu(gate[i]) * up[i] * (1.0f / float(SWIGLU_SHIFT)));
    outputs_follow();
}

// expert_mm_down: prefill; one threadgroup makes a BM x TILE_N tile of one expert's outputs, each put at its pair.
//   grid: (n / TILE_N, rows * used / BM + experts, 1)
//   const: BM <= 128
//   used: encode_expert_tiles
template <uint BM>
KERNEL(expert_mm_down, 4)(
    device const act_t*      h          [[buffer(0)]],  // [rows * used, k]
    device const uint*       pairs      [[buffer(1)]],  // [rows * used]
    device const uint4*      tiles      [[buffer(2)]],  // [rows * used / BM + experts]
    device const uint*       tile_count [[buffer(3)]],  // [1]
    device const uint4*      w          [[buffer(4)]],  // [experts, n, k / 32]
    device const bfloat*     scales     [[buffer(5)]],  // [experts, n, k / 64]
    device const bfloat*     biases     [[buffer(6)]],  // [experts, n, k / 64]
    device float*            y          [[buffer(7)]],  // [rows * used, n]
    constant expert_mm_args& args       [[buffer(8)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    SHARED act_t xs[BM * TILE_K];
    SHARED act_t ws[TILE_N * TILE_K];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * TILE_N, live = tile[2], w_row = tile[0] * args.n + col;
    tile_acc<BM, TILE_N, SIMDS> acc;
    acc.clear();
    for (uint at = 0; at < k; at += TILE_K) {
        const uint g = w_row * (k / QUANT_GROUP) + at / QUANT_GROUP;
        stage_rows<BM, SIMDS * SIMD_WIDTH>(xs, h + tile[1] * k + at, k, live, tid);
        quant_tile_multiply<4, BM, TILE_N, SIMDS>(acc, xs, ws, w + w_row * (k / 32) + at / 32, k / 32, scales + g,
                                                  biases + g, k / QUANT_GROUP, live, tid);
    }
    for (uint i = 0; i < acc.capacity(); i++)
        if (acc.valid(i) && acc.row(i) < live)
            y[pairs[tile[1] + acc.row(i)] * args.n + col + acc.col(i)] = acc[i] * float(SWIGLU_SHIFT);
    outputs_follow();
}

struct moe_combine_args {
    uint rows;
    uint used;
    uint hidden;
    float shared_scale;  // SWIGLU_SHIFT where the shared output still lacks it, else 1
};

// moe_combine: one threadgroup adds the experts' outputs of 256 columns of one row to the residual stream, in order.
//   grid: ((hidden + 255) / 256, rows, 1)
//   used: encode_moe
KERNEL(moe_combine, 2)(
    device const float*       routed  [[buffer(0)]],  // [rows, used, hidden]
    device const float*       shared  [[buffer(1)]],  // [rows, hidden]
    device const float*       weights [[buffer(2)]],  // [rows, used + 1]
    device const StepState*   step    [[buffer(3)]],  // [1]
    device float*             x       [[buffer(4)]],  // [rows, hidden]
    constant moe_combine_args& args    [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(2) * SIMD_WIDTH;
    inputs_ready();
    const uint row = group.y, last = min(group.x * 256 + 256, args.hidden);
    if (row >= step->rows) return;
    device const float* p = weights + row * (args.used + 1);
    for (uint d = group.x * 256 + tid; d < last; d += THREADS) {
        float sum = 0;
        for (uint j = 0; j < args.used; j++) sum = fma(p[j], routed[(row * args.used + j) * args.hidden + d], sum);
        sum = fma(p[args.used], shared[row * args.hidden + d] * args.shared_scale, sum);
        x[row * args.hidden + d] += sum;
    }
    outputs_follow();
}
