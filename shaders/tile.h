// tile.h -- matrix tiles in threadgroup memory and their products, in fp32.
//
// A tile has 64 columns of act_t; its layout in memory is private to tile_at and tile_put8. Products go through the
// tensor operation matmul2d with an opaque accumulator. Contract, on every device: an element of the accumulator is one
// chain of fp32 additions in ascending k, one tile of 64 after the other, whatever BM is; so the result of a row never
// depends on how many rows share a launch. A quantised weight is rounded once, to act_t.
#pragma once
#include "quant.h"

#ifndef LILY_TUNED_TILE
#ifndef LILY_SHIM
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif

inline uint tile_at(uint row, uint col) { return row * TILE_K + col; }

// Stores eight values at once: v holds them as bits; col is a multiple of 8.
inline void tile_put8(threadgroup act_t* tile, uint row, uint col, uint4 v) {
    *(threadgroup uint4*)(tile + tile_at(row, col)) = v;
}

// With PLAIN the right operand is [64][BN], else [BN][64].
template <uint BM, uint BN, uint SIMDS, bool PLAIN> struct tile_product {
    static constexpr constant auto shape = mpp::tensor_ops::matmul2d_descriptor(
        BM, BN, TILE_K, false, !PLAIN, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    using operand = tensor<threadgroup act_t, dextents<int32_t, 2>, tensor_inline>;
    using product = mpp::tensor_ops::matmul2d<shape, execution_simdgroups<SIMDS>>;
    using result = typename product::template cooperative_tensor_destination_t<operand, operand, float>;
};

// A BM x BN accumulator, spread over the SIMDS simdgroups of a threadgroup, for products of one kind. Its size is known
// to the device alone: it can be a local variable and a reference parameter, but no member and no array element.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false>
using tile_acc = typename tile_product<BM, BN, SIMDS, PLAIN>::result;

// This thread's elements of an accumulator are acc[0] ... acc[tile_capacity(acc) - 1], where tile_valid.
template <class Acc> inline uint tile_capacity(const thread Acc& acc) { return acc.get_capacity(); }
template <class Acc> inline bool tile_valid(const thread Acc& acc, uint i) { return acc.is_valid_element(i); }
template <class Acc> inline uint tile_row(const thread Acc& acc, uint i) {
    return acc.get_multidimensional_index(i)[1];
}
template <class Acc> inline uint tile_col(const thread Acc& acc, uint i) {
    return acc.get_multidimensional_index(i)[0];
}
template <class Acc> inline void tile_clear(thread Acc& acc) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i)) acc[i] = 0;
}

// acc += a b^T; a is [BM][64], b is [BN][64].
template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply(thread tile_acc<BM, BN, SIMDS>& acc, threadgroup act_t* a, threadgroup act_t* b) {
    using P = tile_product<BM, BN, SIMDS, false>;
    typename P::operand left(a, dextents<int32_t, 2>(TILE_K, BM)), right(b, dextents<int32_t, 2>(TILE_K, BN));
    typename P::product().run(left, right, acc);
}

// acc += a b; a is [BM][64], b is [64][BN].
template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply_plain(thread tile_acc<BM, BN, SIMDS, true>& acc, threadgroup act_t* a, threadgroup act_t* b) {
    using P = tile_product<BM, BN, SIMDS, true>;
    typename P::operand left(a, dextents<int32_t, 2>(TILE_K, BM)), right(b, dextents<int32_t, 2>(BN, TILE_K));
    typename P::product().run(left, right, acc);
}

// Eight values as bits of act_t.
inline uint4 pack8(const thread float* v) {
    uint4 r;
    for (uint i = 0; i < 4; i++)
        r[i] = uint(as_type<ushort>(to_act(v[2 * i]))) | uint(as_type<ushort>(to_act(v[2 * i + 1]))) << 16;
    return r;
}

// acc += x w^T over one group of 64: x is a staged [BM][64] tile, w points at the first of BN rows at this k, rows
// are w_stride uint4 and g_stride groups apart, ws is room for the [BN][64] tile. Rows of x from live on may be
// skipped. Begins and ends with a barrier: x may be staged right before and right after.
template <uint BITS, uint BM, uint BN, uint SIMDS>
inline void quant_tile_multiply(thread tile_acc<BM, BN, SIMDS>& acc, threadgroup act_t* xs, threadgroup act_t* ws,
                                device const uint4* w, uint w_stride, device const bfloat* scales,
                                device const bfloat* biases, uint g_stride, uint /*live*/, uint tid) {
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
    tile_multiply<BM, BN, SIMDS>(acc, xs, ws);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
#endif

// Copies 64 columns of BM rows of act_t, stride apart, into a tile; rows from live on become zero.
template <uint BM, uint THREADS>
inline void stage_rows(threadgroup act_t* tile, device const act_t* x, uint stride, uint live, uint tid) {
    for (uint t = tid; t < BM * (TILE_K / 8); t += THREADS) {
        const uint row = t / (TILE_K / 8), col = t % (TILE_K / 8) * 8;
        tile_put8(tile, row, col, row < live ? *(device const uint4*)(x + row * stride + col) : uint4(0u));
    }
}
