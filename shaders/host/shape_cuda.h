// Sizes of work that NVIDIA GPUs take otherwise than others; for their shaders, and for the host that counts
// threadgroups and starts them.
#pragma once

constant constexpr uint TILE_N = 128;  // columns of a product's tile
constant constexpr uint MV_X = 8;      // rows of x that mv_many multiplies at once
constant constexpr uint SPLIT_2048 = 8;  // simdgroups that share a k of 2,048 or more
constant constexpr uint DOWN_AHEAD = 5;  // parts of experts' outputs whose weights are on their way at once
constant constexpr uint RUN = 4;         // tokens that a simdgroup attends to at a time in decode
constant constexpr uint DELTA_ROWS = 8;  // value rows of a simdgroup of delta_scan
constant constexpr uint PAIRS = 128;   // (row, query head) pairs of a threadgroup of attention

// Kernels whose threadgroups are larger where there are instructions for warpgroups.
struct wide_kernel {
    const char* name;
    uint simdgroups;
    uint bytes;  // of threadgroup memory, beside what the shader declares
};
constant constexpr wide_kernel WIDE_KERNELS[] = {{"attention_tile", 8, 196608}};

// Threadgroups of a kernel that a multiprocessor must have room for at once, where more than one. A name is the
// beginning of a kernel's with its constants.
struct shared_kernel {
    const char* name;
    uint groups;
};
constant constexpr shared_kernel SHARED_KERNELS[] = {{"norm_qmv_4", 3}, {"head_logits", 3}};
