// moe_tile.metal -- the experts of a chunk of rows (prefill), in matrix tiles.
//
//   h[i] = silu(gate_e x) * (up_e x) / SWIGLU_SHIFT,   y[pair] = SWIGLU_SHIFT * down_e h[i]
//
// where place i holds a (row, choice) pair of expert e: pairs[i] = row * used + choice. moe.metal has put the pairs in
// order of their experts and made the map of tiles {expert, first place, pairs, 0}; a threadgroup takes one tile, and
// those past the map's end return at once, so experts without rows cost nothing.
#include "tile.h"

struct expert_mm_args {
    uint rows;
    uint used;
    uint experts;
    uint n;  // columns of the result
    uint k;
};

// expert_mm_gate_up: prefill; one threadgroup makes the same BM x BN tile of gate and up of one expert's pairs.
//   grid: ((n + tile_n(BM) - 1) / tile_n(BM), rows * used / BM + experts, 1)
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
    constexpr uint SIMDS = simdgroups(4), BN = tile_n(BM);
    SHARED act_t xs[tile_x_room<BM>()];
    SHARED act_t ws[tile_w_room()];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * BN, columns = min(BN, args.n - col), live = tile[2];
    const uint gate_row = tile[0] * 2 * args.n + col, up_row = gate_row + args.n;
    tile_acc<BM, BN, SIMDS> gate, up;
    tile_clear(gate, lane, simd);
    tile_clear(up, lane, simd);
    quant_multiply_pair<4, BM, BN, SIMDS>(gate, up, x, pair_rows{pairs + tile[1], args.used},
                                          matrix_from<4>(w, scales, biases, gate_row, k),
                                          matrix_from<4>(w, scales, biases, up_row, k), k, live, columns, xs, ws, tid);
    tile_swiglu(gate, up);
    tile_store_acts(gate, h + tile[1] * args.n + col, args.n, live);
    outputs_follow();
}

// expert_mm_down: prefill; one threadgroup makes a BM x BN tile of one expert's outputs, each put at its pair.
//   grid: ((n + short_tile_n(BM) - 1) / short_tile_n(BM), rows * used / BM + experts, 1)
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
    constexpr uint SIMDS = simdgroups(4), BN = short_tile_n(BM);
    SHARED act_t xs[tile_x_room<BM>()];
    SHARED act_t ws[tile_w_room()];
    inputs_ready();
    if (group.y >= tile_count[0]) return;
    const uint4 tile = tiles[group.y];
    const uint k = args.k, col = group.x * BN, columns = min(BN, args.n - col), live = tile[2];
    const uint w_row = tile[0] * args.n + col;
    tile_acc<BM, BN, SIMDS> acc;
    tile_clear(acc, lane, simd);
    quant_multiply<4, BM, BN, SIMDS>(acc, h + tile[1] * k, own_rows(), matrix_from<4>(w, scales, biases, w_row, k), k,
                                     live, columns, xs, ws, tid);
    tile_store(acc, y + col, pair_rows{pairs + tile[1], 1}, args.n, live, float(SWIGLU_SHIFT));
    outputs_follow();
}
