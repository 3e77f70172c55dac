// moe.metal -- mixture of experts: routing, experts, combine.
//
//   p = softmax(router logits);  the `used` largest are chosen (ties: lowest index) and renormalised to sum to 1
//   y = x + sum_j p_j * down_j(silu(gate_j h) * (up_j h)) + sigmoid(shared gate) * down_s(silu(gate_s h) * (up_s h))
//
// Row e < experts of the router's matrix is an expert, row `experts` the shared expert's gate, the rest padding.
// Expert outputs stay apart as [rows, used, hidden]; the owner of a row adds them in order, the shared expert last: no
// float atomics, the same bits in decode and prefill whatever the order of the experts' own work. Prefill orders the
// (row, choice) pairs by expert on the device: histogram per block, scan, scatter, map of tiles for moe_tile.metal.
// Reference: transformers Qwen3_5MoeSparseMoeBlock.
#include "choose.h"
#include "quant.h"

struct moe_route_args {
    uint rows;
    uint n;  // width of a row of logits
    uint experts;
    uint used;
};

// moe_route: one simdgroup chooses one row's experts. weights: the choices' in order, then the shared expert's.
//   grid: (rows, 1, 1)
//   const: E = experts
//   bytes: logits = rows * (experts + 1) * 4
//   used: encode_expert_tiles
template <uint E>
KERNEL(moe_route, 1)(
    device const float*      logits  [[buffer(0)]],  // [rows, n]
    device const StepState*  step    [[buffer(1)]],  // [1]
    device uint*             ids     [[buffer(2)]],  // [rows, used]
    device float*            weights [[buffer(3)]],  // [rows, used + 1]
    constant moe_route_args& args    [[buffer(4)]],
    GRID)
{
    inputs_ready();
    if (group.x >= step->rows) return;
    route_row<E>(logits + group.x * args.n, args.experts, args.used, ids + group.x * args.used,
                 weights + group.x * (args.used + 1), lane);
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
    uint n;  // width of the router's logits
    uint hidden;
    uint inner;
    uint shared_inner;
    uint experts;
    uint used;
};

// expert_mv_gate_up: decode; one threadgroup makes mv_rows(K) values of one chosen expert, the shared one last. Each
// chooses the experts for itself, the first one hands them on as moe_route does.
//   grid: ((larger(inner, shared_inner) + mv_rows(K) - 1) / mv_rows(K), used + 1, 1)
//   const: K = hidden, E = experts
//   bytes: logits = (experts + 1) * 4
//   bytes: w = used * inner * hidden
//   bytes: scales = used * inner * hidden / 16
//   bytes: biases = used * inner * hidden / 16
//   used: encode_expert_row
template <uint K, uint E>
KERNEL(expert_mv_gate_up, 8)(
    device const act_t*      x             [[buffer(0)]],   // [hidden]
    device const float*      logits        [[buffer(1)]],   // [n]
    device const uint4*      w             [[buffer(2)]],   // [experts, 2 * inner, hidden / 32]
    device const bfloat*     scales        [[buffer(3)]],   // [experts, 2 * inner, hidden / 64]
    device const bfloat*     biases        [[buffer(4)]],   // [experts, 2 * inner, hidden / 64]
    device const uint4*      shared_w      [[buffer(5)]],   // [2 * shared_inner, hidden / 32]
    device const bfloat*     shared_scales [[buffer(6)]],   // [2 * shared_inner, hidden / 64]
    device const bfloat*     shared_biases [[buffer(7)]],   // [2 * shared_inner, hidden / 64]
    device act_t*            h             [[buffer(8)]],   // [used * inner + shared_inner]
    device uint*             ids           [[buffer(9)]],   // [used]
    device float*            weights       [[buffer(10)]],  // [used + 1]
    constant expert_mv_args& args          [[buffer(11)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH, ROWS = mv_rows(K), SPLIT = mv_split(K);
    SHARED float part[2 * SIMDS * MV_ROWS];
    SHARED float made[SIMDS * MV_ROWS];
    SHARED uint chosen[MAX_USED];
    SHARED float share[MAX_USED + 1];
    const bool routed = group.y < args.used, hands_on = group.x == 0 && group.y == 0;
    const uint k = K ? K : args.hidden, inner = routed ? args.inner : args.shared_inner, first = group.x * ROWS;
    inputs_ready();
    outputs_follow();
    if (first >= inner) return;
    const auto row_x = mv_input<K ? K : MAX_HIDDEN>(x, k, tid, THREADS);
    if (hands_on && simd == 0)
        route_row<E>(logits, args.experts, args.used, chosen, share, lane);
    else if (routed && simd == 0)  // the choices after its own do not matter
        choose_experts<E>(logits, args.experts, group.y + 1, chosen, share, lane);
    mv_input_ready();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (hands_on)
        for (uint i = tid; i <= args.used; i += THREADS) {
            weights[i] = share[i];
            if (i < args.used) ids[i] = chosen[i];
        }
    const uint row = (routed ? chosen[group.y] * 2 * inner : 0) + first, left = 2 * inner - first;
    device const uint4* own_w = routed ? w : shared_w;
    device const bfloat* own_scales = routed ? scales : shared_scales;
    device const bfloat* own_biases = routed ? biases : shared_biases;
    mv_ahead<4, SPLIT, K, 2> ahead;  // gate and up
    ahead.begin(own_w, own_scales, own_biases, k, row, inner, left, lane, simd);
    mv_finish(ahead, row_x, own_w, own_scales, own_biases, k, row, inner, left, part, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint rows = min(ROWS, inner - first);
    for (uint i = tid; i < rows; i += THREADS) {
        const float gate = mv_row<SPLIT>(part, i), up = mv_row<SPLIT>(part + SIMDS * MV_ROWS, i);
        made[i] = silu(gate) * up * (1.0f / float(SWIGLU_SHIFT));
    }
    store_shared_acts(h + group.y * args.inner + first, made, rows, tid, THREADS);
}

constant constexpr uint DOWN_SPLIT = SIMD_WIDTH == 1 ? 1 : 4;  // simdgroups that share one expert's rows

// One expert's matrix in expert_mv_down, the shared one's last: where a threadgroup's rows begin, and their width.
struct down_rows {
    device const uint4* w;
    device const bfloat* scales;
    device const bfloat* biases;
    uint k;
    uint row;
};

// expert_mv_down: decode; one threadgroup makes MV_ROWS values of every chosen expert's output, and adds them to the
// residual stream as moe_combine does. The choice is that of the launch before, or made again, to have the weights on
// their way while that one runs.
//   grid: ((hidden + MV_ROWS - 1) / MV_ROWS, 1, 1)
//   const: K = inner, KS = shared_inner
//   bytes: logits = 0
//   bytes: w = used * inner * hidden / 2
//   bytes: scales = used * inner * hidden / 32
//   bytes: biases = used * inner * hidden / 32
//   reads: x = hidden * 4
//   used: encode_expert_row
template <uint K, uint KS>
KERNEL(expert_mv_down, 8)(
    device const act_t*      h             [[buffer(0)]],   // [used * inner + shared_inner]
    device const float*      logits        [[buffer(1)]],   // [n]
    device const uint*       ids           [[buffer(2)]],   // [used]
    device const float*      weights       [[buffer(3)]],   // [used + 1]
    device const uint4*      w             [[buffer(4)]],   // [experts, hidden, inner / 32]
    device const bfloat*     scales        [[buffer(5)]],   // [experts, hidden, inner / 64]
    device const bfloat*     biases        [[buffer(6)]],   // [experts, hidden, inner / 64]
    device const uint4*      shared_w      [[buffer(7)]],   // [hidden, shared_inner / 32]
    device const bfloat*     shared_scales [[buffer(8)]],   // [hidden, shared_inner / 64]
    device const bfloat*     shared_biases [[buffer(9)]],   // [hidden, shared_inner / 64]
    device float*            x             [[buffer(10)]],  // [hidden]
    constant expert_mv_args& args          [[buffer(11)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH;
    SHARED float part[(MAX_USED + 1) * DOWN_SPLIT * MV_ROWS];
    SHARED float made[(MAX_USED + 1) * MV_ROWS];
    SHARED float before[MV_ROWS];
    SHARED uint chosen[MAX_USED];
    SHARED float share[MAX_USED + 1];
    const uint first = group.x * MV_ROWS, left = args.hidden - first, rows = min(MV_ROWS, left);
    const uint parts = (args.used + 1) * DOWN_SPLIT, inner = K ? K : args.inner;
    device const act_t* row_h = h;
    if (CHOOSE_AGAIN) {
        if (simd == 0) route_row<0>(logits, args.experts, args.used, chosen, share, lane);
    } else {
        inputs_ready();
        for (uint i = tid; i <= args.used; i += THREADS) {
            share[i] = weights[i];
            if (i < args.used) chosen[i] = ids[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint begin = 0; begin < parts; begin += SIMDS * DOWN_AHEAD) {
        down_rows own[DOWN_AHEAD];
        mv_kept<4, DOWN_SPLIT, (K > 1024 || KS > 1024 ? 0 : larger(K, KS))> ahead[DOWN_AHEAD];
        UNROLL_TILE
        for (uint turn = 0; turn < DOWN_AHEAD; turn++) {
            const uint e = min(begin + turn * SIMDS + simd, parts - 1) / DOWN_SPLIT;
            if (e < args.used)
                own[turn] = {w, scales, biases, inner, chosen[e] * args.hidden + first};
            else
                own[turn] = {shared_w, shared_scales, shared_biases, KS ? KS : args.shared_inner, first};
        }
        UNROLL_TILE
        for (uint turn = 0; turn < DOWN_AHEAD; turn++) {
            const uint p = begin + turn * SIMDS + simd;
            const down_rows o = own[turn];
            if (p < parts) ahead[turn].begin(o.w, o.scales, o.biases, o.k, o.row, MV_ROWS, left, lane, p % DOWN_SPLIT);
        }
        if (begin == 0) {
            if (CHOOSE_AGAIN) inputs_ready();
            outputs_follow();
            row_h = mv_input<(K > 0 && K <= 512 ? 16 * K : 8)>(h, args.used * inner + args.shared_inner, tid, THREADS);
            for (uint i = tid; i < rows; i += THREADS) before[i] = x[first + i];
            mv_input_ready();
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL_TILE
        for (uint turn = 0; turn < DOWN_AHEAD; turn++) {
            const uint p = begin + turn * SIMDS + simd, e = p / DOWN_SPLIT;
            const down_rows o = own[turn];
            if (p < parts)
                mv_finish(ahead[turn], row_h + e * inner, o.w, o.scales, o.biases, o.k, o.row, MV_ROWS, left,
                          part + e * DOWN_SPLIT * MV_ROWS, lane, p % DOWN_SPLIT);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < (args.used + 1) * MV_ROWS; i += THREADS)
        made[i] = mv_row<DOWN_SPLIT>(part + i / MV_ROWS * DOWN_SPLIT * MV_ROWS, i % MV_ROWS) * float(SWIGLU_SHIFT);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < rows; i += THREADS) {
        float sum = 0;
        for (uint j = 0; j <= args.used; j++) sum = fma(share[j], made[j * MV_ROWS + i], sum);
        x[first + i] = before[i] + sum;
    }
}

struct moe_combine_args {
    uint rows;
    uint used;
    uint hidden;
};

// moe_combine: one threadgroup adds COMBINE_COLUMNS columns of one row's expert outputs to the residual stream, in
// order. The shared expert's output still lacks SWIGLU_SHIFT.
//   grid: ((hidden + COMBINE_COLUMNS - 1) / COMBINE_COLUMNS, rows, 1)
//   reads: x = rows * hidden * 4
//   used: encode_expert_tiles
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
    const uint row = group.y, first = group.x * COMBINE_COLUMNS, last = min(first + COMBINE_COLUMNS, args.hidden);
    if (row >= step->rows) return;
    device const float* p = weights + row * (args.used + 1);
    for (uint d = first + tid; d < last; d += THREADS) {
        float sum = 0;
        for (uint j = 0; j < args.used; j++) sum = fma(p[j], routed[(row * args.used + j) * args.hidden + d], sum);
        sum = fma(p[args.used], shared[row * args.hidden + d] * float(SWIGLU_SHIFT), sum);
        x[row * args.hidden + d] += sum;
    }
    outputs_follow();
}
