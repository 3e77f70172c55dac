// The shaders as machine code of one kind of NVIDIA GPU, a variant at a time, kept in the user's cache folder.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "kernel.h"

namespace lily {

struct CudaImage {
    std::string code;  // a cubin
    std::string log;   // the compiler's, with registers and memory of the kernel; empty when `code` was in the cache
};

// What a GPU's architecture is called by the compiler: 9.0 is "sm_90a", which has instructions of its own.
std::string cuda_architecture(int major, int minor);

// Any thread may call its members.
class CudaCompiler {
public:
    // folder: of the cache; empty for none.
    CudaCompiler(std::string architecture, std::string folder);

    // Throws kDevice with the compiler's messages.
    CudaImage compile(const Variant& variant) const;
    // compile(), unless the cache has it. A damaged entry is made again.
    CudaImage image(const Variant& variant);
    uint32_t hits() const { return hits_; }
    const std::string& folder() const { return folder_; }
    // "13.0"
    std::string version() const;

private:
    CudaImage compile(const Variant& variant, const std::string& source) const;
    std::string entry_of(const Variant& variant, const std::string& source) const;

    std::string architecture_, folder_;
    std::atomic<uint32_t> hits_{0};
};

// Where this process keeps compiled kernels from now on.
void set_cuda_cache(std::string folder);
std::string cuda_cache();

}  // namespace lily
