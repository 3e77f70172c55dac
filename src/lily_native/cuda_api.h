// CUDA's driver and its run-time compiler, as far as Lily uses them. Both are opened at run time, so that Lily builds
// and starts without them. Names, values and layouts are those of cuda.h and nvrtc.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lily::cuda {

using Result = int;
inline constexpr Result kSuccess = 0, kOutOfMemory = 2;

// What a call returned, and which function it was, for messages.
struct Outcome {
    Result result;
    const char* function;

    bool ok() const { return result == kSuccess; }
};

// A function of one of the libraries.
template <class Signature>
struct Entry;
template <class... Types>
struct Entry<Result(Types...)> {
    Result (*address)(Types...);
    const char* name;

    Outcome operator()(Types... arguments) const { return {address(arguments...), name}; }
};

using DeviceHandle = int;
using DevicePointer = unsigned long long;
using Context = struct ContextObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using Graph = struct GraphObject*;
using GraphNode = struct GraphNodeObject*;
using GraphExec = struct GraphExecObject*;

enum DeviceAttribute : int {
    kMajor = 75,
    kMinor = 76,
    kPageableMemoryAccess = 88,
};
enum FunctionAttribute : int {
    kLocalBytes = 3,
    kMaxDynamicShared = 8,
};
inline constexpr unsigned kStreamNonBlocking = 1, kEventBlockingSync = 1, kEventDisableTiming = 2;

struct KernelNode {
    Function function;
    unsigned grid[3], block[3], shared_bytes;
    void** parameters;
    void** extra;
    void* kernel;
    Context context;
};

inline constexpr int kHostMemory = 1, kDeviceMemory = 2;
// Copies rows of as many bytes; the next one is a pitch further.
struct RowsCopy {
    size_t from_x = 0, from_y = 0;
    int from_kind;
    const void* from_host = nullptr;
    DevicePointer from_device = 0;
    void* from_array = nullptr;
    size_t from_pitch, to_x = 0, to_y = 0;
    int to_kind;
    void* to_host = nullptr;
    DevicePointer to_device = 0;
    void* to_array = nullptr;
    size_t to_pitch, bytes, rows;
};

// An edge after which a kernel may start before the one it depends on has ended (it waits for it itself), or a plain
// one where everything is 0.
struct EdgeData {
    unsigned char from_port, to_port, type, reserved[5];
};
inline constexpr EdgeData kPlainEdge{}, kProgrammaticEdge{1, 0, 1, {}};

// Member and exported name; the suffixes are those that cuda.h gives them.
#define LILY_CUDA_FUNCTIONS(F)                                                                                   \
    F(init, cuInit, (unsigned flags))                                                                            \
    F(driver_version, cuDriverGetVersion, (int* version))                                                        \
    F(error_string, cuGetErrorString, (Result result, const char** text))                                        \
    F(device_count, cuDeviceGetCount, (int* count))                                                              \
    F(device_get, cuDeviceGet, (DeviceHandle * device, int index))                                               \
    F(device_name, cuDeviceGetName, (char* name, int bytes, DeviceHandle device))                                \
    F(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, DeviceHandle device))                  \
    F(retain_context, cuDevicePrimaryCtxRetain, (Context * context, DeviceHandle device))                        \
    F(release_context, cuDevicePrimaryCtxRelease_v2, (DeviceHandle device))                                      \
    F(push_context, cuCtxPushCurrent_v2, (Context context))                                                      \
    F(pop_context, cuCtxPopCurrent_v2, (Context * context))                                                      \
    F(memory_info, cuMemGetInfo_v2, (size_t* available, size_t* total))                                          \
    F(allocate, cuMemAlloc_v2, (DevicePointer * pointer, size_t bytes))                                          \
    F(free, cuMemFree_v2, (DevicePointer pointer))                                                               \
    F(allocate_host, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned flags))                             \
    F(free_host, cuMemFreeHost, (void* pointer))                                                                 \
    F(to_device, cuMemcpyHtoDAsync_v2, (DevicePointer to, const void* from, size_t n, Stream s))                 \
    F(to_host, cuMemcpyDtoHAsync_v2, (void* to, DevicePointer from, size_t n, Stream s))                         \
    F(copy, cuMemcpyDtoDAsync_v2, (DevicePointer to, DevicePointer from, size_t bytes, Stream s))                \
    F(copy_rows, cuMemcpy2DAsync_v2, (const RowsCopy* copy, Stream s))                                           \
    F(fill, cuMemsetD8Async, (DevicePointer to, unsigned char value, size_t n, Stream s))                        \
    F(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                          \
    F(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                       \
    F(stream_wait, cuStreamSynchronize, (Stream stream))                                                         \
    F(event_create, cuEventCreate, (Event * event, unsigned flags))                                              \
    F(event_destroy, cuEventDestroy_v2, (Event event))                                                           \
    F(event_record, cuEventRecord, (Event event, Stream stream))                                                 \
    F(event_wait, cuEventSynchronize, (Event event))                                                             \
    F(event_elapsed, cuEventElapsedTime, (float* milliseconds, Event from, Event to))                            \
    F(module_load, cuModuleLoadData, (Module * module, const void* image))                                       \
    F(module_unload, cuModuleUnload, (Module module))                                                            \
    F(module_function, cuModuleGetFunction, (Function * function, Module module, const char* n))                 \
    F(function_attribute, cuFuncGetAttribute, (int* value, int attribute, Function function))                    \
    F(set_function_attribute, cuFuncSetAttribute, (Function function, int attribute, int value))                 \
    F(launch, cuLaunchKernel,                                                                                    \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared_bytes, Stream s, void** parameters, void** extra))                      \
    F(graph_create, cuGraphCreate, (Graph * graph, unsigned flags))                                              \
    F(graph_destroy, cuGraphDestroy, (Graph graph))                                                              \
    F(graph_add_kernel, cuGraphAddKernelNode_v2,                                                                 \
      (GraphNode * node, Graph graph, const GraphNode* after, size_t count, const KernelNode* k))                \
    F(graph_add_edges, cuGraphAddDependencies_v2,                                                                \
      (Graph graph, const GraphNode* from, const GraphNode* to, const EdgeData* data, size_t n))                 \
    F(graph_instantiate, cuGraphInstantiateWithFlags, (GraphExec * exec, Graph graph, unsigned long long flags)) \
    F(graph_exec_destroy, cuGraphExecDestroy, (GraphExec exec))                                                  \
    F(graph_upload, cuGraphUpload, (GraphExec exec, Stream stream))                                              \
    F(graph_launch, cuGraphLaunch, (GraphExec exec, Stream stream))

// The driver's functions. They need a current context where cuda.h says so.
struct Driver {
#define LILY_MEMBER(member, name, parameters) Entry<Result parameters> member;
    LILY_CUDA_FUNCTIONS(LILY_MEMBER)
#undef LILY_MEMBER
};

using Program = struct ProgramObject*;

#define LILY_NVRTC_FUNCTIONS(F)                                                                               \
    F(version, nvrtcVersion, (int* major, int* minor))                                                        \
    F(create, nvrtcCreateProgram,                                                                             \
      (Program * program, const char* source, const char* name, int headers, const char* const* header_texts, \
       const char* const* header_names))                                                                      \
    F(destroy, nvrtcDestroyProgram, (Program * program))                                                      \
    F(compile, nvrtcCompileProgram, (Program program, int count, const char* const* options))                 \
    F(log_size, nvrtcGetProgramLogSize, (Program program, size_t* bytes))                                     \
    F(log, nvrtcGetProgramLog, (Program program, char* text))                                                 \
    F(cubin_size, nvrtcGetCUBINSize, (Program program, size_t* bytes))                                        \
    F(cubin, nvrtcGetCUBIN, (Program program, char* image))

struct Compiler {
    const char* (*error_string)(Result result);
#define LILY_MEMBER(member, name, parameters) Entry<Result parameters> member;
    LILY_NVRTC_FUNCTIONS(LILY_MEMBER)
#undef LILY_MEMBER
};

// Opened once and kept for the life of the process. Throw kUnsupported when there is no such library, or none that is
// new enough.
const Driver& driver();
const Compiler& compiler();

// Whether it is an error that stays with the context, whatever is called from then on.
bool stays(Result result);
// The function and CUDA's own text, and what to do where that is known.
std::string text_of(const Outcome& outcome);
// Throws kOutOfMemory or kDevice with that text unless all went well.
void check(const Outcome& outcome, const std::string& what);
[[noreturn]] void fail(const Outcome& outcome, const std::string& what);

}  // namespace lily::cuda
