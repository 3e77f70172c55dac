// What the parts of the double's own test share.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <array>
#include <span>
#include <string>
#include <vector>

#include "double.h"
#include "kernel.h"

struct Check {
    const char* name;
    void (*run)();
};

// Something that must end the process with a message: one of those that `|` separates.
struct Misuse {
    const char* name;
    const char* message;
    void (*run)();
};

std::span<const Check> runtime_checks();
std::span<const Check> double_checks();
std::span<const Check> error_checks();
std::span<const Misuse> misuses();

// Ends the process when the condition does not hold.
void expect(bool condition, const char* text, const char* file, int line);
#define EXPECT(condition) expect((condition), #condition, __FILE__, __LINE__)

int64_t count(const char* name);
// Sets a value of the double for a scope.
class With {
public:
    With(const char* name, int64_t value);
    ~With();
    With(const With&) = delete;
    With& operator=(const With&) = delete;

private:
    std::string name_;
    int64_t before_;
};

NSString* text(const std::string& value);

// A device with a queue, and the calls that most tests make.
struct Gpu {
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;

    Gpu();
    id<MTLLibrary> compile(const char* kernel, const lily::Consts& consts = {}) const;
    id<MTLComputePipelineState> pipeline(id<MTLLibrary> library, const char* name,
                                         NSArray<id<MTLBinaryArchive>>* archives = nil,
                                         MTLPipelineOption options = MTLPipelineOptionNone) const;
    id<MTLBuffer> buffer(NSUInteger bytes) const;
    id<MTLCommandBuffer> command_buffer() const;
    id<MTLComputeCommandEncoder> encoder(id<MTLCommandBuffer> command_buffer) const;
};

// rms_norm over kRows rows of kDim values of 2: the result is the weight.
struct Norm {
    static constexpr NSUInteger kRows = 3, kDim = 64;

    id<MTLComputePipelineState> pipeline;
    id<MTLBuffer> x, w, step, y, args;

    Norm(const Gpu& gpu, float weight);
    void bind(id<MTLComputeCommandEncoder> encoder) const;
    void dispatch(id<MTLComputeCommandEncoder> encoder) const;
    void encode(id<MTLComputeCommandEncoder> encoder) const;
    bool result_is(float value) const;
};

MTLCompileOptions* compile_options(NSUInteger major = 3, NSUInteger minor = 2);
// Encodes, commits and waits; false when the command buffer failed.
bool run(const Gpu& gpu, const std::vector<const Norm*>& norms, bool barriers = true);
