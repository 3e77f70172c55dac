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
    tile_clear(gate, lane, simd);
    tile_clear(up, lane, simd);
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
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(gate); i++)
        if (tile_valid(gate, i) && tile_row(gate, i) < live)
            h[(tile[1] + tile_row(gate, i)) * args.n + col + tile_col(gate, i)] =
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
    tile_clear(acc, lane, simd);
    for (uint at = 0; at < k; at += TILE_K) {
        const uint g = w_row * (k / QUANT_GROUP) + at / QUANT_GROUP;
        stage_rows<BM, SIMDS * SIMD_WIDTH>(xs, h + tile[1] * k + at, k, live, tid);
        quant_tile_multiply<4, BM, TILE_N, SIMDS>(acc, xs, ws, w + w_row * (k / 32) + at / 32, k / 32, scales + g,
                                                  biases + g, k / QUANT_GROUP, live, tid);
    }
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i) && tile_row(acc, i) < live)
            y[pairs[tile[1] + tile_row(acc, i)] * args.n + col + tile_col(acc, i)] = acc[i] * float(SWIGLU_SHIFT);
    outputs_follow();
}
