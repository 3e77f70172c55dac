// The shaders' text, and the source that a device compiles from it for the variants its plans use.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernel.h"

namespace lily {

// One .metal file with its includes resolved. What uses matrix tiles can be compiled in two forms.
struct ShaderFamily {
    const char* name;  // "quant_mv", as in KernelInfo::where
    bool tiles;
    const char* text;
};

// A file that shaders include on one kind of device.
struct ShaderHeader {
    const char* name;
    const char* text;
};

// Generated (shader_text.gen.cpp).
extern const ShaderFamily kShaderFamilies[];
extern const size_t kShaderFamilyCount;
extern const ShaderHeader kCudaHeaders[];
extern const size_t kCudaHeaderCount;
extern const uint64_t kShaderHash;

const ShaderFamily& family_of(const KernelInfo& kernel);

// What a variant is called in a compiled library: the kernel's name and its consts, "qmv_4_2048".
std::string function_name(const Variant& variant);

// Of the variants that tests of kernels run, those whose tiles a GPU of these heights multiplies.
std::vector<Variant> listed_variants(std::span<const uint32_t> tile_rows);

// The text of a family and one instantiation for each of its variants among `variants`. With tensor_ops, tiles are
// multiplied by the tensor operations of Metal 4, else by simdgroup matrices.
std::string metal_source(const ShaderFamily& family, std::span<const Variant> variants, bool tensor_ops);

// What a threadgroup takes on an NVIDIA GPU.
struct CudaGroup {
    uint32_t threads;
    uint32_t bytes;   // of threadgroup memory that is asked for with the launch
    uint32_t groups;  // that a multiprocessor must have room for at once
};
CudaGroup cuda_group(const Variant& variant, const std::string& architecture);

// The text of a variant's family and an entry point for it, in CUDA C++; kCudaHeaders are what it includes.
std::string cuda_source(const Variant& variant, const std::string& architecture);

}  // namespace lily
