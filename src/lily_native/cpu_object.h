// ABI between device_cpu.cpp and the shared objects that hold the shaders compiled for one instruction set.
// Plain data and function pointers only: nothing inline may leak from one instruction set into another.
#pragma once

#include <cstdint>

namespace lily {

// One launch. The last entry of a kernel's parameter list is its args struct; all before it are slots, in
// order.
struct CpuRun {
    void* const* slots;
    const void* args;
    uint32_t grid[3];  // threadgroups, as the kernel's own grid function gave them
};

struct CpuKernel {
    uint32_t kernel;     // KernelInfo::index
    uint32_t consts[4];  // compiled values in declaration order; a mirrored const is 0 in the generic form
    void (*grid)(const void* args, uint32_t out[3]);
    // Runs threadgroups first ... last-1, x fastest. Returns nullptr, or what went wrong (static text).
    // Never throws. Two calls with disjoint ranges may run on two threads at once.
    const char* (*run)(const CpuRun& run, uint32_t first, uint32_t last);
};

struct CpuObject {
    uint64_t table_hash;  // must equal kTableHash of the host, else the object is stale
    uint32_t width;       // SIMD width: 1 or 32
    const char* isa;
    uint32_t count;
    const CpuKernel* kernels;
};

}  // namespace lily

extern "C" const lily::CpuObject* lily_cpu_object();
