// delta.metal -- the gated delta rule.
//
// For each value head (key head h / (value_heads / key_heads)), token by token, with the state S[value][key]:
//     S = g S;   S += beta (v - S k) k^T;   y = S q
//     q = l2norm(q) / sqrt(DELTA_DIM),  k = l2norm(k),  l2norm(x) = x * rsqrt(sum(x^2) + 1e-6)
//     g = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b);  S counts as zero at position 0
// Everything is fp32. A lane keeps DELTA_DIM / SIMD_WIDTH keys of a few value rows in registers.
// Reference: transformers torch_recurrent_gated_delta_rule; Yang et al., Gated Delta Networks (2024), equation 10.
#include "lily.h"

struct delta_prepare_args {
    uint rows;
    uint key_heads;
    uint value_heads;
    uint proj_dim;
    uint a;  // column of proj where a begins; b follows it
};

// delta_prepare: one simdgroup normalises one q or k head of one row in place; the last one makes the row's gates.
//   grid: (2 * key_heads + 1, rows, 1)
//   bytes: qkv = 4 * rows * key_heads * DELTA_DIM * 4
//   bytes: proj = 2 * rows * value_heads * 4
//   used: encode_delta
KERNEL(delta_prepare, 1)(
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
    const uint row = group.y;
    if (row >= step->rows) return;
    if (group.x < 2 * args.key_heads) {
        device float* x = qkv + (row * (2 * args.key_heads + args.value_heads) + group.x) * DELTA_DIM;
        const float sum = simd_sum(lane_squares(x, DELTA_DIM, lane, SIMD_WIDTH));
        const float unit = precise::rsqrt(sum + 1e-6f);
        const float scale = group.x < args.key_heads ? unit * precise::rsqrt(float(DELTA_DIM)) : unit;
        for (uint i = lane; i < DELTA_DIM; i += SIMD_WIDTH) x[i] *= scale;
        return;
    }
    device const float* a = proj + row * args.proj_dim + args.a;
    for (uint h = lane; h < args.value_heads; h += SIMD_WIDTH) {
        const float v = a[h] + float(dt_bias[h]);
        const float softplus = max(v, 0.0f) + precise::log(1.0f + precise::exp(-abs(v)));
        device float* gate = gates + (row * args.value_heads + h) * 2;
        gate[0] = precise::exp(-precise::exp(a_log[h]) * softplus);
        gate[1] = sigmoid(a[args.value_heads + h]);
    }
    outputs_follow();
}

struct delta_args {
    uint rows;
    uint sessions;
    uint key_heads;
    uint value_heads;
};

constant constexpr uint DELTA_ROWS = 4;                          // value rows of a simdgroup
constant constexpr uint DELTA_KEYS = DELTA_DIM / SIMD_WIDTH;     // keys of a lane
constexpr uint delta_simds() { return simdgroups(4); }
constexpr uint delta_groups() { return DELTA_DIM / (DELTA_ROWS * delta_simds()); }

// DELTA_ROWS rows of one head's state, spread over the lanes of a simdgroup.
struct delta_rows {
    float s[DELTA_ROWS][DELTA_KEYS];
    void load(device const float* state, bool fresh, uint lane) thread {
        for (uint r = 0; r < DELTA_ROWS; r++)
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] = fresh ? 0.0f : state[r * DELTA_DIM + lane * DELTA_KEYS + i];
    }
    void store(device float* state, uint lane) const thread {
        for (uint r = 0; r < DELTA_ROWS; r++)
            for (uint i = 0; i < DELTA_KEYS; i++) state[r * DELTA_DIM + lane * DELTA_KEYS + i] = s[r][i];
    }
    // One token: head row pointers q, k, v (v at the first value row), gate = {g, beta}.
    void update(device const float* q, device const float* k, device const float* v, device const float* gate,
                device float* y, uint lane) thread {
        float qs[DELTA_KEYS], ks[DELTA_KEYS];
        for (uint i = 0; i < DELTA_KEYS; i++) {
            qs[i] = q[lane * DELTA_KEYS + i];
            ks[i] = k[lane * DELTA_KEYS + i];
        }
        const float g = gate[0], beta = gate[1];
        for (uint r = 0; r < DELTA_ROWS; r++) {
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] *= g;
            const float error = beta * (v[r] - simd_sum(lane_dot<DELTA_KEYS>(s[r], ks)));
            for (uint i = 0; i < DELTA_KEYS; i++) s[r][i] = fma(ks[i], error, s[r][i]);
            const float out = simd_sum(lane_dot<DELTA_KEYS>(s[r], qs));
            if (lane == 0) y[r] = out;
        }
    }
};

// delta_step: one token; a simdgroup owns DELTA_ROWS value rows of one head.
//   grid: (delta_groups(), value_heads, 1)
//   bytes: state = 2 * value_heads * DELTA_DIM * DELTA_DIM * 4
//   used: encode_delta
KERNEL(delta_step, 4)(
    device const float*     qkv   [[buffer(0)]],  // [2 * key_heads + value_heads, DELTA_DIM]
    device const float*     gates [[buffer(1)]],  // [value_heads, 2]
    device const StepState* step  [[buffer(2)]],  // [1]
    device float*           state [[buffer(3)]],  // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
    device float*           y     [[buffer(4)]],  // [value_heads, DELTA_DIM]
    constant delta_args&    args  [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    const uint head = group.y, row = (group.x * SIMDS + simd) * DELTA_ROWS;
    const uint key_head = head / (args.value_heads / args.key_heads);
    inputs_ready();
    delta_rows s;
    s.load(state + ((state_now(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, step->position == 0,
           lane);
    s.update(qkv + key_head * DELTA_DIM, qkv + (args.key_heads + key_head) * DELTA_DIM,
             qkv + (2 * args.key_heads + head) * DELTA_DIM + row, gates + head * 2, y + head * DELTA_DIM + row, lane);
    s.store(state + ((state_next(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, lane);
    outputs_follow();
}

// delta_scan: the step's rows one after the other, the state in registers; bit-equal to repeated delta_step.
//   grid: (delta_groups(), value_heads, 1)
//   bytes: state = 2 * value_heads * DELTA_DIM * DELTA_DIM * 4
//   used: encode_delta
KERNEL(delta_scan, 4)(
    device const float*     qkv   [[buffer(0)]],  // [rows, 2 * key_heads + value_heads, DELTA_DIM]
    device const float*     gates [[buffer(1)]],  // [rows, value_heads, 2]
    device const StepState* step  [[buffer(2)]],  // [1]
    device float*           state [[buffer(3)]],  // [sessions, GENERATIONS, value_heads, DELTA_DIM, DELTA_DIM]
    device float*           y     [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]
    constant delta_args&    args  [[buffer(5)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(4);
    const uint head = group.y, row = (group.x * SIMDS + simd) * DELTA_ROWS;
    const uint key_head = head / (args.value_heads / args.key_heads);
    const uint stride = (2 * args.key_heads + args.value_heads) * DELTA_DIM;
    inputs_ready();
    delta_rows s;
    s.load(state + ((state_now(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, step->position == 0,
           lane);
    for (uint t = 0; t < step->rows; t++) {
        device const float* x = qkv + t * stride;
        s.update(x + key_head * DELTA_DIM, x + (args.key_heads + key_head) * DELTA_DIM,
                 x + (2 * args.key_heads + head) * DELTA_DIM + row, gates + (t * args.value_heads + head) * 2,
                 y + (t * args.value_heads + head) * DELTA_DIM + row, lane);
    }
    s.store(state + ((state_next(step) * args.value_heads + head) * DELTA_DIM + row) * DELTA_DIM, lane);
    outputs_follow();
}
