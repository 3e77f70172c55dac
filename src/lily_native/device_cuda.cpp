// The CUDA device: NVIDIA GPUs from compute capability 8.0 on, on machines with CUDA's driver and run-time compiler.
//
// The shaders' text is compiled for the GPU when the device opens, a module per variant. A plan becomes a graph whose
// edges are the plan's dependencies; a submission launches graphs into one stream, and an event tells when they have
// ended. The device shares the process's usual context with other users of the GPU and leaves theirs current.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <tuple>
#include <utility>

#include "cuda_api.h"
#include "cuda_compiler.h"
#include "cuda_memory.h"
#include "device.h"
#include "error.h"
#include "grids.h"
#include "shader_source.h"
#include "submissions.h"
#include "thread_pool.h"

namespace lily {
namespace {

constexpr int kOldest = 8;                          // compute capability: bf16 and its conversions
constexpr uint64_t kReserve = uint64_t{256} << 20;  // of the free memory, for code and graphs
constexpr uint64_t kLargeMemory = uint64_t{40} << 30;
constexpr uint32_t kMostGroups = 65535;  // along y and z of a grid

struct Kernel {
    cuda::Module module = nullptr;
    cuda::Function function = nullptr;
    CudaGroup group{};
    uint32_t local_bytes = 0;
};

// A launch with its function and where its slots are.
struct Node {
    const Launch* launch;
    cuda::KernelNode kernel;
    std::array<cuda::DevicePointer, kMaxSlots> slots;
    std::array<void*, kMaxSlots + 1> parameters;
};

class CudaProgram final : public Program {
public:
    CudaProgram(std::shared_ptr<GpuContext> context, const Plan& plan)
        : context_(std::move(context)), name(plan.name), launches(plan.launches), nodes(plan.launches.size()) {}
    ~CudaProgram() override {
        const Current current(*context_, std::nothrow);  // else without: graphs outlive a context
        if (exec) cuda::driver().graph_exec_destroy(exec);
        if (graph) cuda::driver().graph_destroy(graph);
    }

private:
    std::shared_ptr<GpuContext> context_;

public:
    std::string name;
    std::vector<Launch> launches;
    std::vector<Node> nodes;
    cuda::Graph graph = nullptr;
    cuda::GraphExec exec = nullptr;
};

class CudaDevice final : public Device {
public:
    CudaDevice(uint32_t index, bool mma);
    ~CudaDevice() override;

    BufferId allocate(const char* name, uint64_t bytes, bool shared) override;
    void release(BufferId buffer) override;
    uint64_t max_buffer_bytes() const override { return UINT64_MAX; }
    uint64_t memory_limit() const override;
    std::byte* map(BufferId buffer) override { return memory(buffer).host; }
    void write(BufferId buffer, uint64_t offset, const void* from, uint64_t bytes) override;
    void read(BufferId buffer, uint64_t offset, void* to, uint64_t bytes) override;
    void copy(BufferId from, uint64_t from_offset, BufferId to, uint64_t to_offset, uint64_t bytes) override;
    std::unique_ptr<Upload> upload() override;
    void compile(std::span<const Variant> variants) override;
    std::unique_ptr<Program> prepare(const Plan& plan) override;
    Ticket submit(std::span<const Program* const> programs) override;
    void wait(Ticket ticket) override;
    uint32_t queue_depth() const override { return trace_ ? 1 : 2; }
    std::string name() const override { return "cuda"; }
    std::vector<std::pair<std::string, std::string>> info() const override;
    // Without warpgroup instructions, higher tiles do not fit into registers.
    TileChoice tiles() const override {
        return {.rows = std::span(kGpuTileRows).first(architecture_.back() == 'a' ? 4 : 3), .floors = 4};
    }
    // Two threadgroups of each KV head for a multiprocessor, of which the largest of these GPUs have about that many.
    AttentionSplit attention_split() const override { return {.whole = 64, .block = 64, .most = 128}; }
    uint32_t prefill_rows() const override { return large_ ? kLargePrefillChunk : kPrefillChunk; }
    uint32_t most_rows() const override { return kMostGroups / TILE_K * TILE_K; }
    std::vector<Variant> variants() const override;

private:
    struct Flight {
        Ticket ticket;
        cuda::Event event;
        std::string what;
    };

    const Memory& memory(BufferId buffer) const;
    const Memory& range(BufferId buffer, uint64_t offset, uint64_t bytes, const std::string& what) const;
    void load(const Variant& variant, Kernel& made);
    void finish_copy(const char* what);
    void examine(const Variant& variant, Kernel& made) const;
    void place(const Launch& launch, Node& node) const;
    void build_graph(CudaProgram& program, const Plan& plan) const;
    [[noreturn]] void fail_flight(const cuda::Outcome& outcome, const std::string& what);
    void run_traced(const CudaProgram& program);
    cuda::Event take_event();

    std::shared_ptr<GpuContext> context_;
    std::string gpu_, architecture_;
    CudaCompiler compiler_;
    bool large_ = false;       // has memory for much more than the weights
    bool reads_host_ = false;  // any memory of the host, so a copy from it may be late
    bool programmatic_;        // launches may overlap with the end of the one before
    cuda::Stream stream_ = nullptr;
    std::vector<Memory> buffers_;
    std::map<VariantKey, Kernel> kernels_;
    std::deque<Flight> flights_;
    std::vector<cuda::Event> events_;  // not in use
    std::unique_ptr<Trace> trace_;     // none unless asked for
    Ticket ticket_ = 0;
    std::string lost_;  // why nothing works any more
};

std::string architecture_of(const GpuContext& context, bool mma) {
    const int major = context.attribute(cuda::kMajor), minor = context.attribute(cuda::kMinor);
    if (major < kOldest)
        throw Error(ErrorKind::kUnsupported, "cuda: " + context.name() + " has compute capability " +
                                                 std::to_string(major) + "." + std::to_string(minor) +
                                                 ", 8.0 or later is needed");
    const std::string name = cuda_architecture(major, minor);
    return mma && name.back() == 'a' ? name.substr(0, name.size() - 1) : name;
}

CudaDevice::CudaDevice(uint32_t index, bool mma)
    : context_(std::make_shared<GpuContext>(index)),
      gpu_(context_->name()),
      architecture_(architecture_of(*context_, mma)),
      compiler_(architecture_, cuda_cache()),
      programmatic_(context_->attribute(cuda::kMajor) >= 9) {
    cuda::compiler();  // fails here, where there is none
    const Current current(*context_);
    large_ = context_->memory().second >= kLargeMemory;
    reads_host_ = context_->attribute(cuda::kPageableMemoryAccess) != 0;
    check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking), "cannot make a stream");
    if (debug_wants("trace")) trace_ = std::make_unique<Trace>();
}

// What is in flight ends first. Errors have nowhere to go.
CudaDevice::~CudaDevice() {
    if (trace_) trace_->print();
    const cuda::Driver& driver = cuda::driver();
    const Current current(*context_, std::nothrow);
    if (!current) return;
    driver.stream_wait(stream_);
    for (const Flight& flight : flights_) driver.event_destroy(flight.event);
    for (const cuda::Event event : events_) driver.event_destroy(event);
    for (const auto& entry : kernels_) driver.module_unload(entry.second.module);
    for (const Memory& buffer : buffers_) {
        if (buffer.host)
            driver.free_host(buffer.host);
        else if (buffer.address)
            driver.free(buffer.address);
    }
    driver.stream_destroy(stream_);
}

uint64_t CudaDevice::memory_limit() const {
    const uint64_t available = context_->memory().first;
    return available > kReserve ? available - kReserve : 0;
}

BufferId CudaDevice::allocate(const char* name, uint64_t bytes, bool shared) {
    const cuda::Driver& driver = cuda::driver();
    const Current current(*context_);
    Memory made{.bytes = std::max<uint64_t>(bytes, 1)};
    const std::string what = std::string(name) + ": cannot allocate " + std::to_string(bytes) + " bytes";
    const auto unused = std::find_if(buffers_.begin(), buffers_.end(), [](const Memory& m) { return !m.address; });
    const auto index = static_cast<uint32_t>(unused - buffers_.begin());
    if (unused == buffers_.end()) buffers_.emplace_back();
    if (shared) {
        void* host = nullptr;
        check(driver.allocate_host(&host, made.bytes, 0), what);
        std::memset(host, 0, made.bytes);
        made.host = static_cast<std::byte*>(host);
        made.address = reinterpret_cast<cuda::DevicePointer>(host);  // one address space
        buffers_[index] = made;
    } else {
        check(driver.allocate(&made.address, made.bytes), what);
        if (const cuda::Outcome outcome = driver.fill(made.address, 0, made.bytes, stream_); !outcome.ok()) {
            driver.free(made.address);
            fail(outcome, what);
        }
        buffers_[index] = made;
    }
    return {index};
}

void CudaDevice::release(BufferId buffer) {
    const Memory old = memory(buffer);
    const Current current(*context_);
    buffers_[buffer.index] = {};
    if (old.host)
        check(cuda::driver().free_host(old.host), "cannot free memory");
    else
        check(cuda::driver().free(old.address), "cannot free memory");
}

const Memory& CudaDevice::memory(BufferId buffer) const {
    if (buffer.index >= buffers_.size() || !buffers_[buffer.index].address)
        throw Error(ErrorKind::kLogic, "cuda: no buffer " + std::to_string(buffer.index));
    return buffers_[buffer.index];
}

const Memory& CudaDevice::range(BufferId buffer, uint64_t offset, uint64_t bytes, const std::string& what) const {
    const Memory& all = memory(buffer);
    if (offset > all.bytes || bytes > all.bytes - offset)
        throw Error(ErrorKind::kLogic, "cuda: " + what + ": leaves its buffer");
    return all;
}

void CudaDevice::write(BufferId buffer, uint64_t offset, const void* from, uint64_t bytes) {
    const Memory& to = range(buffer, offset, bytes, "write");
    const Current current(*context_);
    check(cuda::driver().to_device(to.address + offset, from, bytes, stream_), "cannot write to the GPU");
    // Else what is not pinned has been copied aside by now, and `from` may change.
    if (reads_host_) finish_copy("cannot write to the GPU");
}

// What the GPU has written to shared memory is there when the wait for it has ended.
void CudaDevice::read(BufferId buffer, uint64_t offset, void* to, uint64_t bytes) {
    const Memory& from = range(buffer, offset, bytes, "read");
    if (from.host) {
        std::memcpy(to, from.host + offset, bytes);
        return;
    }
    const Current current(*context_);
    check(cuda::driver().to_host(to, from.address + offset, bytes, stream_), "cannot read from the GPU");
    finish_copy("cannot read from the GPU");
}

// After an error the copy may still be on its way, and the caller frees its memory: a second wait tells, or the context
// is broken and nothing runs.
void CudaDevice::finish_copy(const char* what) {
    const cuda::Outcome outcome = cuda::driver().stream_wait(stream_);
    if (outcome.ok()) return;
    cuda::driver().stream_wait(stream_);
    cuda::fail(outcome, what);
}

void CudaDevice::copy(BufferId from, uint64_t from_offset, BufferId to, uint64_t to_offset, uint64_t bytes) {
    const cuda::DevicePointer source = range(from, from_offset, bytes, "copy").address + from_offset;
    const cuda::DevicePointer target = range(to, to_offset, bytes, "copy").address + to_offset;
    const Current current(*context_);
    check(cuda::driver().copy(target, source, bytes, stream_), "cannot copy on the GPU");
}

std::unique_ptr<Upload> CudaDevice::upload() {
    const Current current(*context_);
    check(cuda::driver().stream_wait(stream_), "cannot clear memory");  // pieces have streams of their own
    return std::make_unique<CudaUpload>(context_, buffers_);
}

// Any thread may call it; of a kernel that fails nothing stays.
void CudaDevice::load(const Variant& variant, Kernel& made) {
    const CudaImage image = compiler_.image(variant);
    const Current current(*context_);
    check(cuda::driver().module_load(&made.module, image.code.c_str()), "cannot load " + function_name(variant));
    try {
        examine(variant, made);
    } catch (...) {
        cuda::driver().module_unload(std::exchange(made.module, nullptr));
        throw;
    }
}

void CudaDevice::examine(const Variant& variant, Kernel& made) const {
    const cuda::Driver& driver = cuda::driver();
    const std::string name = function_name(variant);
    check(driver.module_function(&made.function, made.module, name.c_str()), "cannot find " + name);
    made.group = cuda_group(variant, architecture_);
    if (made.group.bytes > 0)
        check(driver.set_function_attribute(made.function, cuda::kMaxDynamicShared, static_cast<int>(made.group.bytes)),
              "cannot have the threadgroup memory of " + name);
    int local_bytes = 0;
    check(driver.function_attribute(&local_bytes, cuda::kLocalBytes, made.function), "cannot ask about " + name);
    made.local_bytes = static_cast<uint32_t>(local_bytes);
}

void CudaDevice::compile(std::span<const Variant> variants) {
    std::vector<Variant> missing;
    for (const Variant& variant : variants)
        if (!kernels_.contains(key_of(variant))) missing.push_back(variant);
    if (missing.empty()) return;
    std::vector<Kernel> made(missing.size());
    ThreadPool pool(std::min(usable_cores(), static_cast<uint32_t>(missing.size())));
    std::tuple job{this, &missing, &made};
    std::exception_ptr failure;
    try {
        pool.run(
            static_cast<uint32_t>(missing.size()),
            [](void* context, uint32_t i) {
                const auto& [device, wanted, results] = *static_cast<decltype(job)*>(context);
                device->load(wanted->at(i), results->at(i));
            },
            &job);
    } catch (...) {
        failure = std::current_exception();  // those that went well are kept
    }
    for (size_t i = 0; i < missing.size(); ++i)
        if (made[i].module) kernels_.emplace(key_of(missing[i]), made[i]);
    if (failure) std::rethrow_exception(failure);
}

void CudaDevice::place(const Launch& launch, Node& node) const {
    const KernelInfo& kernel = *launch.kernel;
    const Kernel& compiled = kernels_.at(key_of({&kernel, launch.consts}));
    node.launch = &launch;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const SlotRef& slot = launch.slots[i];
        const Memory& buffer =
            range(slot.buffer, slot.offset, slot.bytes, std::string(kernel.name) + "." + kernel.slots[i].name);
        node.slots[i] = buffer.address + slot.offset;
        node.parameters[i] = &node.slots[i];
    }
    // CUDA copies the arguments out of the launch when the node is added.
    node.parameters[kernel.slot_count] = const_cast<std::byte*>(launch.args.data());
    const std::array<uint32_t, 3> grid = cuda_grid_of(kernel.index, launch.args.data(), launch.consts.data());
    node.kernel = {.function = compiled.function,
                   .grid = {grid[0], grid[1], grid[2]},
                   .block = {compiled.group.threads, 1, 1},
                   .shared_bytes = compiled.group.bytes,
                   .parameters = node.parameters.data(),
                   .extra = nullptr,
                   .kernel = nullptr,
                   .context = nullptr};
}

// A kernel that waits for one other may start while that one ends: every kernel waits for its inputs itself.
void CudaDevice::build_graph(CudaProgram& program, const Plan& plan) const {
    const cuda::Driver& driver = cuda::driver();
    check(driver.graph_create(&program.graph, 0), "cannot make the graph of " + program.name);
    std::vector<cuda::GraphNode> made(program.nodes.size());
    for (size_t i = 0; i < program.nodes.size(); ++i) {
        const std::string what = std::string("cannot add ") + program.launches[i].kernel->name + " to " + program.name;
        check(driver.graph_add_kernel(&made[i], program.graph, nullptr, 0, &program.nodes[i].kernel), what);
        const std::vector<uint32_t>& after = plan.after[i];
        const bool overlaps = programmatic_ && after.size() == 1;
        for (const uint32_t parent : after)
            check(driver.graph_add_edges(program.graph, &made[parent], &made[i],
                                         overlaps ? &cuda::kProgrammaticEdge : &cuda::kPlainEdge, 1),
                  what);
    }
    check(driver.graph_instantiate(&program.exec, program.graph, 0), "cannot make the graph of " + program.name);
    check(driver.graph_upload(program.exec, stream_), "cannot make the graph of " + program.name);
}

std::unique_ptr<Program> CudaDevice::prepare(const Plan& plan) {
    compile(variants_of({&plan, 1}));
    const Current current(*context_);
    auto program = std::make_unique<CudaProgram>(context_, plan);
    for (size_t i = 0; i < program->nodes.size(); ++i) place(program->launches[i], program->nodes[i]);
    if (!plan.launches.empty()) build_graph(*program, plan);
    return program;
}

cuda::Event CudaDevice::take_event() {
    if (events_.empty()) {
        cuda::Event made = nullptr;
        // A waiting thread sleeps: steps are queued ahead, so nobody is in a hurry.
        check(cuda::driver().event_create(&made, cuda::kEventBlockingSync | cuda::kEventDisableTiming),
              "cannot make an event");
        return made;
    }
    const cuda::Event event = events_.back();
    events_.pop_back();
    return event;
}

Ticket CudaDevice::submit(std::span<const Program* const> programs) {
    if (!lost_.empty()) throw Error(ErrorKind::kDevice, lost_);
    const cuda::Driver& driver = cuda::driver();
    const Current current(*context_);
    std::string what;
    const cuda::Event event = take_event();  // before anything has begun
    try {
        for (const Program* each : programs) {
            const auto& program = static_cast<const CudaProgram&>(*each);
            what += (what.empty() ? "" : ", ") + program.name;
            if (trace_)
                run_traced(program);
            else if (program.exec)
                check(driver.graph_launch(program.exec, stream_), "cannot start " + program.name);
        }
        check(driver.event_record(event, stream_), "cannot start " + what);
    } catch (...) {
        events_.push_back(event);
        driver.stream_wait(stream_);  // a part of it may have begun, and nobody would wait for that
        throw;
    }
    flights_.push_back({++ticket_, event, std::move(what)});
    return ticket_;
}

void CudaDevice::wait(Ticket ticket) {
    if (!lost_.empty()) throw Error(ErrorKind::kDevice, lost_);
    const Current current(*context_);
    while (!flights_.empty() && flights_.front().ticket <= ticket) {
        const Flight flight = std::move(flights_.front());
        flights_.pop_front();
        events_.push_back(flight.event);
        if (const cuda::Outcome outcome = cuda::driver().event_wait(flight.event); !outcome.ok())
            fail_flight(outcome, "the GPU failed in " + flight.what);
    }
}

// What was submitted behind a failure ends, too. An error of a kernel stays with the context: then nothing works in it
// from then on.
void CudaDevice::fail_flight(const cuda::Outcome& outcome, const std::string& what) {
    for (const Flight& flight : std::exchange(flights_, {})) events_.push_back(flight.event);
    if (!cuda::driver().stream_wait(stream_).ok())
        lost_ = "cuda: " + what + ": " + cuda::text_of(outcome) +
                (cuda::stays(outcome.result) ? "" : "; restart the process");
    if (!lost_.empty()) throw Error(ErrorKind::kDevice, lost_);
    cuda::fail(outcome, what);
}

// Kernel by kernel, so that each has a time, and a failure a name.
void CudaDevice::run_traced(const CudaProgram& program) {
    const cuda::Driver& driver = cuda::driver();
    const OwnEvent start(0), end(0);
    const cuda::Event from = start.get(), to = end.get();
    for (const Node& node : program.nodes) {
        const std::string name = function_name({node.launch->kernel, node.launch->consts});
        const unsigned* const grid = node.kernel.grid;
        check(driver.event_record(from, stream_), name);
        check(driver.launch(node.kernel.function, grid[0], grid[1], grid[2], node.kernel.block[0], 1, 1,
                            node.kernel.shared_bytes, stream_, node.kernel.parameters, nullptr),
              "cannot start " + name);
        check(driver.event_record(to, stream_), name);
        check(driver.event_wait(to), name + " in " + program.name);
        float milliseconds = 0;
        check(driver.event_elapsed(&milliseconds, from, to), name);
        trace_->add(name, milliseconds * 1e-3);
    }
}

std::vector<std::pair<std::string, std::string>> CudaDevice::info() const {
    int version = 0;
    check(cuda::driver().driver_version(&version), "cannot ask the driver");
    uint32_t spilling = 0;
    for (const auto& entry : kernels_) spilling += entry.second.local_bytes > 0 ? 1 : 0;
    return {{"device", name()},
            {"gpu", gpu_},
            {"architecture", architecture_},
            {"driver", std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10)},
            {"compiler", compiler_.version()},
            {"kernels", std::to_string(kernels_.size())},
            {"kernels_from_cache", std::to_string(compiler_.hits())},
            {"kernels_with_local_memory", std::to_string(spilling)},
            {"kernel_cache", compiler_.folder().empty() ? "none: there is no cache folder" : compiler_.folder()}};
}

std::vector<Variant> CudaDevice::variants() const {
    return listed_variants(tiles().rows);
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(uint32_t index, bool mma) {
    // CUDA does not work in a child of a process that has used it.
    static const pid_t process = getpid();
    if (getpid() != process)
        throw Error(ErrorKind::kDevice,
                    "cuda: the GPU cannot be used in a child of fork(); start a process anew (spawn)");
    return std::make_unique<CudaDevice>(index, mma);
}

}  // namespace lily
