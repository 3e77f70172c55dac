// Tuned bodies of the helpers of delta_rows.h for NVIDIA GPUs. Eight lanes share a value row, so that a sum over its
// keys takes three exchanges, for four rows at once; what the tokens need comes to threadgroup memory ahead of its use.
#pragma once

#define LILY_TUNED_DELTA
#define LILY_TUNED_DELTA_STEPS
constexpr uint DELTA_LANES = 8;                                    // of a row
constexpr uint DELTA_PARALLEL = SIMD_WIDTH / DELTA_LANES;          // rows side by side
constexpr uint DELTA_PIECES = DELTA_DIM / (4 * DELTA_LANES);       // of four keys, of a lane

LILY_INLINE float sum_of_eight(float v) {
    UNROLL for (uint mask = 1; mask < DELTA_LANES; mask *= 2) v += simd_shuffle_xor(v, mask);
    return v;
}

// A lane's share of a query or key.
struct delta_keys {
    float4 x[DELTA_PIECES];
    LILY_INLINE delta_keys(const float* from, uint lane) {
        UNROLL for (uint i = 0; i < DELTA_PIECES; i++)
            x[i] = *reinterpret_cast<const float4*>(from + i * 4 * DELTA_LANES + lane % DELTA_LANES * 4);
    }
};

// ROWS rows: lane l has row l / 8 of every four, and keys 4 (l % 8) to 4 (l % 8) + 3 of every 32.
template <uint ROWS>
struct delta_rows {
    static constexpr uint OWN = ROWS / DELTA_PARALLEL;
    float4 s[OWN][DELTA_PIECES];
    LILY_INLINE static uint place(uint r, uint i, uint lane) {
        return (r * DELTA_PARALLEL + lane / DELTA_LANES) * DELTA_DIM + i * 4 * DELTA_LANES + lane % DELTA_LANES * 4;
    }
    LILY_INLINE void load(const float* state, bool fresh, uint lane) {
        UNROLL for (uint r = 0; r < OWN; r++)
            UNROLL for (uint i = 0; i < DELTA_PIECES; i++)
                s[r][i] = fresh ? float4(0.0f) : *reinterpret_cast<const float4*>(state + place(r, i, lane));
    }
    LILY_INLINE void store(float* state, uint lane) const {
        UNROLL for (uint r = 0; r < OWN; r++)
            UNROLL for (uint i = 0; i < DELTA_PIECES; i++)
                *reinterpret_cast<float4*>(state + place(r, i, lane)) = s[r][i];
    }
    // A lane's part of a sum over keys: four sums that do not wait for each other.
    LILY_INLINE static float part_of_dot(const float4* a, const float4* b) {
        float4 sum = float4(0.0f);
        UNROLL for (uint i = 0; i < DELTA_PIECES; i++)
            UNROLL for (uint c = 0; c < 4; c++) sum[c] = fma(a[i][c], b[i][c], sum[c]);
        return (sum.x + sum.y) + (sum.z + sum.w);
    }
    // S = g S + k error^T, for a lane's keys of one row; kept is S k.
    LILY_INLINE void change(uint r, const float4* ks, float v, float kept, float2 gate) {
        const float error = gate.y * (v - gate.x * kept);
        UNROLL for (uint i = 0; i < DELTA_PIECES; i++)
            UNROLL for (uint c = 0; c < 4; c++) s[r][i][c] = fma(ks[i][c], error, gate.x * s[r][i][c]);
    }
    LILY_INLINE void update(const float* q, const float* k, const float* v, float2 gate, float* y, uint lane) {
        const delta_keys qs(q, lane), ks(k, lane);
        UNROLL for (uint r = 0; r < OWN; r++) {
            const uint row = r * DELTA_PARALLEL + lane / DELTA_LANES;
            change(r, ks.x, v[row], sum_of_eight(part_of_dot(s[r], ks.x)), gate);
            const float out = sum_of_eight(part_of_dot(s[r], qs.x));
            if (lane % DELTA_LANES == 0) y[row] = out;
        }
    }
};

constexpr uint DELTA_AHEAD = 16;  // tokens copied at once

// Tokens of one head, for a threadgroup: q, k, its own values, gates.
template <uint ROWS>
struct delta_tokens {
    static constexpr uint VALUES = ROWS * delta_simds(), THREADS = delta_simds() * SIMD_WIDTH;
    static constexpr uint PARTS = DELTA_DIM / 4, VALUE_PARTS = VALUES / 4;  // of 16 bytes
    float q[DELTA_AHEAD][DELTA_DIM], k[DELTA_AHEAD][DELTA_DIM], v[DELTA_AHEAD][VALUES];
    float2 gates[DELTA_AHEAD];
    LILY_INLINE void fetch(const delta_stream& from, uint first, uint rows, uint tid) {
        const uint count = min(DELTA_AHEAD, rows - first);
        for (uint i = tid; i < count * PARTS; i += THREADS) {
            const uint t = i / PARTS, part = i % PARTS * 4;
            copy_async(&q[t][part], from.q + (first + t) * from.stride + part);
            copy_async(&k[t][part], from.k + (first + t) * from.stride + part);
        }
        for (uint i = tid; i < count * VALUE_PARTS; i += THREADS) {
            const uint t = i / VALUE_PARTS, part = i % VALUE_PARTS * 4;
            copy_async(&v[t][part], from.v + (first + t) * from.stride + part);
        }
        if (tid < count) copy_async_few<8>(&gates[tid], from.gates + (first + tid) * from.gate_stride);
    }
};

// As delta_rows::update for each token. The sum of a token's output is exchanged together with the next one's first
// sum, because only the latter is waited for.
template <uint ROWS>
LILY_INLINE void run_tokens(delta_rows<ROWS>& s, const delta_tokens<ROWS>& now, uint count, float* y, uint y_stride,
                            uint simd, uint lane) {
    constexpr uint OWN = delta_rows<ROWS>::OWN;
    const uint row = simd * ROWS + lane / DELTA_LANES;
    delta_keys qs(now.q[0], lane), ks(now.k[0], lane);
    float out[OWN];
    UNROLL for (uint r = 0; r < OWN; r++) out[r] = 0;
    for (uint t = 0; t < count; t++) {
        const uint next = min(t + 1, count - 1);
        const delta_keys next_q(now.q[next], lane), next_k(now.k[next], lane);
        const float2 gate = now.gates[t];
        float kept[OWN];
        UNROLL for (uint r = 0; r < OWN; r++) kept[r] = s.part_of_dot(s.s[r], ks.x);
        UNROLL for (uint mask = 1; mask < DELTA_LANES; mask *= 2)
            UNROLL for (uint r = 0; r < OWN; r++) {
                kept[r] += simd_shuffle_xor(kept[r], mask);
                out[r] += simd_shuffle_xor(out[r], mask);
            }
        if (t > 0 && lane % DELTA_LANES == 0)
            UNROLL for (uint r = 0; r < OWN; r++) y[(t - 1) * y_stride + row + r * DELTA_PARALLEL] = out[r];
        UNROLL for (uint r = 0; r < OWN; r++) {
            s.change(r, ks.x, now.v[t][row + r * DELTA_PARALLEL], kept[r], gate);
            out[r] = s.part_of_dot(s.s[r], qs.x);
        }
        qs = next_q;
        ks = next_k;
    }
    UNROLL for (uint r = 0; r < OWN; r++) {
        out[r] = sum_of_eight(out[r]);
        if (lane % DELTA_LANES == 0) y[(count - 1) * y_stride + row + r * DELTA_PARALLEL] = out[r];
    }
}

template <uint ROWS>
LILY_INLINE void delta_steps(delta_rows<ROWS>& s, const delta_stream& from, uint rows, uint tid, uint lane, uint simd) {
    __shared__ alignas(16) delta_tokens<ROWS> tokens[2];
    tokens[0].fetch(from, 0, rows, tid);
    copy_async_end();
    for (uint first = 0, turn = 0; first < rows; first += DELTA_AHEAD, turn ^= 1) {
        if (first + DELTA_AHEAD < rows) tokens[turn ^ 1].fetch(from, first + DELTA_AHEAD, rows, tid);
        copy_async_end();
        copy_async_wait<1>();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        run_tokens(s, tokens[turn], min(DELTA_AHEAD, rows - first), from.y + first * from.y_stride, from.y_stride, simd,
                   lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
