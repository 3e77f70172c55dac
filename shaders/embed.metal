// embed.metal -- token embedding.
//
//   x[r] = dequantise(w[tokens[r]])    fp32, the residual stream starts here
//
// Reference: transformers modeling_qwen3_5_moe.py, Qwen3_5MoeTextModel.forward (embed_tokens).
#include "quant.h"

struct embed_gather_args {
    uint rows;
    uint hidden;
    uint vocab;
};

// embed_gather: one threadgroup expands one token's row of the 4-bit table.
//   grid: (rows, 1, 1)
//   bytes: w = rows * hidden / 2
//   bytes: scales = rows * hidden / 32
//   bytes: biases = rows * hidden / 32
//   used: encode_embed
KERNEL(embed_gather, 2)(
    device const uint*          tokens [[buffer(0)]],  // [rows]
    device const StepState*     step   [[buffer(1)]],  // [1]
    device const uint4*         w      [[buffer(2)]],  // [vocab, hidden / 32]
    device const bfloat*        scales [[buffer(3)]],  // [vocab, hidden / 64]
    device const bfloat*        biases [[buffer(4)]],  // [vocab, hidden / 64]
    device float*               x      [[buffer(5)]],  // [rows, hidden]
    constant embed_gather_args& args   [[buffer(6)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(2);
    inputs_ready();
    if (group.x >= step->rows) return;
    const uint token = min(tokens[group.x], args.vocab - 1);
    for (uint i = tid; i < args.hidden / 32; i += SIMDS * SIMD_WIDTH) {
        const uint4 q = w[token * (args.hidden / 32) + i];
        const uint g = token * (args.hidden / QUANT_GROUP) + i / 2;
        const float s = float(scales[g]), b = float(biases[g]);
        for (uint c = 0; c < 4; c++)
            for (uint j = 0; j < 8; j++)
                x[group.x * args.hidden + i * 32 + c * 8 + j] = fma(s, quant_at<4>(q[c], j), b);
    }
    outputs_follow();
}
