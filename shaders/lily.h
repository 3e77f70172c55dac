// lily.h -- what every shader includes: the language, and the helpers that have one plain body here and may have a
// tuned one in a device's shim (shaders/host/). A shim is named by LILY_SHIM; without it this is Metal.
#pragma once

#ifdef LILY_SHIM
#include LILY_SHIM
#else
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
constant constexpr uint SIMD_WIDTH = 32;
#define SHARED alignas(16) threadgroup  // tiles are written 16 bytes at a time
// Before a loop over a tile's accumulator, whose elements have no address.
#define UNROLL_TILE _Pragma("clang loop unroll(full)")
#define KERNEL(name, simds) [[kernel, max_total_threads_per_threadgroup((simds) * 32)]] void name
#define GRID                                                                                                           \
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],                            \
        uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]
constexpr uint simdgroups(uint n) { return n; }
#endif

#include "shape.h"

#ifdef LILY_SHAPES
#include LILY_SHAPES
#endif

// Half saturates, bfloat has the range of float; what is not a number stays so, and shows.
template <class T> inline T narrowed(float v) { return T(v); }
template <> inline half narrowed<half>(float v) { return half(v != v ? v : clamp(v, -65504.0f, 65504.0f)); }
inline act_t to_act(float v) { return narrowed<act_t>(v); }

// Called before a launch's first read of what the launch before it wrote, and when the next launch may begin: at once,
// if it only fetches weights until then, or when little is left to do. They let a device overlap launches; on Metal and
// the CPU they are nothing. What launches before the last one wrote can be read earlier.
#ifndef LILY_TUNED_OVERLAP
inline void inputs_ready() {}
inline void outputs_follow() {}
#endif

// What another launch wrote, read where inputs_ready() may be yet to come.
#ifndef LILY_TUNED_READ_EARLY
inline float read_early(device const float* p) { return *p; }
#endif

// What a launch will read once its inputs are ready, and may before; a thread's share of n values.
#ifndef LILY_TUNED_FETCH
template <class T> inline void fetch_soon(device const T*, uint /*n*/, uint /*tid*/) {}
#endif

// A weight that a launch reads exactly once.
#ifndef LILY_TUNED_READ_ONCE
template <class T> inline T read_once(device const T* p) { return *p; }
#endif

// sum_i a[i] b[i] over one lane's values.
#ifndef LILY_TUNED_LANE_DOT
template <uint N> inline float lane_dot(const thread float* a, const thread float* b) {
    float sum = 0;
    for (uint i = 0; i < N; i++) sum = fma(a[i], b[i], sum);
    return sum;
}
#endif

// The largest of one lane's values; the first place of one that equals `wanted` (n: there is none); and a change at a
// place (n: nowhere) that leaves the others in registers.
#ifndef LILY_TUNED_LARGEST
inline float lane_largest(const thread float* v, uint n) {
    float most = -INFINITY;
    for (uint i = 0; i < n; i++) most = max(most, v[i]);
    return most;
}
inline uint lane_find(const thread float* v, uint n, float wanted) {
    uint place = n;
    for (uint i = n; i > 0; i--) place = v[i - 1] == wanted ? i - 1 : place;
    return place;
}
inline void lane_put(thread float* v, uint n, uint place, float value) {
    for (uint i = 0; i < n; i++) v[i] = i == place ? value : v[i];
}
#endif

// Between act_t and fp32: n values of one lane, contiguous where loaded, strided where stored.
// n is a multiple of 8 where a lane has them all.
#ifndef LILY_TUNED_ACTS
template <class X> inline void load_acts(thread float* to, X from, uint n) {
    for (uint i = 0; i < n; i++) to[i] = float(from[i]);
}
template <class Y, class X> inline void store_acts(Y to, uint to_stride, X from, uint from_stride, uint n) {
    for (uint i = 0; i < n; i++) to[i * to_stride] = to_act(from[i * from_stride]);
}
#endif

// A thread's share of n values, of which it takes every `threads`-th.
template <class Y, class X> inline void store_shared_acts(Y to, X from, uint n, uint tid, uint threads) {
    if (tid < n) store_acts(to + tid, threads, from + tid, threads, (n + threads - 1 - tid) / threads);
}

// sum of squares over a lane's share of n contiguous values, which the threads of a group stride over; x is device or
// threadgroup memory.
#ifndef LILY_TUNED_SQUARES
template <class X> inline float lane_squares(X x, uint n, uint first, uint stride) {
    float sum = 0;
    for (uint i = first; i < n; i += stride) sum = fma(x[i], x[i], sum);
    return sum;
}
#endif

constexpr uint larger(uint a, uint b) { return a > b ? a : b; }

inline float sigmoid(float v) { return 1.0f / (1.0f + precise::exp(-v)); }
inline float silu(float v) { return v / (1.0f + precise::exp(-v)); }

// Sum over a threadgroup of SIMDS simdgroups; every thread gets it. part has SIMDS values.
template <uint SIMDS> inline float group_sum(float v, threadgroup float* part, uint lane, uint simd) {
    v = simd_sum(v);
    if (SIMDS == 1) return v;
    if (lane == 0) part[simd] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0;
    for (uint i = 0; i < SIMDS; i++) sum += part[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return sum;
}

// The cache row of a session's token t: its page, then its place in the page. table is the session's.
inline uint cache_row(device const uint* table, uint t) { return table[t / PAGE] * PAGE + t % PAGE; }

// The recurrent state of a step: what it reads and what it writes, as an index into [sessions, GENERATIONS].
inline uint state_now(device const StepState* step) { return step->session * GENERATIONS + step->generation; }
inline uint state_next(device const StepState* step) {
    return step->session * GENERATIONS + (step->generation + 1) % GENERATIONS;
}
