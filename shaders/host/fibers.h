// Threads of a threadgroup as fibers, for the CPU object of width 32. A fiber runs until it needs the others:
// at a barrier all threads must meet, at an exchange the 32 lanes of its simdgroup. Whoever does not come is
// an error.
#pragma once

#include <cstdint>

namespace lily_fibers {

// Replaces the 32 values of a simdgroup by one result per lane.
using Combine = void (*)(void* const* values, uint32_t operand);
using Body = void (*)(const void* context, uint32_t tid);

// Runs body for the threads 0 ... simds * 32 - 1. Returns nullptr, or what the threads did wrong (static
// text).
const char* run_threads(uint32_t simds, Body body, const void* context);

// For use inside body.
uint32_t current_thread();
void threadgroup_barrier();
// Replaces *value by this lane's result.
void simd_exchange(Combine combine, uint32_t operand, void* value);

}  // namespace lily_fibers
