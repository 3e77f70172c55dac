// tile.h -- matrix tiles in threadgroup memory and their products, in fp32.
//
// A tile has 64 columns of act_t; its layout in memory is private to tile_at and tile_put8. Contract, on every device:
// an element of an accumulator is one chain of fp32 additions over steps of ascending k, whatever BM is; where a step
// is deeper than one product, its inner order is the device's, and the same for all elements. So the result of a row
// never depends on how many rows share a launch. A quantised weight is rounded once, to act_t, or not at all (CPU).
//
// Products and accumulators have one form for each kind of hardware; both declare
//     tile_acc<BM, BN, SIMDS, PLAIN>   a BM x BN accumulator, spread over the SIMDS simdgroups of a threadgroup, for
//                                      products of one kind. It can be a local variable and a reference parameter, but
//                                      no member and no array element. tile_clear begins one.
//     acc[i], i < tile_capacity(acc)   this thread's elements, where tile_valid(acc, i); at tile_row and tile_col
//     tile_multiply                    acc += a b^T; a is [BM][64], b is [BN][64]
//     tile_multiply_plain              acc += a b;   a is [BM][64], b is [64][BN]
//                                      rows from live on, and columns from `columns` on, may be skipped; then they
//                                      are not valid
#pragma once
#include "quant.h"

// Rows of x that a tile takes: neighbours, or those of (row, choice) pairs.
struct own_rows {
    uint at(uint row) const thread { return row; }
};
struct pair_rows {
    device const uint* pairs;
    uint used;
    uint at(uint row) const thread { return pairs[row] / used; }
};

// A quantised matrix from one of its rows on.
template <uint BITS> struct quant_matrix {
    device const uint4* w;
    device const bfloat* scales;
    device const bfloat* biases;
};
template <uint BITS>
inline quant_matrix<BITS> matrix_from(device const uint4* w, device const bfloat* scales, device const bfloat* biases,
                                      uint row, uint k) {
    return {w + row * (k * BITS / 128), scales + row * (k / QUANT_GROUP), biases + row * (k / QUANT_GROUP)};
}

#ifdef LILY_TILE_HEADER
#include LILY_TILE_HEADER
#endif

#ifndef LILY_TUNED_TILE
#ifndef LILY_SHAPES
constant constexpr uint TILE_N = SIZE_UNIT;   // columns of a product's tile
#endif

#ifdef LILY_TENSOR_OPS
#include "tile_tensor.h"
#else
#include "tile_simdgroup.h"
#endif

// Stores eight values at once: v holds them as bits; col is a multiple of 8.
inline void tile_put8(threadgroup act_t* tile, uint row, uint col, uint4 v) {
    *(threadgroup uint4*)(tile + tile_at(row, col)) = v;
}

// Eight values as bits of act_t.
inline uint4 pack8(const thread float* v) {
    uint4 r;
    for (uint i = 0; i < 4; i++)
        r[i] = uint(as_type<ushort>(to_act(v[2 * i]))) | uint(as_type<ushort>(to_act(v[2 * i + 1]))) << 16;
    return r;
}

inline uint4 acts8(device const bfloat* from) {
    float v[8];
    for (uint i = 0; i < 8; i++) v[i] = float(from[i]);
    return pack8(v);
}
#endif

// Copies 64 columns of BM rows of act_t, stride apart, into a tile; rows from live on become zero.
template <uint BM, uint THREADS, class Rows>
inline void stage_rows(threadgroup act_t* tile, device const act_t* x, Rows rows, uint stride, uint live, uint tid) {
    for (uint t = tid; t < BM * (TILE_K / 8); t += THREADS) {
        const uint row = t / (TILE_K / 8), col = t % (TILE_K / 8) * 8;
        tile_put8(tile, row, col,
                  row < live ? *(device const uint4*)(x + rows.at(row) * stride + col) : uint4(0u));
    }
}

#ifndef LILY_TUNED_TILE
// k of one step of a product of `live` rows.
template <uint BM> constexpr uint tile_depth(uint /*live*/) { return TILE_K; }

// One step's columns of BM rows of x, as quant_tile_multiply takes them; several products may share them. xs is room
// for a tile.
template <uint BM> struct quant_rows {
    threadgroup act_t* v;
    template <uint THREADS, class Rows>
    void stage(threadgroup act_t* xs, device const act_t* x, Rows rows, uint stride, uint live, uint /*depth*/,
               uint tid) thread {
        v = xs;
        stage_rows<BM, THREADS>(xs, x, rows, stride, live, tid);
    }
};

// acc += x w^T over one step: w points at the first of BN rows at this k, rows are w_stride uint4 and g_stride groups
// apart, ws is room for a [BN][64] tile. Rows of x from live on, and columns from `columns` on, may be skipped; then
// they are not valid. Begins and ends with a barrier: x may be staged right before and right after.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_tile_multiply(thread tile_acc<BM, BN, SIMDS>& acc, const thread quant_rows<BM>& x,
                                threadgroup act_t* ws, device const uint4* w, uint w_stride,
                                device const bfloat* scales, device const bfloat* biases, uint g_stride,
                                uint live, uint columns, uint tid) {
    constexpr uint PER = 128 / BITS, CHUNKS = TILE_K / PER;  // weights of a uint4, uint4 of a row
    for (uint t = tid; t < BN * CHUNKS; t += SIMDS * SIMD_WIDTH) {
        const uint row = t / CHUNKS, chunk = t % CHUNKS;
        const uint4 q = read_once(w + row * w_stride + chunk);
        const float s = float(scales[row * g_stride]), b = float(biases[row * g_stride]);
        for (uint j = 0; j < PER / 8; j++) {
            float v[8];
            for (uint i = 0; i < 8; i++) v[i] = fma(s, quant_at<BITS>(q[(j * 8 + i) * BITS / 32], i % (32 / BITS)), b);
            tile_put8(ws, row, chunk * PER + j * 8, pack8(v));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_multiply<BM, BN, SIMDS>(acc, x.v, ws, live, columns);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
#endif

#ifndef LILY_TUNED_STORE
// y[rows.at(r) * stride + c] = factor * acc[r][c], for the tile's live rows.
template <class Acc, class Rows>
inline void tile_store(thread Acc& acc, device float* y, Rows rows, uint stride, uint live, float factor) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i) && tile_row(acc, i) < live)
            y[rows.at(tile_row(acc, i)) * stride + tile_col(acc, i)] = factor * acc[i];
}

#ifndef LILY_TUNED_ADD
// y[r * stride + c] += acc[r][c], likewise.
template <class Acc> inline void tile_add(thread Acc& acc, device float* y, uint stride, uint live) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i) && tile_row(acc, i) < live) y[tile_row(acc, i) * stride + tile_col(acc, i)] += acc[i];
}
#endif

// y[r * stride + c] = act_t(acc[r][c]), likewise.
template <class Acc> inline void tile_store_acts(thread Acc& acc, device act_t* y, uint stride, uint live) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i) && tile_row(acc, i) < live)
            y[tile_row(acc, i) * stride + tile_col(acc, i)] = to_act(acc[i]);
}
#endif

// gate = silu(gate) * up / SWIGLU_SHIFT.
template <class Acc> inline void tile_swiglu(thread Acc& gate, thread Acc& up) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(gate); i++)
        if (tile_valid(gate, i)) gate[i] = silu(gate[i]) * up[i] * (1.0f / float(SWIGLU_SHIFT));
}

#ifndef LILY_SHAPES
// Columns of a tile of `rows` rows.
constexpr uint tile_n(uint /*rows*/) { return TILE_N; }
constexpr uint short_tile_n(uint /*rows*/) { return TILE_N; }  // of a product of small k
#endif

// acc += x w^T over all of k. xs has room for tile_x_room<BM>(), ws for tile_w_room() act_t. Rows of x from live on,
// and columns from `columns` on, may be skipped; then they are not valid. The second form takes two matrices.
#ifndef LILY_TUNED_PRODUCT
template <uint BM> constexpr uint tile_x_room() { return BM * TILE_K; }
constexpr uint tile_w_room() { return TILE_N * TILE_K; }

// The next step's weights of a matrix, at k = `at`.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_step(thread tile_acc<BM, BN, SIMDS>& acc, const thread quant_rows<BM>& x,
                       const thread quant_matrix<BITS>& w, uint at, uint k, uint live, uint columns,
                       threadgroup act_t* ws, uint tid) {
    quant_tile_multiply<BITS, BM, BN, SIMDS>(acc, x, ws, w.w + at * BITS / 128, k * BITS / 128,
                                             w.scales + at / QUANT_GROUP, w.biases + at / QUANT_GROUP,
                                             k / QUANT_GROUP, live, columns, tid);
}

template <uint BITS, uint BM, uint BN, uint SIMDS, class Rows>
inline void quant_multiply(thread tile_acc<BM, BN, SIMDS>& acc, device const act_t* x, Rows rows,
                           quant_matrix<BITS> w, uint k, uint live, uint columns, threadgroup act_t* xs,
                           threadgroup act_t* ws, uint tid) {
    const uint depth = tile_depth<BM>(live);
    for (uint at = 0; at < k; at += depth) {
        quant_rows<BM> staged;
        staged.template stage<SIMDS * SIMD_WIDTH>(xs, x + at, rows, k, live, min(depth, k - at), tid);
        quant_step<BITS, BM, BN, SIMDS>(acc, staged, w, at, k, live, columns, ws, tid);
    }
}

template <uint BITS, uint BM, uint BN, uint SIMDS, class Rows>
inline void quant_multiply_pair(thread tile_acc<BM, BN, SIMDS>& first, thread tile_acc<BM, BN, SIMDS>& second,
                                device const act_t* x, Rows rows, quant_matrix<BITS> w1, quant_matrix<BITS> w2, uint k,
                                uint live, uint columns, threadgroup act_t* xs, threadgroup act_t* ws, uint tid) {
    const uint depth = tile_depth<BM>(live);
    for (uint at = 0; at < k; at += depth) {
        quant_rows<BM> staged;
        staged.template stage<SIMDS * SIMD_WIDTH>(xs, x + at, rows, k, live, min(depth, k - at), tid);
        quant_step<BITS, BM, BN, SIMDS>(first, staged, w1, at, k, live, columns, ws, tid);
        quant_step<BITS, BM, BN, SIMDS>(second, staged, w2, at, k, live, columns, ws, tid);
    }
}
#endif
