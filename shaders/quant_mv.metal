// quant_mv.metal -- quantised matrix times single rows (decode; the router at any number of rows).
//
//   qmv      y[r] = W x[r]           qmv_add  y[r] += W x[r]   (y is the residual stream)
//
// x is act_t, W is 4- or 8-bit with groups of 64, n is a multiple of 64, sums are fp32 and weights are never rounded
// (quant.h). A few lanes share a weight row; the simdgroups of a threadgroup split k so that one wave keeps every load
// in flight.
#include "quant.h"

struct qmv_args {
    uint rows;
    uint n;
    uint k;
};

// The threadgroup's partial sums; row i of the group is then mv_row(part, i).
template <uint BITS, uint K, uint SIMDS>
inline void qmv_partials(device const act_t* x, device const uint4* w, device const bfloat* scales,
                         device const bfloat* biases, uint k, threadgroup float* part, uint first, uint lane,
                         uint simd) {
    constexpr uint SPLIT = mv_split(K);
    const uint row = first + simd / SPLIT * MV_ROWS, g = row * (k / QUANT_GROUP);
    quant_acc<BITS> acc[ROWS_PER_LANE];
    for (uint r = 0; r < ROWS_PER_LANE; r++) acc[r].clear();
    mv_accumulate<BITS, SPLIT>(acc, x, w + row * (k * BITS / 128), scales + g, biases + g, k, lane, simd % SPLIT);
    mv_reduce<BITS>(acc, part + simd * MV_ROWS, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// qmv: one threadgroup makes mv_rows(K) values of one row.
//   grid: (n / mv_rows(K), rows, 1)
//   const: BITS <= 8, K = k
//   used: encode_product, encode_moe
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
    SHARED float part[SIMDS * MV_ROWS];
    const uint k = K ? K : args.k;
    inputs_ready();
    if (group.y >= step->rows) return;
    qmv_partials<BITS, K, SIMDS>(x + group.y * k, w, scales, biases, k, part, group.x * ROWS, lane, simd);
    device float* out = y + group.y * args.n + group.x * ROWS;
    for (uint i = tid; i < ROWS; i += SIMDS * SIMD_WIDTH) out[i] = mv_row<mv_split(K)>(part, i);
    outputs_follow();
}

// qmv_add: as qmv, added to y.
//   grid: (n / mv_rows(K), rows, 1)
//   const: BITS <= 8, K = k
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
    constexpr uint SIMDS = simdgroups(8), ROWS = mv_rows(K);
    SHARED float part[SIMDS * MV_ROWS];
    const uint k = K ? K : args.k;
    inputs_ready();
    if (group.y >= step->rows) return;
    qmv_partials<BITS, K, SIMDS>(x + group.y * k, w, scales, biases, k, part, group.x * ROWS, lane, simd);
    device float* out = y + group.y * args.n + group.x * ROWS;
    for (uint i = tid; i < ROWS; i += SIMDS * SIMD_WIDTH) out[i] += mv_row<mv_split(K)>(part, i);
    outputs_follow();
}
