// Threadgroups of a launch. Apart from kernel.h, because it is made from the shaders themselves.
#pragma once

#include <array>
#include <cstdint>

namespace lily {

// On a device of SIMD width 32; kernel is KernelInfo::index.
std::array<uint32_t, 3> grid_of(uint32_t kernel, const void* args, const uint32_t* consts);

// The same on NVIDIA GPUs.
std::array<uint32_t, 3> cuda_grid_of(uint32_t kernel, const void* args, const uint32_t* consts);

}  // namespace lily
