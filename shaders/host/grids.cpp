// Threadgroups of every launch on a device of SIMD width 32, for hosts that have a GPU. A grid may call constexpr
// functions of the shaders, so the shaders are read here too; none of their kernels is compiled.
//
// As in cpu_object.cpp, system headers come before the shim, which makes macros of words of the shading language.
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "fibers.h"
#include "grids.h"

#ifndef LILY_GRID_OF
#define LILY_GRID_OF grid_of
#endif
#define LILY_WIDTH 32
#define LILY_SHIM "shim_cpu.h"

namespace {
namespace lily_shader {

#include "cpu_shaders.gen.inc"

#include "grids.gen.inc"

}  // namespace lily_shader
}  // namespace

namespace lily {

std::array<uint32_t, 3> LILY_GRID_OF(uint32_t kernel, const void* args, const uint32_t* consts) {
    std::array<uint32_t, 3> grid{};
    lily_shader::grids[kernel](args, consts, grid.data());
    return grid;
}

}  // namespace lily
