// quant.h -- affine group-quantised weights: w[n][k] = scale[n][k / 64] * q[n][k] + bias[n][k / 64], q unsigned.
//
// A row of k weights is k * BITS / 128 uint4; element j of a 32-bit word is at bit BITS * j. Products use
//     sum_k x[k] w[k] = sum over groups of scale * (sum x q) + bias * (sum x)
// in fp32, so a weight is never rounded (decode); a CPU rounds x for 4-bit weights (q4_cpu.h). Tiles (tile.h) round
// each weight once to act_t (prefill; a CPU does not).
#pragma once
#include "lily.h"

// Eight 4-bit or four 8-bit weights of one word.
template <uint BITS> inline float quant_at(uint word, uint i) {
    return float((word >> (BITS * i)) & ((1u << BITS) - 1));
}

#ifndef LILY_SHAPES
constant constexpr uint SPLIT_2048 = 4;  // simdgroups that share a k of 2,048 or more
constant constexpr uint MV_SETS = 1;     // sets of rows that a threadgroup makes of a large 4-bit matrix
constant constexpr bool CHOOSE_AGAIN = false;  // rather than wait for a choice of experts that another launch makes
constant constexpr uint DOWN_AHEAD = 1;  // parts of experts' outputs whose weights are on their way at once
#endif

#ifndef LILY_TUNED_QUANT
// Four lanes share a row; a lane takes 32 weights of each of ROWS_PER_LANE rows at a time.
constant constexpr uint LANES_PER_ROW = 4;
constant constexpr uint ROWS_PER_LANE = 2;
constant constexpr uint LANE_K = 32;
#ifndef LILY_SHAPES
constant constexpr uint MV_X = 1;  // rows of x that mv_many multiplies at once
#endif

// The activations of one lane's chunk, prepared once and used for several rows; the first of those begins at w.
template <uint BITS> struct quant_x {
    float v[LANE_K];
    float sum;
    template <class X> void load(X x, uint, device const uint4*) thread {
        sum = 0;
        for (uint i = 0; i < LANE_K; i++) {
            v[i] = float(x[i]);
            sum += v[i];
        }
    }
};

// The running dot product of one row. s and b are the group's scale and bias.
template <uint BITS> struct quant_acc {
    float acc;
    void clear() thread { acc = 0; }
    void mac(const thread quant_x<BITS>& x, device const uint4* w, device const bfloat* s,
             device const bfloat* b) thread {
        float dot = 0;
        for (uint j = 0; j < LANE_K * BITS / 128; j++) {
            const uint4 q = read_once(w + j);
            for (uint c = 0; c < 4; c++)
                for (uint i = 0; i < 32 / BITS; i++)
                    dot = fma(x.v[(j * 4 + c) * (32 / BITS) + i], quant_at<BITS>(q[c], i), dot);
        }
        acc = fma(float(read_once(s)), dot, fma(float(read_once(b)), x.sum, acc));
    }
    float total() const thread { return acc; }
};
#endif

constant constexpr uint ROW_STRIDE = SIMD_WIDTH / LANES_PER_ROW;        // rows that the lanes of a simdgroup span
constant constexpr uint MV_ROWS = ROW_STRIDE * ROWS_PER_LANE;           // rows of one simdgroup

// Simdgroups that share the rows of a matrix-vector product by splitting k, so that one wave of threadgroups has
// every load in flight. 0 is a k known only at run time.
constexpr uint mv_split(uint k) {
    return SIMD_WIDTH == 1 ? 1 : k == 0 ? 2 : k >= 4096 ? 8 : k >= 2048 ? SPLIT_2048 : 2;
}

// Rows of a matrix-vector product that a threadgroup of 8 simdgroups makes.
constexpr uint mv_rows(uint k) { return simdgroups(8) / mv_split(k) * MV_ROWS; }

// Sets of so many rows that a threadgroup makes of a large matrix.
constexpr uint mv_sets(uint bits) { return bits == 4 ? MV_SETS : 1; }

// Rows of a lane's that exist where the matrix goes on for `left` rows. All do on a GPU: sizes are multiples of 64.
inline uint mv_lane_rows(uint left) { return SIMD_WIDTH == 1 ? min(ROWS_PER_LANE, left) : ROWS_PER_LANE; }

#ifdef LILY_QUANT_HEADER
#include LILY_QUANT_HEADER
#endif

#ifndef LILY_TUNED_PART
// acc[r] += this lane's share of row r. w, scales and biases point at the simdgroup's first row; part of SPLIT takes
// its share of k.
template <uint BITS, uint SPLIT, class X>
inline void mv_accumulate(thread quant_acc<BITS>* acc, X x, device const uint4* w, device const bfloat* scales,
                          device const bfloat* biases, uint k, uint rows, uint lane, uint part) {
    const uint row = lane / LANES_PER_ROW;
    const uint first = (part * LANES_PER_ROW + lane % LANES_PER_ROW) * LANE_K;
    for (uint at = first; at < k; at += SPLIT * LANES_PER_ROW * LANE_K) {
        quant_x<BITS> xs;
        xs.load(x + at, min(LANE_K, k - at), w + row * (k * BITS / 128) + at * BITS / 128);
        for (uint r = 0; r < rows; r++) {
            const uint n = row + r * ROW_STRIDE;
            const uint g = n * (k / QUANT_GROUP) + at / QUANT_GROUP;
            acc[r].mac(xs, w + n * (k * BITS / 128) + at * BITS / 128, scales + g, biases + g);
        }
    }
}

// Writes the simdgroup's MV_ROWS partial sums to out. Every lane takes part.
template <uint BITS> inline void mv_reduce(thread quant_acc<BITS>* acc, threadgroup float* out, uint rows, uint lane) {
    for (uint r = 0; r < rows; r++) {
        float t = acc[r].total();
        for (uint m = LANES_PER_ROW / 2; m > 0; m /= 2) t += simd_shuffle_xor(t, ushort(m));
        if (lane % LANES_PER_ROW == 0) out[r * ROW_STRIDE + lane / LANES_PER_ROW] = t;
    }
}

// One simdgroup's sums of MV_ROWS rows, from matrix row `row` on, over its part of SPLIT of k. left: rows from there to
// the matrix's end.
template <uint BITS, uint SPLIT, class X>
inline void mv_part(X x, device const uint4* w, device const bfloat* scales, device const bfloat* biases, uint k,
                    uint row, uint left, uint part, threadgroup float* out, uint lane) {
    const uint g = row * (k / QUANT_GROUP), rows = mv_lane_rows(left);
    quant_acc<BITS> acc[ROWS_PER_LANE];
    for (uint r = 0; r < rows; r++) acc[r].clear();
    mv_accumulate<BITS, SPLIT>(acc, x, w + row * (k * BITS / 128), scales + g, biases + g, k, rows, lane, part);
    mv_reduce<BITS>(acc, out, rows, lane);
}
#endif

// The partial sums of a threadgroup's rows, from matrix row `row` on; after a barrier mv_row adds them up. part has
// MV_ROWS places for each simdgroup.
template <uint BITS, uint SPLIT, class X>
inline void mv_partials(X x, device const uint4* w, device const bfloat* scales, device const bfloat* biases, uint k,
                        uint row, uint left, threadgroup float* part, uint lane, uint simd) {
    const uint own = simd / SPLIT * MV_ROWS;
    mv_part<BITS, SPLIT>(x, w, scales, biases, k, row + own, left - own, simd % SPLIT, part + simd * MV_ROWS, lane);
}

// Row i of a threadgroup's product: the sum of its SPLIT partial sums.
template <uint SPLIT> inline float mv_row(const threadgroup float* part, uint i) {
    const uint set = i / MV_ROWS, row = i % MV_ROWS;
    float sum = 0;
    for (uint j = 0; j < SPLIT; j++) sum += part[(set * SPLIT + j) * MV_ROWS + row];
    return sum;
}

// mv_partials of `count` <= MV_X rows of x, k apart, in as many parts.
#ifndef LILY_TUNED_MANY
template <uint BITS, uint SPLIT>
inline void mv_many(device const act_t* x, uint count, device const uint4* w, device const bfloat* scales,
                    device const bfloat* biases, uint k, uint row, uint left, threadgroup float* part, uint lane,
                    uint simd) {
    for (uint r = 0; r < count; r++)
        mv_partials<BITS, SPLIT>(x + r * k, w, scales, biases, k, row, left, part + r * simdgroups(8) * MV_ROWS, lane,
                                 simd);
}
#endif

// The first weights of a threadgroup's product of SETS sets of mv_rows(K) rows, on their way before the launch's inputs
// are ready, where a device gains by it. Sets are `apart` rows from each other; `left` rows from the first one on the
// matrix ends. mv_finish is mv_partials of each set, behind begin() of the same matrix and row. K is k, or 0 if that is
// known only at run time.
#ifndef LILY_TUNED_AHEAD
template <uint BITS, uint SPLIT, uint K = 0, uint SETS = 1> struct mv_ahead {
    void begin(device const uint4*, device const bfloat*, device const bfloat*, uint /*k*/, uint /*row*/,
               uint /*apart*/, uint /*left*/, uint /*lane*/, uint /*simd*/) thread {}
};

// The same for a simdgroup that has several under way.
template <uint BITS, uint SPLIT, uint K> using mv_kept = mv_ahead<BITS, SPLIT, K>;

template <uint BITS, uint SPLIT, uint K, uint SETS, class X>
inline void mv_finish(const thread mv_ahead<BITS, SPLIT, K, SETS>&, X x, device const uint4* w,
                      device const bfloat* scales, device const bfloat* biases, uint k, uint row, uint apart, uint left,
                      threadgroup float* part, uint lane, uint simd) {
    for (uint s = 0; s < SETS && s * apart < left; s++)
        mv_partials<BITS, SPLIT>(x, w, scales, biases, k, row + s * apart, min(apart, left - s * apart),
                                 part + s * simdgroups(8) * MV_ROWS, lane, simd);
}
#endif

// Where a threadgroup reads the n values of x, after mv_input_ready() and a barrier: where they are, or in threadgroup
// memory, if that is closer and MOST values have room for them.
#ifndef LILY_TUNED_INPUT
template <uint MOST>
inline device const act_t* mv_input(device const act_t* x, uint /*n*/, uint /*tid*/, uint /*threads*/) {
    return x;
}
inline void mv_input_ready() {}
#endif
