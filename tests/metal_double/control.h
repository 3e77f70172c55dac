// Settings, counts and injected errors of the double, for its own sources; double.h says what they mean.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace metal_double {

enum class Setting {
    kWidth,
    kThreads,
    kOrder,
    kSeed,
    kHazards,
    kLatency,
    kHold,
    kDispatchTime,
    kLateHandlers,
    kHandlerObserves,
    kCompileWarnings,
    kExecutionError,
    kDevice,
    kOsMajor,
    kOsMinor,
    kOsPatch,
    kAppleFamily,
    kMetal4,
    kMaxBufferLength,
    kWorkingSet,
    kMaxThreads,
    kMaxCommandBuffers,
    kConstantAlignment,
    kCaptureSupported,
    kCount,
};

enum class Text { kOsBuild, kGpuName, kCachesDirectory, kObjectsDirectory, kCount };

// Calls that can be made to fail.
enum class Failure {
    kDevice,
    kQueue,
    kBuffer,
    kLibrary,
    kFunction,
    kPipeline,
    kPipelineLookup,
    kArchiveOpen,
    kArchiveAdd,
    kArchiveSerialize,
    kResidencySet,
    kCommandBuffer,
    kEncoder,
    kExecution,
    kCapture,
    kCount,
};

enum class Counter {
    // What exists now; a reset keeps these.
    kBufferBytes,
    kResidentBuffers,
    kAttachedResidencySets,
    kInFlight,
    // What happened.
    kLibraries,
    kPipelinesCompiled,
    kPipelinesFromArchive,
    kArchiveMisses,
    kArchivesOpened,
    kArchivesSaved,
    kCommandBuffers,
    kFailedCommandBuffers,
    kEncoders,
    kDispatches,
    kBarriers,
    kMaxInFlight,
    kUncheckedCommandBuffers,
    kCaptures,
    kCapturedCommandBuffers,
    kCount,
};

int64_t setting(Setting which);
// The system's true version: macOS 26 may call itself 16.
int64_t system_major();
std::string text(Text which);
// Bytes of threadgroup memory that a kernel's pipelines report.
int64_t threadgroup_memory(std::string_view kernel);

// True when this call is the one that shall fail.
bool fails(Failure which);

int64_t add(Counter which, int64_t difference = 1);  // returns the new count
void raise_to(Counter which, int64_t value);

[[noreturn]] void misuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace metal_double
