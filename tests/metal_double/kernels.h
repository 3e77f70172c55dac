// What the double knows of the shaders: which functions a source declares, and the CPU objects that run in place of a
// GPU.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "cpu_object.h"
#include "kernel.h"

namespace metal_double {

// A function of a library: a kernel with all its consts.
struct Function {
    const lily::KernelInfo* kernel = nullptr;
    lily::Consts consts{};
};

// What compiling a source gives.
struct Source {
    std::map<std::string, Function> functions;
    bool tensor_form = false;  // needs the tensor operations of language version 4.0
    std::string error;         // as a compiler would print it; empty when the source compiles
};

Source read_source(std::string_view text);

// What runs when a function is dispatched.
struct Form {
    Function function;
    const lily::CpuKernel* run = nullptr;
    bool exact = false;  // compiled for the consts and width of the function, so that its grid is a GPU's
};

// The best form at a SIMD width of 1 or 32; at 32 the matrix products are those of the source's form. Without one, run
// is nullptr. Aborts when a CPU object cannot be opened.
Form find_form(const Function& function, uint32_t width, bool tensor_form);

// The threadgroups that a GPU needs for a function with these args.
std::array<uint32_t, 3> needed_grid(const Function& function, const void* args);

}  // namespace metal_double
