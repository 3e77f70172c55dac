// A CPU object of the tiny shaders of test_plan_native.py: just enough of a shim to run the generated
// launchers.
#include <cstdint>

#include "cpu_object.h"

namespace lily_shader {

using uint = uint32_t;
struct uint3 {
    uint x, y, z;
};
struct alignas(16) uint4 {
    uint x, y, z, w;
};
#if LILY_WIDTH == 32
// One thread after the other: these shaders have no barrier.
template <class F>
const char* run_group(uint simds, F&& body) {
    for (uint tid = 0; tid < simds * 32; ++tid) body(tid, tid % 32, tid / 32);
    return nullptr;
}
#endif

#define device
#define constant const
#define buffer(n)
#define KERNEL(name, simds) static void name
#define GRID \
    [[maybe_unused]] uint3 group, [[maybe_unused]] uint tid, [[maybe_unused]] uint lane, [[maybe_unused]] uint simd

// clang-format off
#include "shape.h"
#include "tiny.metal"
#include "cpu_launch.gen.inc"
// clang-format on

}  // namespace lily_shader

extern "C" const lily::CpuObject* lily_cpu_object() {
    namespace launch = lily_shader::cpu_launch;
    static const lily::CpuObject object{launch::table_hash, LILY_WIDTH, "tiny", launch::count, launch::kernels};
    return &object;
}
