// The Metal Shading Language, as far as the shaders use it, in C++20. Included by lily.h inside the namespace
// of a CPU object. LILY_WIDTH 1: a threadgroup is one thread, the operations between threads are identities.
// LILY_WIDTH 32: a threadgroup is simdgroups of 32 fibers that really exchange values and really wait
// (fibers.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if LILY_WIDTH != 1 && LILY_WIDTH != 32
#error "LILY_WIDTH must be 1 or 32"
#endif

#define LILY_INLINE inline __attribute__((always_inline))

// ---- scalars

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
using half = __fp16;  // _Float16 came to this compiler's C++ in version 13
#else
using half = _Float16;
#endif

// The upper half of a float; conversion rounds to nearest even and keeps a NaN a NaN. Conversion from float
// is explicit, as shaders must be.
struct bfloat {
    ushort bits;

    bfloat() = default;
    constexpr explicit bfloat(float value) : bits(round(__builtin_bit_cast(uint, value))) {}
    constexpr operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }

private:
    static constexpr ushort round(uint u) {
        const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
        return ushort(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
};

constexpr float kInfinity = __builtin_inff();
#undef INFINITY
#define INFINITY kInfinity

// ---- vectors

template <class T, int N>
struct vec;

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    T x, y;
    vec() = default;
    constexpr vec(T s) : x(s), y(s) {}
    constexpr vec(T x_, T y_) : x(x_), y(y_) {}
    template <class U>
    constexpr explicit vec(const vec<U, 2>& v) : x(T(v.x)), y(T(v.y)) {}
    T& operator[](uint i) { return (&x)[i]; }
    const T& operator[](uint i) const { return (&x)[i]; }
};

// As in Metal, three elements take the room of four.
template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    T x, y, z;
    vec() = default;
    constexpr vec(T s) : x(s), y(s), z(s) {}
    constexpr vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
    template <class U>
    constexpr explicit vec(const vec<U, 3>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
    T& operator[](uint i) { return (&x)[i]; }
    const T& operator[](uint i) const { return (&x)[i]; }
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    vec() = default;
    constexpr vec(T s) : x(s), y(s), z(s), w(s) {}
    constexpr vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
    template <class U>
    constexpr explicit vec(const vec<U, 4>& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
    T& operator[](uint i) { return (&x)[i]; }
    const T& operator[](uint i) const { return (&x)[i]; }
};

// clang-format off
#define LILY_VECTOR_OPERATOR(op)                                                                    \
    template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {              \
        for (int i = 0; i < N; ++i) a[i] = T(a[i] op b[i]);                                         \
        return a;                                                                                   \
    }                                                                                               \
    template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, std::type_identity_t<T> b) {\
        return a op vec<T, N>(b);                                                                   \
    }                                                                                               \
    template <class T, int N> inline vec<T, N> operator op(std::type_identity_t<T> a, vec<T, N> b) {\
        return vec<T, N>(a) op b;                                                                   \
    }                                                                                               \
    template <class T, int N, class U> inline vec<T, N>& operator op##=(vec<T, N>& a, U b) {        \
        return a = a op b;                                                                          \
    }
// clang-format on
LILY_VECTOR_OPERATOR(+)
LILY_VECTOR_OPERATOR(-)
LILY_VECTOR_OPERATOR(*)
LILY_VECTOR_OPERATOR(/)
LILY_VECTOR_OPERATOR(&)
LILY_VECTOR_OPERATOR(|)
LILY_VECTOR_OPERATOR(^)
LILY_VECTOR_OPERATOR(<<)
LILY_VECTOR_OPERATOR(>>)
#undef LILY_VECTOR_OPERATOR

#define LILY_VECTOR_TYPES(name, T) \
    using name##2 = vec<T, 2>;     \
    using name##3 = vec<T, 3>;     \
    using name##4 = vec<T, 4>;
LILY_VECTOR_TYPES(float, float)
LILY_VECTOR_TYPES(half, half)
LILY_VECTOR_TYPES(bfloat, bfloat)
LILY_VECTOR_TYPES(int, int)
LILY_VECTOR_TYPES(uint, uint)
LILY_VECTOR_TYPES(ushort, ushort)
LILY_VECTOR_TYPES(uchar, uchar)
#undef LILY_VECTOR_TYPES

// ---- functions of single values

template <class To, class From>
constexpr To as_type(From value) {
    return __builtin_bit_cast(To, value);
}
template <class T>
constexpr T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
constexpr T clamp(T x, T low, T high) {
    return min(max(x, low), high);
}
template <class T>
constexpr T abs(T x) {
    return x < T(0) ? T(-x) : x;
}
inline float abs(float x) {
    return __builtin_fabsf(x);
}
inline uint mulhi(uint a, uint b) {
    return uint((ulong(a) * b) >> 32);
}
// One rounding where the processor has the instruction; a library call per element would be far too slow
// where it has not.
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// The compiler's own conversion is a library call where the instruction set has none.
inline float widen(half value) {
    const uint bits = __builtin_bit_cast(ushort, value), magnitude = bits & 0x7fff;
    const float finite = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
    const uint special = magnitude >= 0x7c00 ? 0x7f800000u : 0u;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint, finite) | special | (bits & 0x8000) << 16);
}
inline float widen(bfloat value) {
    return float(value);
}

#include "math_cpu.h"

// ---- atomics: relaxed, unsigned, in device or threadgroup memory

enum memory_order { memory_order_relaxed };
struct atomic_uint {
    uint value;
};
inline uint atomic_load_explicit(const atomic_uint* p, memory_order) {
    return __atomic_load_n(&p->value, __ATOMIC_RELAXED);
}
inline void atomic_store_explicit(atomic_uint* p, uint v, memory_order) {
    __atomic_store_n(&p->value, v, __ATOMIC_RELAXED);
}
inline uint atomic_fetch_add_explicit(atomic_uint* p, uint v, memory_order) {
    return __atomic_fetch_add(&p->value, v, __ATOMIC_RELAXED);
}

// ---- operations between threads

constexpr uint SIMD_WIDTH = LILY_WIDTH;
constexpr uint simdgroups(uint count) {
    return LILY_WIDTH == 1 ? 1 : count;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return mem_flags(int(a) | int(b));
}

#if LILY_WIDTH == 1

inline void threadgroup_barrier(mem_flags) {}
template <class T>
inline T simd_sum(T x) {
    return x;
}
template <class T>
inline T simd_max(T x) {
    return x;
}
template <class T>
inline T simd_min(T x) {
    return x;
}
template <class T>
inline T simd_shuffle_xor(T x, ushort) {
    return x;
}
template <class T>
inline T simd_prefix_exclusive_sum(T) {
    return T(0);
}

#else

inline void threadgroup_barrier(mem_flags) {
    lily_fibers::threadgroup_barrier();
}

// Combine sees the 32 values of a simdgroup and fills one result per lane.
template <class T, class Combine>
inline T simd_exchange(T x, uint operand, Combine) {
    const auto combine = [](void* const* lanes, uint32_t operand_) {
        T values[32], results[32];
        for (uint i = 0; i < 32; ++i) values[i] = *static_cast<const T*>(lanes[i]);
        Combine()(values, operand_, results);
        for (uint i = 0; i < 32; ++i) *static_cast<T*>(lanes[i]) = results[i];
    };
    lily_fibers::simd_exchange(+combine, operand, &x);
    return x;
}
template <class T, class Operation>
inline T simd_reduce(T x, Operation) {
    return simd_exchange(x, 0, [](T* v, uint, T* results) {
        for (uint step = 16; step > 0; step /= 2)
            for (uint i = 0; i < step; ++i) v[i] = Operation()(v[i], v[i + step]);
        for (uint i = 0; i < 32; ++i) results[i] = v[0];
    });
}
template <class T>
inline T simd_sum(T x) {
    return simd_reduce(x, [](T a, T b) { return T(a + b); });
}
template <class T>
inline T simd_max(T x) {
    return simd_reduce(x, [](T a, T b) { return max(a, b); });
}
template <class T>
inline T simd_min(T x) {
    return simd_reduce(x, [](T a, T b) { return min(a, b); });
}
template <class T>
inline T simd_shuffle_xor(T x, ushort mask) {
    return simd_exchange(x, mask, [](T* v, uint m, T* results) {
        for (uint i = 0; i < 32; ++i) results[i] = v[(i ^ m) & 31];
    });
}
template <class T>
inline T simd_prefix_exclusive_sum(T x) {
    return simd_exchange(x, 0, [](T* v, uint, T* results) {
        T sum = T(0);
        for (uint i = 0; i < 32; ++i) {
            results[i] = sum;
            sum = T(sum + v[i]);
        }
    });
}

// Runs body(tid, lane, simd) for every thread of a threadgroup; used by the generated launchers.
template <class ThreadBody>
inline const char* run_group(uint simds, const ThreadBody& body) {
    const auto run_thread = [](const void* context, uint32_t tid) {
        (*static_cast<const ThreadBody*>(context))(tid, tid % SIMD_WIDTH, tid / SIMD_WIDTH);
    };
    return lily_fibers::run_threads(simds, run_thread, &body);
}

#endif

// ---- words of the language; last, because they would break system headers

#define device
#define constant const
#define threadgroup
#define thread
#define buffer(n)
#define UNROLL_TILE
#define KERNEL(name, simds) static void name
#define GRID \
    [[maybe_unused]] uint3 group, [[maybe_unused]] uint tid, [[maybe_unused]] uint lane, [[maybe_unused]] uint simd
// Threadgroup arrays are read 16 bytes at a time whatever their element is.
#if LILY_WIDTH == 1
#define SHARED alignas(64)
#else
#define SHARED alignas(64) static thread_local
#endif

#if LILY_WIDTH == 1
#include "lanes_cpu.h"
#include "tile_cpu.h"
#elif defined(LILY_TENSOR_OPS)
#include "mpp.h"
#else
#include "simdgroup_matrix.h"
#endif
