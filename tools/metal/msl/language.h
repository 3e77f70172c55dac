// What Metal adds to C++, as clang's OpenCL mode has it. The checker puts this file in front of a preprocessed shader
// and of the library headers beside it, which are written in Metal's own words.
//
// OpenCL's address spaces are Metal's under other names. It has one more, the generic one: of pointers, references and
// member functions that name none. msl_rules.py refuses those in shaders; here, member functions of the library name
// none, because what a call returns is in no named space.
#pragma once

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;

typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef half half2 __attribute__((ext_vector_type(2)));
typedef half half4 __attribute__((ext_vector_type(4)));
typedef int int2 __attribute__((ext_vector_type(2)));
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef ushort ushort2 __attribute__((ext_vector_type(2)));
typedef ulong ulong2 __attribute__((ext_vector_type(2)));

// OpenCL has these names too, as built-in types that are not Metal's.
#define atomic_int metal_atomic_int
#define atomic_uint metal_atomic_uint

// Metal converts float to bfloat only where the shader says so. The way back is implicit there and explicit here, as it
// is a rule for shaders. None of Metal's functions takes bfloat, so there is no arithmetic.
struct bfloat {
    bfloat() = default;
    explicit bfloat(float value);
    explicit operator float() const;

private:
    ushort bits;
};

namespace metal_check {

// How many numbers an argument of a vector's constructor is worth.
template <class T>
struct components {
    static constexpr constant int count = 1;
};
template <class T, int N>
struct components<T __attribute__((ext_vector_type(N)))> {
    static constexpr constant int count = N;
};

// uint4(a, b, c, d): clang takes such a list for a cast, so macros at the end of this file make it a call.
template <class V, class... Arguments>
V make(Arguments...) {
    constexpr int given = (components<Arguments>::count + ...);
    static_assert(given == components<V>::count || (sizeof...(Arguments) == 1 && given == 1),
                  "a vector is made of one number, or of as many as it has");
    return V();
}

// A parameter from which T is not deduced.
template <class T>
struct same {
    typedef T type;
};

// An array in threadgroup memory, which clang allows in kernels that are no templates only.
template <class T>
threadgroup T& shared();

constexpr ulong padded(ulong size) {
    return (size + 15) / 16 * 16;
}

}  // namespace metal_check

template <class To, class From>
To as_type(From) {
    static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
    return To();
}

// Constructors of vectors become calls.
#define float2(...) (::metal_check::make<float2>(__VA_ARGS__))
#define float4(...) (::metal_check::make<float4>(__VA_ARGS__))
#define half2(...) (::metal_check::make<half2>(__VA_ARGS__))
#define half4(...) (::metal_check::make<half4>(__VA_ARGS__))
#define int2(...) (::metal_check::make<int2>(__VA_ARGS__))
#define uint2(...) (::metal_check::make<uint2>(__VA_ARGS__))
#define uint3(...) (::metal_check::make<uint3>(__VA_ARGS__))
#define uint4(...) (::metal_check::make<uint4>(__VA_ARGS__))
#define ushort2(...) (::metal_check::make<ushort2>(__VA_ARGS__))
#define ulong2(...) (::metal_check::make<ulong2>(__VA_ARGS__))
