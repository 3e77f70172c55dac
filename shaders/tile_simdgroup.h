// tile_simdgroup.h -- tile.h on every Apple GPU: products of 8 x 8 blocks, which the lanes of a simdgroup share.
//
// A block lies in memory as 64 consecutive values, and a tile as rows of eight blocks: so a block is loaded from all
// banks of threadgroup memory at once. A simdgroup multiplies all rows of a tile by its own share of the columns. A
// step of k is 8 deep; products of act_t are exact in fp32.
//
// Which elements of a block a lane holds is not documented. The mapping below is the one that MLX, which is Apple's,
// and other projects rely on for every GPU that has simdgroup_matrix; with another one, every test of a kernel that
// multiplies tiles fails. simdgroup_store needs no mapping, but threadgroup memory and barriers wherever sums are
// rescaled or written. Operands come by simdgroup_load and do not depend on the mapping.
#pragma once

#ifndef LILY_SHIM
#include <metal_simdgroup_matrix>
#endif

constant constexpr uint BLOCK = 8;
constant constexpr uint DEPTH_BLOCKS = TILE_K / BLOCK;  // blocks of a tile's row

inline uint tile_at(uint row, uint col) {
    return ((row / BLOCK * DEPTH_BLOCKS + col / BLOCK) * BLOCK + row % BLOCK) * BLOCK + col % BLOCK;
}

// Blocks of a row that one simdgroup multiplies.
constexpr uint block_columns(uint bn, uint simds) { return bn / BLOCK / simds; }

// Two neighbouring elements of each block, blocks row by row. row and col are those of the first element, first_block
// is the first column of blocks.
template <uint BM, uint BN, uint SIMDS, bool PLAIN = false> struct tile_acc {
    float v[BM * BN / (SIMDS * SIMD_WIDTH)];
    uint row;
    uint col;
    uint first_block;
    thread float& operator[](uint i) thread { return v[i]; }
};

template <uint BM, uint BN, uint SIMDS, bool PLAIN>
inline uint tile_capacity(const thread tile_acc<BM, BN, SIMDS, PLAIN>&) {
    return BM * BN / (SIMDS * SIMD_WIDTH);
}
template <class Acc> inline bool tile_valid(const thread Acc&, uint) { return true; }
template <uint BM, uint BN, uint SIMDS, bool PLAIN>
inline uint tile_row(const thread tile_acc<BM, BN, SIMDS, PLAIN>& acc, uint i) {
    return acc.row + i / 2 / block_columns(BN, SIMDS) * BLOCK;
}
template <uint BM, uint BN, uint SIMDS, bool PLAIN>
inline uint tile_col(const thread tile_acc<BM, BN, SIMDS, PLAIN>& acc, uint i) {
    return acc.col + i / 2 % block_columns(BN, SIMDS) * BLOCK + i % 2;
}
template <uint BM, uint BN, uint SIMDS, bool PLAIN>
inline void tile_clear(thread tile_acc<BM, BN, SIMDS, PLAIN>& acc, uint lane, uint simd) {
    acc.first_block = simd * block_columns(BN, SIMDS);
    acc.row = lane / 16 * 4 + lane / 2 % 4;
    acc.col = acc.first_block * BLOCK + lane / 8 % 2 * 4 + lane % 2 * 2;
    UNROLL_TILE
    for (uint i = 0; i < tile_capacity(acc); i++) acc[i] = 0;
}

template <uint BM, uint BN, uint SIMDS, bool PLAIN>
inline void multiply_blocks(thread tile_acc<BM, BN, SIMDS, PLAIN>& acc, threadgroup const act_t* a,
                            threadgroup const act_t* b) {
    static_assert(BM % BLOCK == 0 && BN % (BLOCK * SIMDS) == 0, "whole blocks, as many for each simdgroup");
    static_assert(!PLAIN || BN == TILE_K, "a tile has TILE_K columns");
    constexpr uint ROWS = BM / BLOCK, COLUMNS = block_columns(BN, SIMDS), SIZE = BLOCK * BLOCK;
    simdgroup_matrix<float, 8, 8> sum[ROWS * COLUMNS];
    UNROLL_TILE
    for (uint i = 0; i < ROWS * COLUMNS; i++) {
        sum[i].thread_elements()[0] = acc[2 * i];
        sum[i].thread_elements()[1] = acc[2 * i + 1];
    }
    for (uint k = 0; k < DEPTH_BLOCKS; k++) {
        simdgroup_matrix<act_t, 8, 8> left, right[COLUMNS];
        UNROLL_TILE
        for (uint j = 0; j < COLUMNS; j++) {
            const uint column = acc.first_block + j;
            const uint at = PLAIN ? k * DEPTH_BLOCKS + column : column * DEPTH_BLOCKS + k;
            simdgroup_load(right[j], b + at * SIZE, BLOCK, ulong2(0), !PLAIN);  // the last one transposes
        }
        UNROLL_TILE
        for (uint i = 0; i < ROWS; i++) {
            simdgroup_load(left, a + (i * DEPTH_BLOCKS + k) * SIZE, BLOCK, ulong2(0), false);
            UNROLL_TILE
            for (uint j = 0; j < COLUMNS; j++)
                simdgroup_multiply_accumulate(sum[i * COLUMNS + j], left, right[j], sum[i * COLUMNS + j]);
        }
    }
    UNROLL_TILE
    for (uint i = 0; i < ROWS * COLUMNS; i++) {
        acc[2 * i] = sum[i].thread_elements()[0];
        acc[2 * i + 1] = sum[i].thread_elements()[1];
    }
}

template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply(thread tile_acc<BM, BN, SIMDS>& acc, threadgroup act_t* a, threadgroup act_t* b,
                          uint /*live*/, uint /*columns*/) {
    multiply_blocks<BM, BN, SIMDS, false>(acc, a, b);
}

template <uint BM, uint BN, uint SIMDS>
inline void tile_multiply_plain(thread tile_acc<BM, BN, SIMDS, true>& acc, threadgroup act_t* a, threadgroup act_t* b,
                                uint /*live*/) {
    multiply_blocks<BM, BN, SIMDS, true>(acc, a, b);
}
