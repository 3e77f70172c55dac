// delta.metal -- the gated delta rule.
//
// For each value head (key head h / (value_heads / key_heads)), token by token, with the state S[value][key]:
//     S = g S;   S += beta (v - S k) k^T;   y = S q
//     q = l2norm(q) / sqrt(DELTA_DIM),  k = l2norm(k),  l2norm(x) = x * rsqrt(sum(x^2) + 1e-6)
//     g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b);  S counts as zero at position 0
// Everything is fp32. A lane keeps DELTA_DIM / SIMD_WIDTH keys of a few value rows in registers.
// Reference: transformers torch_recurrent_gated_delta_rule; Yang et al., Gated Delta Networks (2024), equation 10.
#include "delta_rows.h"

// Scales a q or k head to length 1, for one simdgroup; x is device or threadgroup memory.
template <class X> inline void to_unit_length(X x, float factor, uint lane) {
    const float scale = precise::rsqrt(simd_sum(lane_squares(x, DELTA_DIM, lane, SIMD_WIDTH)) + 1e-6f) * factor;
    for (uint i = lane; i < DELTA_DIM; i += SIMD_WIDTH) x[i] *= scale;
}

// {g, beta} of a head.
inline float2 delta_gates(float a, float b, float a_log, float dt_bias) {
    const float v = a + dt_bias;
    const float softplus = max(v, 0.0f) + precise::log(1.0f + precise::exp(-abs(v)));
    return float2(precise::exp(-precise::exp(a_log) * softplus), sigmoid(b));
}

struct delta_prepare_args {
    uint rows;
    uint key_heads;
    uint value_heads;
    uint proj_dim;
    uint a;  // column of proj where a begins; b follows it
};

constexpr uint prepared_heads() { return simdgroups(4); }  // of a threadgroup

// delta_prepare: each simdgroup normalises one q or k head of a row in place; one more makes the row's gates.
//   grid: ((2 * key_heads + prepared_heads()) / prepared_heads(), rows, 1)
//   bytes: qkv = 2 * rows * key_heads * DELTA_DIM * 4
//   reads: qkv = 2 * rows * key_heads * DELTA_DIM * 4
//   bytes: proj = 2 * rows * value_heads * 4
//   used: encode_delta_rows
KERNEL(delta_prepare, 4)(
    device const float*          proj    [[buffer(0)]],  // [rows, proj_dim]
    device const float*          a_log   [[buffer(1)]],  // [value_heads]
    device const bfloat*         dt_bias [[buffer(2)]],  // [value_heads]
    device const StepState*      step    [[buffer(3)]],  // [1]
    device float*                qkv     [[buffer(4)]],  // [rows, 2 * key_heads + value_heads, DELTA_DIM]
    device float*                gates   [[buffer(5)]],  // [rows, value_heads, 2]
    constant delta_prepare_args& args    [[buffer(6)]],
    GRID)
{
    inputs_ready();
    const uint row = group.y, head = group.x * prepared_heads() + simd;
    if (row >= step->rows || head > 2 * args.key_heads) return;
    if (head < 2 * args.key_heads) {
        device float* x = qkv + (row * (2 * args.key_heads + args.value_heads) + head) * DELTA_DIM;
        to_unit_length(x, head < args.key_heads ? precise::rsqrt(float(DELTA_DIM)) : 1.0f, lane);
        return;
    }
    device const float* a = proj + row * args.proj_dim + args.a;
    for (uint h = lane; h < args.value_heads; h += SIMD_WIDTH) {
        const float2 gate = delta_gates(a[h], a[args.value_heads + h], a_log[h], float(dt_bias[h]));
        gates[(row * args.value_heads + h) * 2] = gate[0];
        gates[(row * args.value_heads + h) * 2 + 1] = gate[1];
    }
    outputs_follow();
}

struct delta_args {
    uint rows;
    uint sessions;
    uint key_heads;
    uint value_heads;
};

// delta_scan: the step's rows one after the other, the state in registers.
//   grid: (delta_groups(), value_heads, 1)
//   bytes: state = value_heads * DELTA_DIM * DELTA_DIM * 4
//   reads: state = value_heads * DELTA_DIM * DELTA_DIM * 4
//   used: encode_delta_rows
KERNEL(delta_scan, 4)(
    device const float*     qkv   [[buffer(0)]],  // [rows, 2 * key_heads + value_heads, DELTA_DIM]
    device const float*     gates [[buffer(1)]],  // [rows, value_heads, 2]
    device const StepState* step  [[buffer(2)]],  // [1]
    device float*           state [[buffer(3)]],  // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
    device float*           y     [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]
    constant delta_args&    args  [[buffer(5)]],
    GRID)
{
    const uint head = group.y, first = group.x * delta_simds() * DELTA_ROWS, row = first + simd * DELTA_ROWS;
    const uint key_head = head / (args.value_heads / args.key_heads);
    const delta_stream from = {qkv + key_head * DELTA_DIM,
                               qkv + (args.key_heads + key_head) * DELTA_DIM,
                               qkv + (2 * args.key_heads + head) * DELTA_DIM + first,
                               gates + head * 2,
                               y + head * DELTA_DIM + first,
                               (2 * args.key_heads + args.value_heads) * DELTA_DIM,
                               args.value_heads * 2,
                               args.value_heads * DELTA_DIM};
    inputs_ready();
    delta_rows<DELTA_ROWS> s;
    s.load(state + ((state_now(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, step->position == 0,
           lane);
    delta_steps<DELTA_ROWS>(s, from, step->rows, tid, lane, simd);
    s.store(state + ((state_next(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, lane);
    outputs_follow();
}

struct delta_mix_args {
    uint sessions;
    uint key_heads;
    uint value_heads;
    uint channels;  // (2 * key_heads + value_heads) * DELTA_DIM
    uint proj_dim;
    uint z;  // column of proj where the gate of the output begins
    uint a;  // column of proj where a begins; b follows it
    float eps;
};

// One head's channels of the convolution of conv_silu, for one token; `before` and `after` are the carried rows.
inline void convolve_head(device const float* now, device const bfloat* w, device const float* before,
                          device float* after, uint channels, bool fresh, bool carries, threadgroup float* y, uint tid,
                          uint threads) {
    for (uint i = tid; i < DELTA_DIM; i += threads) {
        float x[CONV_WIDTH];
        for (uint t = 0; t < CONV_TAIL; t++) x[t] = fresh ? 0.0f : before[t * channels + i];
        x[CONV_TAIL] = now[i];
        float sum = 0;
        for (uint t = 0; t < CONV_WIDTH; t++) sum = fma(float(w[i * CONV_WIDTH + t]), x[t], sum);
        y[i] = sum;
        if (carries)
            for (uint t = 0; t < CONV_TAIL; t++) after[t * channels + i] = x[t + 1];
    }
    for (uint i = tid; i < DELTA_DIM; i += threads) y[i] = silu(y[i]);
}

// Where a head's channels begin: of its query, its key or its value.
inline uint first_channel(uint part, uint key_heads, uint key_head, uint head) {
    return (part == 2 ? 2 * key_heads + head : part * key_heads + key_head) * DELTA_DIM;
}

// delta_mix: decode; one threadgroup takes one value head from the projection to the output projection's input:
// conv_silu, delta_prepare, delta_scan of one row and gated_rms_norm, with nothing but the states in memory.
//   grid: (value_heads, 1, 1)
//   bytes: proj = (channels + value_heads * (DELTA_DIM + 2)) * 4
//   bytes: conv = CONV_TAIL * channels * 4
//   reads: conv = CONV_TAIL * channels * 4
//   bytes: state = value_heads * DELTA_DIM * DELTA_DIM * 4
//   reads: state = value_heads * DELTA_DIM * DELTA_DIM * 4
//   used: encode_delta
KERNEL(delta_mix, 16)(
    device const float*      proj    [[buffer(0)]],  // [proj_dim]
    device const bfloat*     conv_w  [[buffer(1)]],  // [channels, CONV_WIDTH]
    device const float*      a_log   [[buffer(2)]],  // [value_heads]
    device const bfloat*     dt_bias [[buffer(3)]],  // [value_heads]
    device const bfloat*     norm    [[buffer(4)]],  // [DELTA_DIM]
    device const StepState*  step    [[buffer(5)]],  // [1]
    device float*            conv    [[buffer(6)]],  // [sessions, GENERATIONS, CONV_TAIL, channels]
    device float*            state   [[buffer(7)]],  // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
    device act_t*            y       [[buffer(8)]],  // [value_heads, DELTA_DIM]
    constant delta_mix_args& args    [[buffer(9)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(16), THREADS = SIMDS * SIMD_WIDTH;
    constexpr uint OWN = DELTA_DIM / SIMDS, AT_ONCE = OWN < 8 ? OWN : 8;
    constexpr uint SIDES = larger(THREADS / DELTA_DIM, 1), SIDE = THREADS / SIDES;
    SHARED float qkv[3 * DELTA_DIM];
    SHARED float mixed[DELTA_DIM];
    SHARED float output_gate[DELTA_DIM];
    SHARED float gates[2];
    const uint head = group.x, sharing = args.value_heads / args.key_heads, key_head = head / sharing;
    // Only proj is of the launch before; the states take longest to come.
    const bool fresh = step->position == 0;
    device float* now = state + (state_now(step) * args.value_heads + head) * DELTA_DIM * DELTA_DIM;
    device float* next = state + (state_next(step) * args.value_heads + head) * DELTA_DIM * DELTA_DIM;
    device const float* conv_now = conv + state_now(step) * CONV_TAIL * args.channels;
    device float* conv_next = conv + state_next(step) * CONV_TAIL * args.channels;
    delta_rows<AT_ONCE> s;
    s.load(now + simd * OWN * DELTA_DIM, fresh, lane);
    for (uint part = tid / SIDE; part < 3; part += SIDES) {
        const uint at = first_channel(part, args.key_heads, key_head, head);
        fetch_soon(conv_w + at * CONV_WIDTH, DELTA_DIM * CONV_WIDTH, tid % SIDE);
        for (uint t = 0; t < CONV_TAIL; t++) fetch_soon(conv_now + t * args.channels + at, DELTA_DIM, tid % SIDE);
    }
    inputs_ready();
    outputs_follow();
    for (uint part = tid / SIDE; part < 4; part += SIDES) {
        if (part == 3) {
            device const float* z = proj + args.z + head * DELTA_DIM;
            for (uint i = tid % SIDE; i < DELTA_DIM; i += SIDE) output_gate[i] = silu(z[i]);
            device const float* a = proj + args.a + head;
            const float2 gate = delta_gates(a[0], a[args.value_heads], a_log[head], float(dt_bias[head]));
            if (tid % SIDE == 0) {
                gates[0] = gate[0];
                gates[1] = gate[1];
            }
            continue;
        }
        const uint at = first_channel(part, args.key_heads, key_head, head);
        // Value heads share the channels of a key head; the first of them carries those on.
        convolve_head(proj + at, conv_w + at * CONV_WIDTH, conv_now + at, conv_next + at, args.channels, fresh,
                      part == 2 || head % sharing == 0, qkv + part * DELTA_DIM, tid % SIDE, SIDE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint p = simd; p < 2; p += SIMDS)
        to_unit_length(qkv + p * DELTA_DIM, p == 0 ? precise::rsqrt(float(DELTA_DIM)) : 1.0f, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float2 gate = float2(gates[0], gates[1]);
    for (uint r = simd * OWN; r < (simd + 1) * OWN; r += AT_ONCE) {
        if (r > simd * OWN) s.load(now + r * DELTA_DIM, fresh, lane);
        s.update(qkv, qkv + DELTA_DIM, qkv + 2 * DELTA_DIM + r, gate, mixed + r, lane);
        s.store(next + r * DELTA_DIM, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float squares = simd_sum(lane_squares(mixed, DELTA_DIM, lane, SIMD_WIDTH));
    const float scale = precise::rsqrt(squares / float(DELTA_DIM) + args.eps);
    // Into qkv, because other simdgroups may still be at their squares.
    for (uint i = tid; i < DELTA_DIM; i += THREADS) qkv[i] = mixed[i] * scale * float(norm[i]) * output_gate[i];
    store_shared_acts(y + head * DELTA_DIM, qkv, DELTA_DIM, tid, THREADS);
}
