// A double of libcuda, as far as Lily uses it: objects and memory are real, and what is done with them is checked;
// kernels are launched and compute nothing.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "objects.h"

using namespace cuda_double;

namespace lily::cuda {
#define LILY_DECLARE(member, name, parameters) LILY_DOUBLE_EXPORT Result name parameters;
LILY_CUDA_FUNCTIONS(LILY_DECLARE)
}  // namespace lily::cuda
// Objects of a kind that are alive.
LILY_DOUBLE_EXPORT int64_t lily_double_live(const char* kind);
// A number made of all memory of the device.
LILY_DOUBLE_EXPORT uint64_t lily_double_digest();

namespace {

namespace cuda = lily::cuda;
constexpr size_t kGrid[] = {0x7fffffff, 65535, 65535};
constexpr size_t kMostShared = 227 << 10, kMostThreads = 1024;

uint64_t new_handle() {
    return world().handles += 16;
}

// A launch, from what the caller has: arrays and arguments lie behind pointers.
Result take_launch(Call& call, const cuda::KernelNode& kernel, Launch& launch) {
    const uint64_t key = number(kernel.function);
    const Function* const function = call.find(world().functions, key, "function");
    const Module* const module = call.find(world().modules, key, "module");
    if (!function || !module) return kInvalidHandle;
    size_t threads = 1;
    for (int i = 0; i < 3; ++i) {
        threads *= kernel.block[i];
        if (kernel.grid[i] == 0 || kernel.grid[i] > kGrid[i]) return call.fail(kInvalidValue, "a bad grid");
    }
    if (threads == 0 || threads > kMostThreads) return call.fail(kInvalidValue, "a bad number of threads");
    if (kernel.shared_bytes > function->shared_bytes) return call.fail(kInvalidValue, "too much shared memory");
    if (!kernel.parameters || kernel.extra) return call.fail(kInvalidValue, "no parameters");
    launch = {key, {}};
    for (size_t i = 0; i < module->arrays; ++i) {
        launch.arrays.push_back(*static_cast<const DevicePointer*>(kernel.parameters[i]));
        if (!call.inside(launch.arrays.back(), 0)) return kInvalidValue;
    }
    return kernel.parameters[module->arrays] ? 0 : call.fail(kInvalidValue, "no arguments");
}

// What a launch needs when it runs.
void run(const Launch& launch) {
    if (!world().functions.contains(launch.function)) misuse("a kernel runs whose module is gone");
    for (const DevicePointer each : launch.arrays) {
        auto block = world().blocks.upper_bound(each);
        if (block == world().blocks.begin() || each - std::prev(block)->first > std::prev(block)->second.bytes)
            misuse("a kernel runs whose memory is gone");
    }
}

Result start(Call& call, cuda::Stream stream, const std::vector<Launch>& launches) {
    const auto work = [launches] {
        for (const Launch& each : launches) run(each);
    };
    return call.give(number(stream), work, launches.size());
}

Result allocate(Call& call, bool host, size_t bytes, void** made) {
    if (call.result) return call.result;
    if (bytes == 0) return call.fail(kInvalidValue, "no bytes");
    const auto all = static_cast<size_t>(setting("memory", int64_t{80} << 30));
    if (!host && bytes > all - world().used) return kNoMemory;
    *made = std::calloc(1, bytes);
    if (!*made) return kNoMemory;
    if (host && bytes < (1 << 20)) std::memset(*made, 0xa5, bytes);
    if (!host) world().used += bytes;
    world().blocks[reinterpret_cast<DevicePointer>(*made)] = {stack().back(), bytes, host};
    return 0;
}

Result release(Call& call, DevicePointer address, bool host) {
    const auto block = world().blocks.find(address);
    if (block == world().blocks.end() || block->second.host != host) return call.fail(kInvalidValue, "no such memory");
    // What is on its way ends before memory goes.
    for (auto& [key, stream] : world().streams)
        if (const Result result = call.wait(stream, stream.given)) call.result = result;
    free_block(block);
    return call.result;
}

template <class T>
Result destroy(Call& call, std::map<uint64_t, T>& table, uint64_t key, const char* what) {
    const auto found = table.find(key);
    if (found == table.end()) return call.fail(kInvalidHandle, what);
    table.erase(found);
    return call.result;
}

}  // namespace

int64_t lily_double_live(const char* kind) {
    World& all = world();
    const std::lock_guard guard(all.mutex);
    const auto pinned = static_cast<size_t>(
        std::count_if(all.blocks.begin(), all.blocks.end(), [](const auto& each) { return each.second.host; }));
    size_t running = 0;
    for (const auto& [key, stream] : all.streams)
        for (const Work& work : stream.queue) running += work.launches;
    const std::pair<const char*, size_t> counts[] = {{"contexts", all.contexts.size()},
                                                     {"memory", all.blocks.size() - pinned},
                                                     {"pinned", pinned},
                                                     {"streams", all.streams.size()},
                                                     {"events", all.events.size()},
                                                     {"modules", all.modules.size()},
                                                     {"graphs", all.graphs.size()},
                                                     {"execs", all.execs.size()},
                                                     {"current", stack().size()},
                                                     {"running", running},
                                                     {"orphans", all.orphans}};
    if (std::strcmp(kind, "orphans") == 0) all.orphans = 0;
    for (const auto& [name, count] : counts)
        if (std::strcmp(name, kind) == 0) return static_cast<int64_t>(count);
    return -1;
}

uint64_t lily_double_digest() {
    World& all = world();
    const std::lock_guard guard(all.mutex);
    uint64_t sum = 0;
    for (const auto& [address, block] : all.blocks) {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(address);
        for (size_t i = 0; i < block.bytes && !block.host; ++i) sum += bytes[i] * (i % 65521 + 1);
    }
    return sum;
}

namespace lily::cuda {

Result cuInit(unsigned flags) {
    if (flags) return kInvalidValue;
    if (const auto result = static_cast<Result>(setting("init", 0))) return result;
    const std::lock_guard guard(world().mutex);
    world().initialised = true;
    return begin("cuInit").result;
}

Result cuDriverGetVersion(int* version) {
    if (const Result result = begin("cuDriverGetVersion").result) return result;
    *version = static_cast<int>(setting("version", 13000));
    return 0;
}

Result cuGetErrorString(Result result, const char** text) {
    static constexpr std::pair<Result, const char*> kTexts[] = {
        {kInvalidValue, "invalid argument"},         {kNoMemory, "out of memory"},
        {100, "no CUDA-capable device is detected"}, {kInvalidContext, "invalid device context"},
        {kInvalidHandle, "invalid resource handle"}, {700, "an illegal memory access was encountered"},
        {719, "unspecified launch failure"}};
    for (const auto& [each, name] : kTexts)
        if (each == result) *text = name;
    return *text ? 0 : kInvalidValue;
}

Result cuDeviceGetCount(int* count) {
    Call call("cuDeviceGetCount", true);
    *count = static_cast<int>(setting("devices", 1));
    return call.result;
}

Result cuDeviceGet(DeviceHandle* device, int index) {
    Call call("cuDeviceGet", true);
    if (index >= setting("devices", 1)) return kInvalidDevice;
    *device = index;
    return call.result;
}

Result cuDeviceGetName(char* name, int bytes, DeviceHandle device) {
    Call call("cuDeviceGetName", true);
    std::snprintf(name, static_cast<size_t>(bytes), "Double %d", device);
    return call.result;
}

Result cuDeviceGetAttribute(int* value, int attribute, DeviceHandle) {
    Call call("cuDeviceGetAttribute", true);
    *value = 0;
    if (attribute == kMajor) *value = static_cast<int>(setting("major", 9));
    if (attribute == kPageableMemoryAccess) *value = static_cast<int>(setting("pageable", 0));
    return call.result;
}

Result cuDevicePrimaryCtxRetain(Context* context, DeviceHandle device) {
    Call call("cuDevicePrimaryCtxRetain", true);
    if (call.result) return call.result;
    for (auto& [key, each] : world().contexts)
        if (each.device == device) {
            ++each.users;
            *context = handle<ContextObject>(key);
            return 0;
        }
    const uint64_t key = new_handle();
    world().contexts[key] = {.device = device, .users = 1};
    *context = handle<ContextObject>(key);
    return 0;
}

Result cuDevicePrimaryCtxRelease_v2(DeviceHandle device) {
    Call call("cuDevicePrimaryCtxRelease_v2", true);
    for (auto& [key, each] : world().contexts)
        if (each.device == device) {
            if (--each.users == 0) destroy_context(uint64_t{key});
            return call.result;
        }
    return call.fail(kInvalidContext, "nobody has the context");
}

Result cuCtxPushCurrent_v2(Context context) {
    Call call("cuCtxPushCurrent_v2", true, number(context));
    const auto found = world().contexts.find(number(context));
    if (found == world().contexts.end()) return call.fail(kInvalidContext, "no such context");
    if (!call.result && setting("push_fails", 0)) call.result = found->second.broken;
    if (!call.result) stack().push_back(number(context));
    return call.result;
}

Result cuCtxPopCurrent_v2(Context* context) {
    Call call("cuCtxPopCurrent_v2", true);
    if (stack().empty()) return call.fail(kInvalidContext, "nothing is current");
    *context = handle<ContextObject>(stack().back());
    stack().pop_back();
    return call.result;
}

Result cuMemGetInfo_v2(size_t* available, size_t* total) {
    Call call("cuMemGetInfo_v2");
    *total = static_cast<size_t>(setting("memory", int64_t{80} << 30));
    *available = *total - world().used;
    return call.result;
}

Result cuMemAlloc_v2(DevicePointer* pointer, size_t bytes) {
    Call call("cuMemAlloc_v2");
    void* made = nullptr;
    const Result result = allocate(call, false, bytes, &made);
    if (!result) *pointer = reinterpret_cast<DevicePointer>(made);
    return result;
}

Result cuMemFree_v2(DevicePointer pointer) {
    Call call("cuMemFree_v2");
    return release(call, pointer, false);
}

Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
    Call call("cuMemHostAlloc");
    return flags ? kInvalidValue : allocate(call, true, bytes, pointer);
}

Result cuMemFreeHost(void* pointer) {
    Call call("cuMemFreeHost");
    return release(call, reinterpret_cast<DevicePointer>(pointer), true);
}

Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t n, Stream stream) {
    Call call("cuMemcpyHtoDAsync_v2");
    if (call.result) return call.result;
    if (!call.inside(to, n)) return kInvalidValue;
    if (setting("pageable", 0))  // read when the copy runs
        return call.give(number(stream), [=] { std::memcpy(reinterpret_cast<void*>(to), from, n); });
    const auto* const bytes = static_cast<const char*>(from);
    return call.give(number(stream), [to, copy = std::vector<char>(bytes, bytes + n)] {
        std::memcpy(reinterpret_cast<void*>(to), copy.data(), copy.size());
    });
}

Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t n, Stream stream) {
    Call call("cuMemcpyDtoHAsync_v2");
    if (call.result) return call.result;
    if (!call.inside(from, n)) return kInvalidValue;
    const auto work = [=] { std::memcpy(to, reinterpret_cast<const void*>(from), n); };
    const Result result = call.give(number(stream), work);
    if (result || setting("pageable", 0)) return result;
    cuda_double::Stream& in = world().streams.at(number(stream));  // into memory that is not pinned it comes at once
    return call.wait(in, in.given);
}

Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t n, Stream stream) {
    Call call("cuMemcpyDtoDAsync_v2");
    if (call.result) return call.result;
    if (!call.inside(to, n) || !call.inside(from, n)) return kInvalidValue;
    return call.give(number(stream),
                     [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), n); });
}

Result cuMemcpy2DAsync_v2(const RowsCopy* copy, Stream stream) {
    Call call("cuMemcpy2DAsync_v2");
    if (call.result) return call.result;
    const RowsCopy c = *copy;
    if (c.from_kind != kHostMemory || c.to_kind != kDeviceMemory || c.bytes == 0 || c.rows == 0 ||
        c.from_pitch < c.bytes || c.to_pitch < c.bytes)
        return call.fail(kInvalidValue, "a copy that Lily does not make");
    if (!call.inside(c.to_device, (c.rows - 1) * c.to_pitch + c.bytes) ||
        !call.inside(reinterpret_cast<DevicePointer>(c.from_host), (c.rows - 1) * c.from_pitch + c.bytes))
        return kInvalidValue;
    return call.give(number(stream), [c] {
        for (size_t i = 0; i < c.rows; ++i)
            std::memcpy(reinterpret_cast<char*>(c.to_device) + i * c.to_pitch,
                        static_cast<const char*>(c.from_host) + i * c.from_pitch, c.bytes);
    });
}

Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t n, Stream stream) {
    Call call("cuMemsetD8Async");
    if (call.result) return call.result;
    if (!call.inside(to, n)) return kInvalidValue;
    return call.give(number(stream), [=] { std::memset(reinterpret_cast<void*>(to), value, n); });
}

Result cuStreamCreate(Stream* stream, unsigned flags) {
    Call call("cuStreamCreate");
    if (call.result) return call.result;
    if (flags != kStreamNonBlocking) return kInvalidValue;
    const uint64_t key = new_handle();
    world().streams[key] = {.context = stack().back(), .queue = {}};
    *stream = handle<StreamObject>(key);
    return 0;
}

Result cuStreamDestroy_v2(Stream stream) {
    Call call("cuStreamDestroy_v2");
    if (cuda_double::Stream* const found = call.find(world().streams, number(stream), "stream"))
        call.wait(*found, found->given);
    return destroy(call, world().streams, number(stream), "no such stream");
}

Result cuStreamSynchronize(Stream stream) {
    Call call("cuStreamSynchronize");
    if (call.result) return call.result;
    cuda_double::Stream* const found = call.find(world().streams, number(stream), "stream");
    return found ? call.wait(*found, found->given) : kInvalidHandle;
}

Result cuEventCreate(Event* event, unsigned flags) {
    Call call("cuEventCreate");
    if (call.result) return call.result;
    if (flags & ~(kEventBlockingSync | kEventDisableTiming)) return kInvalidValue;
    const uint64_t key = new_handle();
    world().events[key] = {.context = stack().back(), .timing = (flags & kEventDisableTiming) == 0};
    *event = handle<EventObject>(key);
    return 0;
}

Result cuEventDestroy_v2(Event event) {
    Call call("cuEventDestroy_v2");
    return destroy(call, world().events, number(event), "no such event");
}

Result cuEventRecord(Event event, Stream stream) {
    Call call("cuEventRecord");
    if (call.result) return call.result;
    cuda_double::Event* const found = call.find(world().events, number(event), "event");
    const cuda_double::Stream* const in = call.find(world().streams, number(stream), "stream");
    if (!found || !in) return kInvalidHandle;
    found->stream = number(stream);
    found->place = in->given;
    return 0;
}

Result cuEventSynchronize(Event event) {
    Call call("cuEventSynchronize");
    if (call.result) return call.result;
    const cuda_double::Event* const found = call.find(world().events, number(event), "event");
    if (!found) return kInvalidHandle;
    if (!found->stream) return 0;
    cuda_double::Stream* const in = call.find(world().streams, found->stream, "stream");
    return in ? call.wait(*in, found->place) : kInvalidHandle;
}

Result cuEventElapsedTime(float* milliseconds, Event from, Event to) {
    Call call("cuEventElapsedTime");
    if (call.result) return call.result;
    for (const Event each : {from, to}) {
        const cuda_double::Event* const found = call.find(world().events, number(each), "event");
        if (!found) return kInvalidHandle;
        if (!found->timing || !found->stream) return call.fail(kInvalidHandle, "an event without a time");
    }
    *milliseconds = 1;
    return 0;
}

Result cuModuleLoadData(Module* module, const void* image) {
    Call call("cuModuleLoadData");
    if (call.result) return call.result;
    char kernel[200];
    size_t arrays = 0;
    if (std::sscanf(static_cast<const char*>(image), "LILY %199s %zu", kernel, &arrays) != 2) return kInvalidImage;
    const uint64_t key = new_handle();
    world().modules[key] = {.context = stack().back(), .kernel = kernel, .arrays = arrays};
    *module = handle<ModuleObject>(key);
    return 0;
}

Result cuModuleUnload(Module module) {
    Call call("cuModuleUnload");
    world().functions.erase(number(module));
    return destroy(call, world().modules, number(module), "no such module");
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
    Call call("cuModuleGetFunction");
    if (call.result) return call.result;
    const cuda_double::Module* const found = call.find(world().modules, number(module), "module");
    if (!found) return kInvalidHandle;
    if (found->kernel != name) return kNotFound;
    world().functions[number(module)];
    *function = handle<FunctionObject>(number(module));
    return 0;
}

Result cuFuncGetAttribute(int* value, int, Function function) {
    Call call("cuFuncGetAttribute");
    if (call.result) return call.result;
    *value = 0;
    return call.find(world().functions, number(function), "function") ? 0 : kInvalidHandle;
}

Result cuFuncSetAttribute(Function function, int attribute, int value) {
    Call call("cuFuncSetAttribute");
    if (call.result) return call.result;
    cuda_double::Function* const found = call.find(world().functions, number(function), "function");
    if (!found) return kInvalidHandle;
    if (attribute != kMaxDynamicShared || value < 0 || static_cast<size_t>(value) > kMostShared) return kInvalidValue;
    found->shared_bytes = static_cast<size_t>(value);
    return 0;
}

Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,
                      void** extra) {
    Call call("cuLaunchKernel");
    if (call.result) return call.result;
    Launch launch{};
    const KernelNode node{.function = function,
                          .grid = {grid_x, grid_y, grid_z},
                          .block = {block_x, block_y, block_z},
                          .shared_bytes = shared_bytes,
                          .parameters = parameters,
                          .extra = extra,
                          .kernel = nullptr,
                          .context = nullptr};
    if (const Result result = take_launch(call, node, launch)) return result;
    return start(call, stream, {launch});
}

Result cuGraphCreate(Graph* graph, unsigned) {
    Call call("cuGraphCreate");
    if (call.result) return call.result;
    const uint64_t key = new_handle();
    world().graphs[key];
    *graph = handle<GraphObject>(key);
    return 0;
}

// Graphs belong to no context, so they go without one too.
Result cuGraphDestroy(Graph graph) {
    Call call("cuGraphDestroy", true);
    return destroy(call, world().graphs, number(graph), "no such graph");
}

Result cuGraphAddKernelNode_v2(GraphNode* node, Graph graph, const GraphNode*, size_t count, const KernelNode* k) {
    Call call("cuGraphAddKernelNode_v2");
    if (call.result) return call.result;
    cuda_double::Graph* const found = call.find(world().graphs, number(graph), "graph");
    if (!found) return kInvalidHandle;
    if (count) return kInvalidValue;
    Launch launch{};
    if (const Result result = take_launch(call, *k, launch)) return result;
    const uint64_t key = new_handle();
    found->nodes[key] = std::move(launch);
    *node = handle<GraphNodeObject>(key);
    return 0;
}

// Of launches in the order in which they were added: that rules circles out.
Result cuGraphAddDependencies_v2(Graph graph, const GraphNode* from, const GraphNode* to, const EdgeData* data,
                                 size_t n) {
    Call call("cuGraphAddDependencies_v2");
    if (call.result) return call.result;
    cuda_double::Graph* const found = call.find(world().graphs, number(graph), "graph");
    if (!found) return kInvalidHandle;
    for (size_t i = 0; i < n; ++i) {
        const uint64_t parent = number(from[i]), child = number(to[i]);
        if (!found->nodes.contains(parent) || !found->nodes.contains(child) || parent >= child || data[i].type > 1)
            return call.fail(kInvalidValue, "a bad edge");
        std::vector<uint64_t>& after = found->after[child];
        if (std::find(after.begin(), after.end(), parent) != after.end())
            return call.fail(kInvalidValue, "an edge that is there already");
        after.push_back(parent);
    }
    return 0;
}

Result cuGraphInstantiateWithFlags(GraphExec* exec, Graph graph, unsigned long long) {
    Call call("cuGraphInstantiateWithFlags");
    if (call.result) return call.result;
    const cuda_double::Graph* const found = call.find(world().graphs, number(graph), "graph");
    if (!found) return kInvalidHandle;
    const uint64_t key = new_handle();
    for (const auto& node : found->nodes) world().execs[key].launches.push_back(node.second);
    *exec = handle<GraphExecObject>(key);
    return 0;
}

Result cuGraphExecDestroy(GraphExec exec) {
    Call call("cuGraphExecDestroy", true);
    return destroy(call, world().execs, number(exec), "no such executable graph");
}

Result cuGraphUpload(GraphExec exec, Stream stream) {
    Call call("cuGraphUpload");
    if (call.result) return call.result;
    if (!call.find(world().execs, number(exec), "executable graph")) return kInvalidHandle;
    return call.give(number(stream), [] {});
}

Result cuGraphLaunch(GraphExec exec, Stream stream) {
    Call call("cuGraphLaunch");
    if (call.result) return call.result;
    const Exec* const found = call.find(world().execs, number(exec), "executable graph");
    if (!found) return kInvalidHandle;
    return start(call, stream, found->launches);
}

}  // namespace lily::cuda
