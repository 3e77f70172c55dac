// conv.metal -- causal depthwise convolution over tokens, then SiLU.
//
//   y[r][c] = silu(sum_t w[c][t] * x[r - 3 + t][c]),   t = 0..3; rows before the chunk come from the carried state,
//   which counts as zero at position 0
//
// x is the first `channels` columns of the projection (q | k | v), fp32. The state is the last three rows of x, oldest
// first. Reference: transformers Qwen3_5MoeGatedDeltaNet (causal_conv1d_fn with activation silu).
#include "lily.h"

struct conv_silu_args {
    uint rows;
    uint sessions;
    uint channels;
    uint proj_dim;
};

// Row r of a channel, where rows -3, -2, -1 are the carried ones.
inline float conv_input(device const float* x, device const float* carried, int r, uint proj_dim, uint channels,
                        bool fresh) {
    if (r >= 0) return x[uint(r) * proj_dim];
    return fresh ? 0.0f : carried[uint(r + int(CONV_TAIL)) * channels];
}

// conv_silu: one threadgroup makes CHANNELS channels of CONV_ROWS rows; the last one carries the state on.
//   grid: (channels / CHANNELS, (rows + CONV_ROWS - 1) / CONV_ROWS, 1)
//   bytes: proj = rows * channels * 4
//   bytes: state = 2 * CONV_TAIL * channels * 4
//   used: encode_delta
KERNEL(conv_silu, 2)(
    device const float*      proj  [[buffer(0)]],  // [rows, proj_dim]
    device const bfloat*     w     [[buffer(1)]],  // [channels, CONV_WIDTH]
    device const StepState*  step  [[buffer(2)]],  // [1]
    device float*            state [[buffer(3)]],  // [sessions, GENERATIONS, CONV_TAIL, channels]
    device float*            y     [[buffer(4)]],  // [rows, channels]
    constant conv_silu_args& args  [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(2) * SIMD_WIDTH;
    inputs_ready();
    const uint first = group.y * CONV_ROWS, rows = step->rows;
    if (first >= rows) return;
    const uint last = min(first + CONV_ROWS, rows);
    const bool fresh = step->position == 0;
    device const float* before = state + state_now(step) * CONV_TAIL * args.channels;
    device float* after = state + state_next(step) * CONV_TAIL * args.channels;
    for (uint r = first; r < last; r++)
        for (uint i = tid; i < CHANNELS; i += THREADS) {
            const uint c = group.x * CHANNELS + i;
            float sum = 0;
            for (uint t = 0; t < CONV_WIDTH; t++)
                sum = fma(float(w[c * CONV_WIDTH + t]),
                          conv_input(proj + c, before + c, int(r + t) - int(CONV_TAIL), args.proj_dim, args.channels,
                                     fresh),
                          sum);
            y[r * args.channels + c] = silu(sum);
        }
    if (last == rows)
        for (uint t = 0; t < CONV_TAIL; t++)
            for (uint i = tid; i < CHANNELS; i += THREADS) {
                const uint c = group.x * CHANNELS + i;
                after[t * args.channels + c] =
                    conv_input(proj + c, before + c, int(rows + t) - int(CONV_TAIL), args.proj_dim, args.channels,
                               fresh);
            }
    outputs_follow();
}
