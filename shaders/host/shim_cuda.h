// The Metal Shading Language, as far as the shaders use it, in CUDA C++ for the run-time compiler. Included by lily.h
// inside a namespace, so that its types hide CUDA's. Needs no header. Every function is one of the device
// (--device-as-default-execution-space), every warp a simdgroup; kernels are bodies, which entry points call that the
// host writes for each variant.
#pragma once

#define LILY_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("unroll")

// ---- scalars

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long long;
using int32_t = int;
using uint32_t = unsigned int;

template <class To, class From>
LILY_INLINE constexpr To as_type(From value) {
    return __builtin_bit_cast(To, value);
}

// Conversion from float is explicit, as shaders must be.
struct half {
    ushort bits;
    half() = default;
    LILY_INLINE explicit half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    LILY_INLINE operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
struct bfloat {
    ushort bits;
    bfloat() = default;
    LILY_INLINE explicit bfloat(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    LILY_INLINE operator float() const { return as_type<float>(uint(bits) << 16); }
};

#define INFINITY as_type<float>(0x7f800000u)

// ---- vectors

template <class T, int N>
struct vec;
template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    vec() = default;
    LILY_INLINE constexpr vec(T s) : x(s), y(s) {}
    LILY_INLINE constexpr vec(T x_, T y_) : x(x_), y(y_) {}
    LILY_INLINE T& operator[](uint i) { return (&x)[i]; }
    LILY_INLINE const T& operator[](uint i) const { return (&x)[i]; }
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    T x, y, z;
    vec() = default;
    LILY_INLINE constexpr vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
};
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    vec() = default;
    LILY_INLINE constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
    LILY_INLINE constexpr vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
    LILY_INLINE T& operator[](uint i) { return (&x)[i]; }
    LILY_INLINE const T& operator[](uint i) const { return (&x)[i]; }
};
using float2 = vec<float, 2>;
using float4 = vec<float, 4>;
using uint2 = vec<uint, 2>;
using uint3 = vec<uint, 3>;
using uint4 = vec<uint, 4>;

// ---- functions of single values

template <class T>
LILY_INLINE constexpr T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
LILY_INLINE constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
LILY_INLINE constexpr T clamp(T x, T low, T high) {
    return min(max(x, low), high);
}
LILY_INLINE float abs(float x) {
    return ::fabsf(x);
}
LILY_INLINE float fma(float a, float b, float c) {
    return ::__fmaf_rn(a, b, c);
}
LILY_INLINE uint mulhi(uint a, uint b) {
    return ::__umulhi(a, b);
}
namespace precise {
LILY_INLINE float exp(float x) {
    return ::expf(x);
}
LILY_INLINE float log(float x) {
    return ::logf(x);
}
LILY_INLINE float sin(float x) {
    return ::sinf(x);
}
LILY_INLINE float cos(float x) {
    return ::cosf(x);
}
LILY_INLINE float rsqrt(float x) {
    return ::__frsqrt_rn(x);
}
}  // namespace precise

// ---- atomics: relaxed, unsigned, in device or threadgroup memory

enum memory_order { memory_order_relaxed };
struct atomic_uint {
    uint value;
};
LILY_INLINE uint atomic_load_explicit(const atomic_uint* p, memory_order) {
    return *const_cast<const volatile uint*>(&p->value);
}
LILY_INLINE void atomic_store_explicit(atomic_uint* p, uint v, memory_order) {
    *const_cast<volatile uint*>(&p->value) = v;
}
LILY_INLINE uint atomic_fetch_add_explicit(atomic_uint* p, uint v, memory_order) {
    return ::atomicAdd(&p->value, v);
}

// ---- operations between threads

constexpr uint SIMD_WIDTH = 32;
constexpr uint ALL_LANES = 0xffffffff;
constexpr uint simdgroups(uint count) {
    return count;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
LILY_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return mem_flags(int(a) | int(b));
}
LILY_INLINE void threadgroup_barrier(mem_flags) {
    __syncthreads();
}
template <class T>
LILY_INLINE T simd_shuffle_xor(T x, ushort mask) {
    return __shfl_xor_sync(ALL_LANES, x, mask);
}
// Every lane gets the same bits: the two sides of each exchange add, or compare, the same pair.
template <class T>
LILY_INLINE T simd_sum(T x) {
    UNROLL for (uint mask = 16; mask > 0; mask /= 2) x += simd_shuffle_xor(x, mask);
    return x;
}
template <class T>
LILY_INLINE T simd_max(T x) {
    UNROLL for (uint mask = 16; mask > 0; mask /= 2) x = max(x, simd_shuffle_xor(x, mask));
    return x;
}
template <class T>
LILY_INLINE T simd_min(T x) {
    UNROLL for (uint mask = 16; mask > 0; mask /= 2) x = min(x, simd_shuffle_xor(x, mask));
    return x;
}
// An unsigned integer whose order is that of the floats; and back.
LILY_INLINE uint order_of(float v) {
    const uint bits = as_type<uint>(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
LILY_INLINE float value_of(uint order) {
    return as_type<float>(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
// Integers take one instruction.
LILY_INLINE float simd_max(float x) {
    return value_of(__reduce_max_sync(ALL_LANES, order_of(x)));
}
LILY_INLINE uint simd_sum(uint x) {
    return __reduce_add_sync(ALL_LANES, x);
}
LILY_INLINE uint simd_min(uint x) {
    return __reduce_min_sync(ALL_LANES, x);
}
// Over the four threads that share a row of an mma's result.
LILY_INLINE float quad_max(float v) {
    v = max(v, simd_shuffle_xor(v, 1));
    return max(v, simd_shuffle_xor(v, 2));
}
LILY_INLINE float quad_sum(float v) {
    v += simd_shuffle_xor(v, 1);
    return v + simd_shuffle_xor(v, 2);
}
template <class T>
LILY_INLINE T simd_prefix_exclusive_sum(T x) {
    const uint lane = threadIdx.x % SIMD_WIDTH;
    T sum = x;
    UNROLL for (uint step = 1; step < SIMD_WIDTH; step *= 2) {
        const T before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    return sum - x;
}

// ---- threadgroup memory: what a launch has beside what the shader declares (see WIDE_KERNELS and TILE_KERNELS), and
// addresses in bytes

LILY_INLINE uchar* launch_memory() {
    extern __shared__ __attribute__((aligned(1024))) uchar arena[];
    return arena;
}
LILY_INLINE uint shared_address(const void* p) {
    return uint(__cvta_generic_to_shared(p));
}
LILY_INLINE void store_word(uint to, uint v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
LILY_INLINE void store_words(uint to, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}
LILY_INLINE uint2 load_words(uint from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

// ---- copies from device to threadgroup memory that go on by themselves; seen by the thread that began them

template <uint BYTES>
LILY_INLINE void copy_async_few(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(BYTES)
                 : "memory");
}
LILY_INLINE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
// To an address in threadgroup memory; the whole line of 128 bytes is on its way to the second cache then.
LILY_INLINE void copy_async_line(uint to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
LILY_INLINE void copy_async_or_zero(void* to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(live ? 16 : 0)
                 : "memory");
}
LILY_INLINE void copy_async_end() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <uint PENDING>
LILY_INLINE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- words of the language

#define device
#define constant const
#define threadgroup
#define thread
#define buffer(n)
#define UNROLL_TILE _Pragma("unroll")
#define KERNEL(name, simds) LILY_INLINE void name
#define GRID uint3 group, uint tid, uint lane, uint simd
#define SHARED __shared__ alignas(1024)  // tiles lie in whole repeats of their swizzle

#include "shape.h"

// ---- pairs of halves, the first in the lower bits

LILY_INLINE uint pack2(float low, float high) {
    uint r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
inline act_t to_act(float v);  // in lily.h
LILY_INLINE uint pack2_acts(float low, float high) {
    return uint(to_act(low).bits) | uint(to_act(high).bits) << 16;
}

// ---- overlap of launches: the start of a launch runs beside the end of the one before it

#if __CUDA_ARCH__ >= 900
#define LILY_TUNED_OVERLAP
LILY_INLINE void inputs_ready() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
LILY_INLINE void outputs_follow() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

// Weights never change, so they may be read past the cache that other threadgroups share.
#define LILY_TUNED_READ_ONCE
LILY_INLINE uint4 read_once(const uint4* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}
LILY_INLINE bfloat read_once(const bfloat* p) {
    bfloat v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v.bits) : "l"(p));
    return v;
}

// From the cache that all multiprocessors share: their own may hold what was there before.
#define LILY_TUNED_READ_EARLY
LILY_INLINE float read_early(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// To the cache that all multiprocessors share, a line for each thread.
#define LILY_TUNED_FETCH
template <class T>
LILY_INLINE void fetch_soon(const T* p, uint n, uint tid) {
    constexpr uint LINE = 128;
    const char* own = reinterpret_cast<const char*>(p) + tid * LINE;
    if (tid * LINE < n * sizeof(T)) asm volatile("prefetch.global.L2 [%0];" ::"l"(own));
}

#define LILY_SHAPES "shape_cuda.h"
#define LILY_CHOICE_HEADER "choose_cuda.h"
#define LILY_ATTEND_ROW_HEADER "attend_row_cuda.h"
#define LILY_NORM_HEADER "norm_cuda.h"
#define LILY_QUANT_HEADER "quant_cuda.h"
#define LILY_DELTA_HEADER "delta_cuda.h"
#define LILY_ATTEND_HEADER "attend_cuda.h"
#define LILY_TILE_HEADER "tile_cuda.h"
