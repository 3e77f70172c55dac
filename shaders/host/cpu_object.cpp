// The shaders, compiled as C++ for one instruction set. This text is built once per level; each result is a
// shared object that device_cpu.cpp opens at run time.
//
// Everything is in an anonymous namespace and nothing of the standard library is instantiated, so no function
// compiled for a newer processor can be picked by the linker for an older one. System headers must come
// before the shim, because the shim defines words of the shading language as macros.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_object.h"
#include "fibers.h"

#define LILY_SHIM "shim_cpu.h"

namespace {
namespace lily_shader {

#include "cpu_shaders.gen.inc"

#include "cpu_launch.gen.inc"

constexpr lily::CpuObject object{cpu_launch::table_hash, LILY_WIDTH, LILY_ISA, cpu_launch::count, cpu_launch::kernels};

}  // namespace lily_shader
}  // namespace

extern "C" __attribute__((visibility("default"))) const lily::CpuObject* lily_cpu_object() {
    return &lily_shader::object;
}
