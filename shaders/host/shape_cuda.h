// Sizes of work that NVIDIA GPUs take otherwise than others; for their shaders, and for the host that counts
// threadgroups and starts them.
#pragma once

constant constexpr uint TILE_N = 128;  // columns of a product's tile, at most

// Columns of a tile of `rows` rows: where these are few, more threadgroups are worth more than what columns share.
constexpr uint tile_n(uint rows) { return rows <= 32 ? 64 : TILE_N; }
// The same for a product of small k, whose threadgroups have little to do in any case.
constexpr uint short_tile_n(uint rows) { return rows <= 8 ? 64 : TILE_N; }

constant constexpr uint MV_X = 8;      // rows of x that mv_many multiplies at once
constant constexpr uint SPLIT_2048 = 8;  // simdgroups that share a k of 2,048 or more
constant constexpr uint MV_SETS = 2;     // sets of rows that a threadgroup makes of a large 4-bit matrix
constant constexpr bool CHOOSE_AGAIN = true;  // rather than wait for a choice of experts that another launch makes
constant constexpr uint DOWN_AHEAD = 5;  // parts of experts' outputs whose weights are on their way at once
constant constexpr uint ATTEND_SIMDS = 4;  // simdgroups of a threadgroup of decode attention
constant constexpr uint DELTA_ROWS = 8;  // value rows of a simdgroup of delta_scan
constant constexpr uint PAIRS = 128;   // (row, query head) pairs of a threadgroup of attention

// Kernels with threadgroups of another size than elsewhere, some only where there are instructions for warpgroups. A
// name is the beginning of a kernel's.
struct wide_kernel {
    const char* name;
    uint simdgroups;
    uint bytes;  // of threadgroup memory, beside what the shader declares
    bool warpgroups;
};
constant constexpr wide_kernel WIDE_KERNELS[] = {
    {"attention_tile", 8, 196608, true}, {"attention_blocks", 4, 74240, false}, {"attention_decode", 4, 74240, false}};

// Matrix products of many rows, whose weights come to threadgroup memory beside what the shader declares.
struct tile_kernel {
    const char* name;
    uint matrices;
    bool small_k;
};
constant constexpr tile_kernel TILE_KERNELS[] = {{"qmm", 1, false},
                                                 {"qmm_add", 1, false},
                                                 {"qmm_swiglu", 2, false},
                                                 {"expert_mm_gate_up", 2, false},
                                                 {"expert_mm_down", 1, true}};
constant constexpr uint W_STEPS = 4;  // steps of weights there: being read, or on their way
constexpr uint w_step_bytes(uint bits, uint columns) { return columns * 64 * bits / 8; }

// Whether a simdgroup's part of so many columns of a 4-bit matrix, times sets of rows, goes through threadgroup memory:
// as copies can be of its size, and as there is room for it everywhere.
constexpr bool stages(uint columns, uint sets) { return columns == 256 || (columns == 512 && sets == 1); }

// Threadgroups that a multiprocessor must have room for at once of a kernel whose weights, MV_SETS sets of rows, go
// through threadgroup memory. A name is the beginning of a kernel's with its constants.
struct shared_kernel {
    const char* name;
    uint groups;
};
constant constexpr shared_kernel SHARED_KERNELS[] = {
    {"norm_qmv_4", 3}, {"head_logits", 3}, {"expert_mv_gate_up", 3}};
