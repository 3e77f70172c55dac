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

constant constexpr uint CHANNELS = SIMD_WIDTH == 1 ? DELTA_DIM : 64;  // of one threadgroup

// conv_silu: one threadgroup makes CHANNELS channels of CONV_ROWS rows; the last one carries the state on.
//   grid: (channels / CHANNELS, (rows + CONV_ROWS - 1) / CONV_ROWS, 1)
//   bytes: proj = rows * channels * 4
//   bytes: state = CONV_TAIL * channels * 4
//   reads: state = CONV_TAIL * channels * 4
//   used: encode_delta_rows
KERNEL(conv_silu, 2)(
    device const float*      proj  [[buffer(0)]],  // [rows, proj_dim]
    device const bfloat*     w     [[buffer(1)]],  // [channels, CONV_WIDTH]
    device const StepState*  step  [[buffer(2)]],  // [1]
    device float*            state [[buffer(3)]],  // [sessions, GENERATIONS, CONV_TAIL, channels]
    device float*            y     [[buffer(4)]],  // [rows, channels]
    constant conv_silu_args& args  [[buffer(5)]],
    GRID)
{
    constexpr uint THREADS = simdgroups(2) * SIMD_WIDTH, OWN = CHANNELS / THREADS;
    inputs_ready();
    const uint first = group.y * CONV_ROWS, rows = step->rows;
    if (first >= rows) return;
    const uint last = min(first + CONV_ROWS, rows), own = group.x * CHANNELS + tid;
    const bool fresh = step->position == 0;
    device const float* before = state + state_now(step) * CONV_TAIL * args.channels;
    device float* after = state + state_next(step) * CONV_TAIL * args.channels;
    float taps[CONV_WIDTH][OWN];
    for (uint i = 0; i < OWN; i++)
        for (uint t = 0; t < CONV_WIDTH; t++) taps[t][i] = float(w[(own + i * THREADS) * CONV_WIDTH + t]);
    for (uint r = first; r < last; r++) {
        float sum[OWN];
        for (uint i = 0; i < OWN; i++) sum[i] = 0;
        for (uint t = 0; t < CONV_WIDTH; t++) {
            const bool carried = r + t < CONV_TAIL;
            if (carried && fresh) continue;
            device const float* x =
                own + (carried ? before + (r + t) * args.channels : proj + (r + t - CONV_TAIL) * args.proj_dim);
            for (uint i = 0; i < OWN; i++) sum[i] = fma(taps[t][i], x[i * THREADS], sum[i]);
        }
        device float* out = y + r * args.channels + own;
        for (uint i = 0; i < OWN; i++) out[i * THREADS] = silu(sum[i]);
    }
    if (last == rows)
        for (uint t = 0; t < CONV_TAIL; t++)
            for (uint i = tid; i < CHANNELS; i += THREADS) {
                const uint c = group.x * CHANNELS + i;
                const bool carried = rows + t < CONV_TAIL;
                const float old = fresh ? 0.0f : before[min(rows + t, CONV_TAIL - 1) * args.channels + c];
                after[t * args.channels + c] = carried ? old : proj[(rows + t - CONV_TAIL) * args.proj_dim + c];
            }
    outputs_follow();
}
