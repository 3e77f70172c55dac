// quant_mv.metal -- quantised matrix times single rows (decode; the router at any number of rows).
//
//   qmv       y[r] = W x[r]            qmv_add  y[r] += W x[r]   (y is the residual stream)
//   norm_qmv  y = W h,  h = rms_norm(x)
//
// x is act_t, W is 4- or 8-bit with groups of 64, n is a multiple of 64, sums are fp32 and weights are never rounded
// (quant.h). A few lanes share a weight row; the simdgroups of a threadgroup split k so that one wave keeps every load
// in flight.
#include "norm.h"
#include "quant.h"

struct qmv_args {
    uint rows;
    uint n;
    uint k;
};

// qmv: one threadgroup makes mv_rows(K) values of MV_X rows.
//   grid: ((n + mv_rows(K) - 1) / mv_rows(K), (rows + MV_X - 1) / MV_X, 1)
//   const: BITS <= 8, K = k
//   used: encode_moe
template <uint BITS, uint K>
KERNEL(qmv, 8)(
    device const act_t*     x      [[buffer(0)]],  // [rows, k]
    device const StepState* step   [[buffer(1)]],  // [1]
    device const uint4*     w      [[buffer(2)]],  // [n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [n, k / 64]
    device float*           y      [[buffer(5)]],  // [rows, n]
    constant qmv_args&      args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), ROWS = mv_rows(K);
    SHARED float part[MV_X * SIMDS * MV_ROWS];
    const uint k = K ? K : args.k, first = group.x * ROWS, left = args.n - first, row = group.y * MV_X;
    inputs_ready();
    if (row >= step->rows) return;
    const uint count = min(MV_X, step->rows - row);
    mv_many<BITS, mv_split(K)>(x + row * k, count, w, scales, biases, k, first, left, part, lane, simd);
    outputs_follow();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < count; r++)
        for (uint i = tid; i < min(ROWS, left); i += SIMDS * SIMD_WIDTH)
            y[(row + r) * args.n + first + i] = mv_row<mv_split(K)>(part + r * SIMDS * MV_ROWS, i);
}

// qmv_add: as qmv, added to y.
//   grid: ((n + mv_rows(K) - 1) / mv_rows(K), rows, 1)
//   const: BITS <= 8, K = k
//   reads: y = rows * n * 4
//   used: encode_product_add
template <uint BITS, uint K>
KERNEL(qmv_add, 8)(
    device const act_t*     x      [[buffer(0)]],  // [rows, k]
    device const StepState* step   [[buffer(1)]],  // [1]
    device const uint4*     w      [[buffer(2)]],  // [n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [n, k / 64]
    device float*           y      [[buffer(5)]],  // [rows, n]
    constant qmv_args&      args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH, ROWS = mv_rows(K);
    SHARED float part[SIMDS * MV_ROWS];
    SHARED float before[SIMDS * MV_ROWS];
    const uint k = K ? K : args.k, first = group.x * ROWS, left = args.n - first;
    mv_ahead<BITS, mv_split(K), K> ahead;
    ahead.begin(w, scales, biases, k, first, mv_rows(K), left, lane, simd);
    inputs_ready();
    outputs_follow();
    if (group.y >= step->rows) return;
    const auto row = mv_input<K && K < MAX_HIDDEN ? K : MAX_HIDDEN>(x + group.y * k, k, tid, THREADS);
    device float* out = y + group.y * args.n + first;
    for (uint i = tid; i < min(ROWS, left); i += THREADS) before[i] = out[i];  // on its way as early as x
    mv_input_ready();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mv_finish(ahead, row, w, scales, biases, k, first, mv_rows(K), left, part, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < min(ROWS, left); i += THREADS) out[i] = before[i] + mv_row<mv_split(K)>(part, i);
}

struct norm_qmv_args {
    uint n;
    uint k;
    float eps;
};

// norm_qmv: decode; rms_norm, then qmv. Every threadgroup normalises the row for itself, the first one hands it on.
//   grid: ((n + mv_sets(BITS) * mv_rows(K) - 1) / (mv_sets(BITS) * mv_rows(K)), 1, 1)
//   const: BITS <= 8, K = k
//   used: encode_normed
template <uint BITS, uint K>
KERNEL(norm_qmv, 8)(
    device const float*     x      [[buffer(0)]],  // [k]
    device const bfloat*    norm   [[buffer(1)]],  // [k]
    device const uint4*     w      [[buffer(2)]],  // [n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [n, k / 64]
    device act_t*           h      [[buffer(5)]],  // [k]
    device float*           y      [[buffer(6)]],  // [n]
    constant norm_qmv_args& args   [[buffer(7)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8), THREADS = SIMDS * SIMD_WIDTH;
    constexpr uint SETS = mv_sets(BITS), ROWS = SETS * mv_rows(K);
    SHARED act_t row[K ? K : MAX_HIDDEN];
    SHARED float part[MV_SETS * SIMDS * MV_ROWS];
    const uint k = K ? K : args.k, first = group.x * ROWS, left = args.n - first;
    mv_ahead<BITS, mv_split(K), K, SETS> ahead;
    ahead.begin(w, scales, biases, k, first, mv_rows(K), left, lane, simd);
    norm_ahead<SIMDS, K> normed;
    normed.begin(norm, tid);
    inputs_ready();
    outputs_follow();
    normed.finish(x, norm, row, k, args.eps, part, tid, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group.x == 0)
        for (uint i = tid; i < k; i += THREADS) h[i] = row[i];
    mv_finish(ahead, row, w, scales, biases, k, first, mv_rows(K), left, part, lane, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < min(ROWS, left); i += THREADS) y[first + i] = mv_row<mv_split(K)>(part, i);
}
