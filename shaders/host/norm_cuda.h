// Tuned body of the beginning with a norm for NVIDIA GPUs: a thread has eight values of every 8 THREADS in a row, in
// registers, and the norm's weights before the inputs are ready.
#pragma once

#define LILY_TUNED_NORM_AHEAD

template <uint SIMDS, uint K>
struct norm_ahead {
    static constexpr uint THREADS = SIMDS * SIMD_WIDTH, PIECES = (K + 8 * THREADS - 1) / (8 * THREADS);
    uint4 w[PIECES];
    LILY_INLINE static uint place(uint i, uint tid) { return (i * THREADS + tid) * 8; }
    LILY_INLINE void begin(const bfloat* norm, uint tid) {
        UNROLL for (uint i = 0; i < PIECES; i++)
            if (place(i, tid) < K) w[i] = *reinterpret_cast<const uint4*>(norm + place(i, tid));
    }
    LILY_INLINE void finish(const float* x, const bfloat*, act_t* y, uint, float eps, float* part, uint tid, uint lane,
                            uint simd) const {
        float v[8 * PIECES], sum = 0;
        UNROLL for (uint i = 0; i < 2 * PIECES; i++) {
            const uint at = place(i / 2, tid) + i % 2 * 4;
            const float4 four = at < K ? *reinterpret_cast<const float4*>(x + at) : float4(0.0f);
            UNROLL for (uint c = 0; c < 4; c++) v[4 * i + c] = four[c];
        }
        UNROLL for (uint i = 0; i < 8 * PIECES; i++) sum = fma(v[i], v[i], sum);
        const float scale = precise::rsqrt(group_sum<SIMDS>(sum, part, lane, simd) / float(K) + eps);
        UNROLL for (uint i = 0; i < PIECES; i++) {
            uint4 made;
            UNROLL for (uint c = 0; c < 4; c++)
                made[c] = pack2_acts(v[8 * i + 2 * c] * scale * as_type<float>(w[i][c] << 16),
                                     v[8 * i + 2 * c + 1] * scale * as_type<float>(w[i][c] & 0xffff0000u));
            if (place(i, tid) < K) *reinterpret_cast<uint4*>(y + place(i, tid)) = made;
        }
    }
};

// A width that is known only at run time.
template <uint SIMDS>
struct norm_ahead<SIMDS, 0> {
    LILY_INLINE void begin(const bfloat*, uint) {}
    LILY_INLINE void finish(const float* x, const bfloat* norm, act_t* y, uint dim, float eps, float* part, uint tid,
                            uint lane, uint simd) const {
        normalise_row<SIMDS>(x, norm, y, dim, eps, part, tid, lane, simd);
    }
};
