// quant_mm.metal -- quantised matrix times the rows of a chunk (prefill), in matrix tiles.
//
//   qmm         y[r] = W x[r]
//   qmm_add     y[r] += W x[r]                                       (y is the residual stream)
//   qmm_swiglu  y[r] = silu(Wg x[r]) * (Wu x[r]) / SWIGLU_SHIFT      (W holds Wg, then Wu)
//
// One tile of weights at a time is rounded to act_t, on chip; expanded weights never reach memory. Sums are fp32
// (tile.h has the contract). n is a multiple of 64. The slots hold the step's rows from `first` on.
#include "tile.h"

struct qmm_args {
    uint rows;
    uint n;
    uint k;
    uint first;
};

// qmm: one threadgroup makes BM rows of BN columns.
//   grid: ((n + tile_n(BM) - 1) / tile_n(BM), (rows + BM - 1) / BM, 1)
//   const: BITS <= 8, BM <= 128
//   used: encode_product, encode_score
template <uint BITS, uint BM>
KERNEL(qmm, 4)(
    device const act_t*     x      [[buffer(0)]],  // [rows, k]
    device const StepState* step   [[buffer(1)]],  // [1]
    device const uint4*     w      [[buffer(2)]],  // [n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [n, k / 64]
    device float*           y      [[buffer(5)]],  // [rows, n]
    constant qmm_args&      args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4), BN = tile_n(BM);
    SHARED act_t xs[tile_x_room<BM>()];
    SHARED act_t ws[tile_w_room()];
    inputs_ready();
    const uint row = group.y * BM, col = group.x * BN, k = args.k;
    if (row + args.first >= step->rows) return;
    const uint live = min(BM, min(args.rows, step->rows - args.first) - row);
    tile_acc<BM, BN, SIMDS> acc;
    tile_clear(acc, lane, simd);
    quant_multiply<BITS, BM, BN, SIMDS>(acc, x + row * k, own_rows(), matrix_from<BITS>(w, scales, biases, col, k), k,
                                        live, min(BN, args.n - col), xs, ws, tid);
    tile_store(acc, y + row * args.n + col, own_rows(), args.n, live, 1.0f);
    outputs_follow();
}

// qmm_add: as qmm, added to y.
//   grid: ((n + tile_n(BM) - 1) / tile_n(BM), (rows + BM - 1) / BM, 1)
//   const: BITS <= 8, BM <= 128
//   reads: y = rows * n * 4
//   used: encode_product_add
template <uint BITS, uint BM>
KERNEL(qmm_add, 4)(
    device const act_t*     x      [[buffer(0)]],  // [rows, k]
    device const StepState* step   [[buffer(1)]],  // [1]
    device const uint4*     w      [[buffer(2)]],  // [n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [n, k / 64]
    device float*           y      [[buffer(5)]],  // [rows, n]
    constant qmm_args&      args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4), BN = tile_n(BM);
    SHARED act_t xs[tile_x_room<BM>()];
    SHARED act_t ws[tile_w_room()];
    inputs_ready();
    const uint row = group.y * BM, col = group.x * BN, k = args.k;
    if (row + args.first >= step->rows) return;
    const uint live = min(BM, min(args.rows, step->rows - args.first) - row);
    tile_acc<BM, BN, SIMDS> acc;
    tile_clear(acc, lane, simd);
    quant_multiply<BITS, BM, BN, SIMDS>(acc, x + row * k, own_rows(), matrix_from<BITS>(w, scales, biases, col, k), k,
                                        live, min(BN, args.n - col), xs, ws, tid);
    tile_add(acc, y + row * args.n + col, args.n, live);
    outputs_follow();
}

// qmm_swiglu: one threadgroup makes the same BM x BN tile of gate and of up; n counts the columns of y.
//   grid: ((n + tile_n(BM) - 1) / tile_n(BM), (rows + BM - 1) / BM, 1)
//   const: BITS <= 8, BM <= 128
//   used: encode_expert_tiles
template <uint BITS, uint BM>
KERNEL(qmm_swiglu, 4)(
    device const act_t*     x      [[buffer(0)]],  // [rows, k]
    device const StepState* step   [[buffer(1)]],  // [1]
    device const uint4*     w      [[buffer(2)]],  // [2 * n, k * BITS / 128]
    device const bfloat*    scales [[buffer(3)]],  // [2 * n, k / 64]
    device const bfloat*    biases [[buffer(4)]],  // [2 * n, k / 64]
    device act_t*           y      [[buffer(5)]],  // [rows, n]
    constant qmm_args&      args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4), BN = tile_n(BM);
    SHARED act_t xs[tile_x_room<BM>()];
    SHARED act_t ws[tile_w_room()];
    inputs_ready();
    const uint row = group.y * BM, col = group.x * BN, k = args.k, up = col + args.n;
    if (row + args.first >= step->rows) return;
    const uint live = min(BM, min(args.rows, step->rows - args.first) - row);
    tile_acc<BM, BN, SIMDS> gate, value;
    tile_clear(gate, lane, simd);
    tile_clear(value, lane, simd);
    quant_multiply_pair<BITS, BM, BN, SIMDS>(gate, value, x + row * k, own_rows(),
                                             matrix_from<BITS>(w, scales, biases, col, k),
                                             matrix_from<BITS>(w, scales, biases, up, k), k, live,
                                             min(BN, args.n - col), xs, ws, tid);
    tile_swiglu(gate, value);
    tile_store_acts(gate, y + row * args.n + col, args.n, live);
    outputs_follow();
}
