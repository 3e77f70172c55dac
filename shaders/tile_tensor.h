// tile_tensor.h -- tile.h on GPUs with tensor operations: matmul2d of Metal 4, with an opaque accumulator.
//
// A tile in memory is row-major. Which thread holds which element, and how many steps of k an operation takes, is not
// for the shader to know.
#pragma once

#ifndef LILY_SHIM
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#endif

inline uint tile_at(uint row, uint col) { return row * TILE_K + col; }

// With PLAIN the right operand is [64][BN], else [BN][64].
template <uint BM, uint BN, uint SIMDS, bool PLAIN> struct tile_product {
    using operand = tensor<threadgroup act_t, dextents<int32_t, 2>, tensor_inline>;
    using product = mpp::tensor_ops::matmul2d<
        mpp::tensor_ops::matmul2d_descriptor(BM, BN, TILE_K, false, !PLAIN, false,
                                             mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
        execution_simdgroups<SIMDS>>;
    using result = typename product::template cooperative_tensor_destination_t<operand, operand, float, int>;
};

// Its size is known to the device alone.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false>
using tile_acc = typename tile_product<BM, BN, SIMDS, PLAIN>::result;

template <class Acc> inline uint tile_capacity(const thread Acc& acc) { return acc.get_capacity(); }
template <class Acc> inline bool tile_valid(const thread Acc& acc, uint i) { return acc.is_valid_element(i); }
template <class Acc> inline uint tile_row(const thread Acc& acc, uint i) {
    return acc.get_multidimensional_index(i)[1];
}
template <class Acc> inline uint tile_col(const thread Acc& acc, uint i) {
    return acc.get_multidimensional_index(i)[0];
}
template <class Acc> inline void tile_clear(thread Acc& acc, uint /*lane*/, uint /*simd*/) {
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++)
        if (tile_valid(acc, i)) acc[i] = 0;
}

template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply(thread tile_acc<BM, BN, SIMDS>& acc, threadgroup act_t* a, threadgroup act_t* b,
                          uint /*live*/, uint /*columns*/) {
    using P = tile_product<BM, BN, SIMDS, false>;
    typename P::operand left(a, dextents<int32_t, 2>(TILE_K, BM)), right(b, dextents<int32_t, 2>(TILE_K, BN));
    typename P::product().run(left, right, acc);
}

template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply_plain(thread tile_acc<BM, BN, SIMDS, true>& acc, threadgroup act_t* a, threadgroup act_t* b,
                                uint /*live*/) {
    using P = tile_product<BM, BN, SIMDS, true>;
    typename P::operand left(a, dextents<int32_t, 2>(TILE_K, BM)), right(b, dextents<int32_t, 2>(BN, TILE_K));
    typename P::product().run(left, right, acc);
}
