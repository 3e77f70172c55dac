// Test of the double itself: that it runs what is right, reports what is injected, and stops what is wrong. Run without
// arguments; with one, the name of a misuse, it does that and is expected to abort.
#include "selftest.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "shader_source.h"

namespace {

const char* own_path = nullptr;  // also what the double takes the folder of the CPU objects from

// Everything that a child process prints before it dies; empty when it ends well.
std::string last_words(const char* misuse) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        execl("/proc/self/exe", own_path, misuse, nullptr);
        _exit(0);
    }
    close(ends[1]);
    std::string words;
    char part[4096];
    for (ssize_t length; (length = read(ends[0], part, sizeof(part))) > 0;)
        words.append(part, static_cast<size_t>(length));
    close(ends[0]);
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "" : words;
}

bool contains_one(std::string_view words, std::string_view choices) {
    for (;;) {
        const size_t bar = choices.find('|');
        if (words.find(choices.substr(0, bar)) != std::string_view::npos) return true;
        if (bar == std::string_view::npos) return false;
        choices.remove_prefix(bar + 1);
    }
}

int run_misuse(std::string_view name) {
    for (const Misuse& misuse : misuses()) {
        if (name != misuse.name) continue;
        @autoreleasepool {
            misuse.run();
        }
        return 0;
    }
    std::fprintf(stderr, "there is no misuse of this name\n");
    return 0;
}

void run_checks(std::span<const Check> checks) {
    for (const Check& check : checks) {
        lily_double_reset();
        const int64_t blocks = count("live_blocks"), objects = count("live_objects");
        @autoreleasepool {
            check.run();
        }
        if (count("live_objects") != objects || count("live_blocks") != blocks) {
            std::fprintf(stderr, "%s leaks: %lld objects, %lld blocks\n", check.name,
                         static_cast<long long>(count("live_objects") - objects),
                         static_cast<long long>(count("live_blocks") - blocks));
            std::exit(1);
        }
        std::printf("ok   %s\n", check.name);
    }
}

void run_misuses() {
    for (const Misuse& misuse : misuses()) {
        const std::string words = last_words(misuse.name);
        if (words.empty() || !contains_one(words, misuse.message)) {
            std::fprintf(stderr, "%s: expected an end with '%s', found: %s\n", misuse.name, misuse.message,
                         words.empty() ? "(a good end)" : words.c_str());
            std::exit(1);
        }
        std::printf("ok   misuse: %s\n", misuse.name);
    }
}

uint16_t bfloat_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

void expect(bool condition, const char* what, const char* file, int line) {
    if (condition) return;
    std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
    std::exit(1);
}

int64_t count(const char* name) {
    const int64_t value = lily_double_count(name);
    EXPECT(value >= 0);
    return value;
}

With::With(const char* name, int64_t value) : name_(name), before_(lily_double_set(name, value)) {
    EXPECT(before_ >= 0);
}

With::~With() {
    lily_double_set(name_.c_str(), before_);
}

NSString* text(const std::string& value) {
    return [NSString stringWithUTF8String:value.c_str()];
}

MTLCompileOptions* compile_options(NSUInteger major, NSUInteger minor) {
    MTLCompileOptions* const options = [MTLCompileOptions new];
    options.languageVersion = static_cast<MTLLanguageVersion>((major << 16) + minor);
    options.mathMode = MTLMathModeSafe;
    return options;
}

Gpu::Gpu() : device(MTLCreateSystemDefaultDevice()), queue([device newCommandQueue]) {
    EXPECT(queue != nil);
}

id<MTLLibrary> Gpu::compile(const char* kernel, const lily::Consts& consts) const {
    const lily::Variant variant{lily::find_kernel(kernel), consts};
    EXPECT(variant.kernel != nullptr);
    const std::string source = metal_source(family_of(*variant.kernel), std::span(&variant, 1), false);
    NSError* error = nil;
    return [device newLibraryWithSource:text(source) options:compile_options() error:&error];
}

id<MTLComputePipelineState> Gpu::pipeline(id<MTLLibrary> library, const char* name,
                                          NSArray<id<MTLBinaryArchive>>* archives, MTLPipelineOption options) const {
    MTLComputePipelineDescriptor* const descriptor = [MTLComputePipelineDescriptor new];
    const id<MTLFunction> function = [library newFunctionWithName:text(name)];
    if (function == nil) return nil;
    descriptor.computeFunction = function;
    descriptor.label = function.name;
    descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth = YES;
    if (archives != nil) descriptor.binaryArchives = archives;
    NSError* error = nil;
    return [device newComputePipelineStateWithDescriptor:descriptor options:options reflection:nil error:&error];
}

id<MTLBuffer> Gpu::buffer(NSUInteger bytes) const {
    return [device newBufferWithLength:bytes options:MTLResourceStorageModeShared];
}

id<MTLCommandBuffer> Gpu::command_buffer() const {
    MTLCommandBufferDescriptor* const descriptor = [MTLCommandBufferDescriptor new];
    descriptor.retainedReferences = NO;
    descriptor.errorOptions = MTLCommandBufferErrorOptionEncoderExecutionStatus;
    return [queue commandBufferWithDescriptor:descriptor];
}

id<MTLComputeCommandEncoder> Gpu::encoder(id<MTLCommandBuffer> command_buffer) const {
    const id<MTLComputeCommandEncoder> encoder =
        [command_buffer computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
    encoder.label = @"test";
    return encoder;
}

Norm::Norm(const Gpu& gpu, float weight) {
    pipeline = gpu.pipeline(gpu.compile("rms_norm"), "rms_norm");
    EXPECT(pipeline != nil);
    x = gpu.buffer(kRows * kDim * sizeof(float));
    w = gpu.buffer(kDim * sizeof(lily::bfloat));
    step = gpu.buffer(sizeof(lily::StepState));
    y = gpu.buffer(kRows * kDim * sizeof(lily::half));
    args = gpu.buffer(64);
    for (NSUInteger i = 0; i < kRows * kDim; ++i) static_cast<float*>(x.contents)[i] = 2;
    for (NSUInteger i = 0; i < kDim; ++i) static_cast<uint16_t*>(w.contents)[i] = bfloat_bits(weight);
    static_cast<lily::StepState*>(step.contents)->rows = kRows;
    const struct {
        uint32_t rows, dim;
        float eps;
    } values{kRows, kDim, 0};
    std::memcpy(args.contents, &values, sizeof(values));
}

void Norm::bind(id<MTLComputeCommandEncoder> encoder) const {
    const id<MTLBuffer> buffers[] = {x, w, step, y, args};
    const NSUInteger offsets[] = {0, 0, 0, 0, 0};
    [encoder setComputePipelineState:pipeline];
    [encoder setBuffers:buffers offsets:offsets withRange:NSMakeRange(0, 5)];
}

void Norm::dispatch(id<MTLComputeCommandEncoder> encoder) const {
    [encoder dispatchThreadgroups:MTLSizeMake(kRows, 1, 1) threadsPerThreadgroup:MTLSizeMake(256, 1, 1)];
}

void Norm::encode(id<MTLComputeCommandEncoder> encoder) const {
    bind(encoder);
    dispatch(encoder);
}

bool Norm::result_is(float value) const {
    for (NSUInteger i = 0; i < kRows * kDim; ++i) {
        const uint16_t bits = static_cast<const uint16_t*>(y.contents)[i];
        const float found = bits == 0 ? 0 : std::ldexp(1 + static_cast<float>(bits & 0x3ff) / 1024, (bits >> 10) - 15);
        if (found != value) return false;
    }
    return true;
}

bool run(const Gpu& gpu, const std::vector<const Norm*>& norms, bool barriers) {
    const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    const id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);
    for (const Norm* norm : norms) {
        norm->encode(encoder);
        if (barriers) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    }
    [encoder endEncoding];
    [command_buffer commit];
    [command_buffer waitUntilCompleted];
    return command_buffer.status == MTLCommandBufferStatusCompleted && command_buffer.error == nil;
}

int main(int argc, char** argv) {
    own_path = argv[0];
    if (argc > 1) return run_misuse(argv[1]);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    run_checks(runtime_checks());
    run_checks(double_checks());
    run_checks(error_checks());
    run_misuses();
    std::printf("all passed\n");
    return 0;
}
