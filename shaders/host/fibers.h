// Threads of a threadgroup as fibers, for the CPU object of width 32. A fiber runs until it needs the others:
// at a barrier all threads must meet, at an exchange the 32 lanes of its simdgroup. Whoever does not come is
// an error.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lily_fibers {

// From the 32 values of a simdgroup, one result per lane.
using Combine = void (*)(const uint32_t* in, uint32_t operand, uint32_t* out);
using Body = void (*)(const void* context, uint32_t tid);

// Runs body for the threads 0 ... simds * 32 - 1. Returns nullptr, or what the threads did wrong (static
// text).
const char* run_threads(uint32_t simds, Body body, const void* context);

// For use inside body.
uint32_t current_thread();
void threadgroup_barrier();
// Replaces *value (at most 4 bytes) by this lane's result.
void simd_exchange(Combine combine, uint32_t operand, void* value, size_t bytes);

}  // namespace lily_fibers
