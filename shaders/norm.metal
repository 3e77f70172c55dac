// norm.metal -- RMS normalisation.
//
//   rms_norm        y = x * rsqrt(mean(x^2) + eps) * w                      over a row of `dim`
//   gated_rms_norm  y = x * rsqrt(mean(x^2) + eps) * w * silu(z)            over each 128-wide delta head
//
// x is fp32, sums are fp32, y is act_t: it feeds a quantised product. w is the checkpoint's bf16 (already 1 + w for
// rms_norm). Reference: transformers Qwen3_5MoeRMSNorm, Qwen3_5MoeRMSNormGated.
#include "norm.h"

struct rms_norm_args {
    uint rows;
    uint dim;
    float eps;
};

// rms_norm: one threadgroup normalises one row; each thread strides over dim.
//   grid: (rows, 1, 1)
//   used: encode_normed, encode_moe, encode_score
KERNEL(rms_norm, 8)(
    device const float*     x    [[buffer(0)]],  // [rows, dim]
    device const bfloat*    w    [[buffer(1)]],  // [dim]
    device const StepState* step [[buffer(2)]],  // [1]
    device act_t*           y    [[buffer(3)]],  // [rows, dim]
    constant rms_norm_args& args [[buffer(4)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    inputs_ready();
    if (group.x >= step->rows) return;
    normalise_row<SIMDS>(x + group.x * args.dim, w, y + group.x * args.dim, args.dim, args.eps, part, tid, lane, simd);
    outputs_follow();
}

// rms_norm_last: one threadgroup normalises the last of the step's rows, for the head.
//   grid: (1, 1, 1)
//   bytes: x = dim * 4
//   used: encode_head
KERNEL(rms_norm_last, 8)(
    device const float*     x    [[buffer(0)]],  // [rows, dim]
    device const bfloat*    w    [[buffer(1)]],  // [dim]
    device const StepState* step [[buffer(2)]],  // [1]
    device act_t*           y    [[buffer(3)]],  // [dim]
    constant rms_norm_args& args [[buffer(4)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    inputs_ready();
    const uint row = step->rows - 1;
    normalise_row<SIMDS>(x + row * args.dim, w, y, args.dim, args.eps, part, tid, lane, simd);
    outputs_follow();
}

struct gated_rms_norm_args {
    uint rows;
    uint value_heads;
    uint proj_dim;  // width of a row of proj
    uint gate;      // column of proj where z begins
    float eps;
};

constexpr uint gated_heads() { return simdgroups(4); }  // of a threadgroup

// gated_rms_norm: each simdgroup normalises one delta head of a row and multiplies it by silu(z).
//   grid: ((value_heads + gated_heads() - 1) / gated_heads(), rows, 1)
//   bytes: proj = rows * value_heads * DELTA_DIM * 4
//   used: encode_delta_rows
KERNEL(gated_rms_norm, 4)(
    device const float*           x    [[buffer(0)]],  // [rows, value_heads, DELTA_DIM]
    device const float*           proj [[buffer(1)]],  // [rows, proj_dim]
    device const bfloat*          w    [[buffer(2)]],  // [DELTA_DIM]
    device const StepState*       step [[buffer(3)]],  // [1]
    device act_t*                 y    [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]
    constant gated_rms_norm_args& args [[buffer(5)]],
    GRID)
{
    inputs_ready();
    const uint head = group.x * gated_heads() + simd;
    if (group.y >= step->rows || head >= args.value_heads) return;
    const uint at = (group.y * args.value_heads + head) * DELTA_DIM;
    device const float* z = proj + group.y * args.proj_dim + args.gate + head * DELTA_DIM;
    const float sum = simd_sum(lane_squares(x + at, DELTA_DIM, lane, SIMD_WIDTH));
    const float scale = precise::rsqrt(sum / float(DELTA_DIM) + args.eps);
    constexpr uint OWN = DELTA_DIM / SIMD_WIDTH;
    float gated[OWN];
    for (uint i = 0; i < OWN; i++) {
        const uint d = i * SIMD_WIDTH + lane;
        gated[i] = x[at + d] * scale * float(w[d]) * silu(z[d]);
    }
    store_acts(y + at + lane, SIMD_WIDTH, gated, 1, OWN);
    outputs_follow();
}
