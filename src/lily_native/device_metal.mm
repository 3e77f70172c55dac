// The Metal device: Apple GPUs, macOS 15 and later. The only Objective-C++ of the project.
//
// Shaders are compiled from their text when the device opens, a library per .metal file. A plan becomes a program: a
// list of dispatches with everything they bind. A submission is one concurrent compute pass with a barrier between
// stages, cut into several command buffers where one would keep the GPU from drawing the screen. Nothing throws inside
// a block that Metal calls: errors wait for the thread that waits for the work.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>

#include "device.h"
#include "error.h"
#include "grids.h"
#include "metal_support.h"
#include "shader_source.h"
#include "submissions.h"
#include "thread_pool.h"

static_assert(__has_feature(objc_arc), "compile with -fobjc-arc");

namespace lily {
namespace {

// What came with macOS 26, as numbers: this file also compiles with the headers of macOS 15.
constexpr auto kMetal4 = static_cast<MTLLanguageVersion>(4 << 16);
constexpr auto kApple10 = static_cast<MTLGPUFamily>(1010);
constexpr NSOperatingSystemVersion kOldestSystem{15, 0, 0};
constexpr NSOperatingSystemVersion kTensorSystem{26, 2, 0};
constexpr auto kLost = "metal: macOS ignores the GPU work of this process after earlier errors; restart the process";
constexpr uint32_t kSimdWidth = 32;
constexpr uint64_t kArgStride = 256;         // satisfies every GPU's alignment of constant buffers
constexpr double kBufferSeconds = 0.05;      // of work in one command buffer, so that the screen stays alive
constexpr uint32_t kCapturedSubmission = 3;  // of those with several programs, which only a step has

// The pipelines of one .metal file, or why there are none.
struct Compiled {
    const ShaderFamily* family = nullptr;
    std::vector<Variant> variants;
    std::map<VariantKey, id<MTLComputePipelineState>> pipelines;
    std::string warnings;
    std::exception_ptr error;
};

struct Dispatch {
    id<MTLComputePipelineState> pipeline;
    const Launch* launch;
    MTLSize groups, threads;
    uint32_t first, count;  // what it binds, from index 0 on
    bool new_stage, new_layer;
};

class MetalProgram final : public Program {
public:
    ~MetalProgram() override {
        pooled([&] {
            dispatches.clear();
            buffers.clear();
            args = nil;
        });
    }

    std::string name;
    std::vector<Launch> launches;
    std::vector<Dispatch> dispatches;
    id<MTLBuffer> args;
    std::vector<id<MTLBuffer>> buffers;  // of all dispatches, one after the other
    std::vector<NSUInteger> offsets;
    // Of one dispatch on the GPU, as measured; 0 before.
    mutable std::atomic<double> seconds{0};
};

class MetalDevice final : public Device {
public:
    MetalDevice(id<MTLDevice> device);
    ~MetalDevice() override;

    BufferId allocate(const char* name, uint64_t bytes, bool shared) override;
    void release(BufferId buffer) override;
    uint64_t max_buffer_bytes() const override { return device_.maxBufferLength; }
    uint64_t memory_limit() const override;
    std::byte* map(BufferId buffer) override { return static_cast<std::byte*>(buffer_of(buffer).contents); }
    void compile(std::span<const Variant> variants) override;
    std::unique_ptr<Program> prepare(const Plan& plan) override;
    Ticket submit(std::span<const Program* const> programs) override;
    void wait(Ticket ticket) override { flights_->wait(ticket); }
    uint32_t queue_depth() const override { return trace_ ? 1 : 2; }
    std::string name() const override { return "metal"; }
    std::vector<std::pair<std::string, std::string>> info() const override;
    TileChoice tiles() const override;
    std::vector<Variant> variants() const override;

private:
    // A reference, because a returned object would be autoreleased, and callers need not have a pool.
    const id<MTLBuffer>& buffer_of(BufferId buffer) const;
    std::vector<Compiled> missing_families(std::span<const Variant> variants) const;
    void compile_family(Compiled& family);
    id<MTLComputePipelineState> make_pipeline(id<MTLLibrary> library, const Variant& variant);
    void bind(MetalProgram& program, const Launch& launch, uint64_t arg_offset) const;
    void encode(std::span<const Program* const> programs, Ticket ticket);
    bool start_capture();

    id<MTLDevice> device_;
    id<MTLCommandQueue> queue_;
    id<MTLResidencySet> resident_;
    MTLCommandBufferDescriptor* command_buffer_ = nil;
    std::vector<id<MTLBuffer>> buffers_;  // nil where released
    std::map<VariantKey, id<MTLComputePipelineState>> pipelines_;
    PipelineCache cache_;
    bool tensor_ops_ = false;
    std::string tile_reason_, warnings_, residency_;
    std::shared_ptr<Flights> flights_ = std::make_shared<Flights>();
    std::shared_ptr<Trace> trace_;  // none unless asked for
    Ticket ticket_ = 0;
    uint32_t steps_until_capture_ = 0;  // 0: no capture
};

MetalDevice::MetalDevice(id<MTLDevice> device) : device_(device), cache_(device) {
    queue_ = [device_ newCommandQueue];
    if (queue_ == nil) throw Error(ErrorKind::kDevice, "metal: cannot make a command queue");
    queue_.label = @"lily";
    MTLResidencySetDescriptor* residency = [MTLResidencySetDescriptor new];
    residency.label = @"lily";
    NSError* error = nil;
    resident_ = [device_ newResidencySetWithDescriptor:residency error:&error];
    // Without one, Metal makes resident what each pass binds, every time: slower, and the same.
    residency_ = resident_ != nil ? "kept" : "by pass: " + message_of(error);
    if (resident_ != nil) [queue_ addResidencySet:resident_];
    [resident_ requestResidency];
    device_.shouldMaximizeConcurrentCompilation = YES;
    // The engine keeps alive what is in flight; command buffers need not count references.
    command_buffer_ = [MTLCommandBufferDescriptor new];
    command_buffer_.retainedReferences = NO;
    if (!system_is_at_least(kTensorSystem)) {
        tile_reason_ = "tensor operations need macOS 26.2";
    } else if (![device_ supportsFamily:kApple10]) {
        tile_reason_ = "this GPU has no tensor units";
    } else {
        tensor_ops_ = true;
        tile_reason_ = "this GPU has tensor units";
    }
    if (debug_wants("trace")) trace_ = std::make_shared<Trace>();
    if (debug_wants("capture")) steps_until_capture_ = kCapturedSubmission;
}

MetalDevice::~MetalDevice() {
    flights_->wait_idle();
    pooled([&] {
        if (resident_ != nil) [queue_ removeResidencySet:resident_];
        [resident_ endResidency];
        buffers_.clear();
        pipelines_.clear();
        resident_ = nil;
        queue_ = nil;
    });
    if (trace_) trace_->print();
}

uint64_t MetalDevice::memory_limit() const {
    const uint64_t recommended = device_.recommendedMaxWorkingSetSize;
    return recommended == 0 ? UINT64_MAX : recommended;
}

// Shared storage is zero-filled by Metal. Hazards stay tracked, so command buffers that touch the same memory run one
// after the other; inside a pass, barriers do that.
BufferId MetalDevice::allocate(const char* name, uint64_t bytes, bool) {
    return pooled([&]() -> BufferId {
        id<MTLBuffer> made = nil;
        if (bytes <= device_.maxBufferLength)
            made = [device_ newBufferWithLength:std::max<uint64_t>(bytes, 1) options:MTLResourceStorageModeShared];
        if (made == nil)
            throw Error(ErrorKind::kOutOfMemory,
                        std::string("metal: ") + name + ": cannot allocate " + std::to_string(bytes) + " bytes");
        made.label = ns(name);
        [resident_ addAllocation:made];
        [resident_ commit];
        const auto free = std::find(buffers_.begin(), buffers_.end(), nil);
        const auto index = static_cast<uint32_t>(free - buffers_.begin());
        if (free == buffers_.end()) buffers_.emplace_back();
        buffers_[index] = made;
        return {index};
    });
}

void MetalDevice::release(BufferId buffer) {
    pooled([&] {
        [resident_ removeAllocation:buffer_of(buffer)];
        [resident_ commit];
        buffers_[buffer.index] = nil;
    });
}

const id<MTLBuffer>& MetalDevice::buffer_of(BufferId buffer) const {
    if (buffer.index >= buffers_.size() || buffers_[buffer.index] == nil)
        throw Error(ErrorKind::kLogic, "metal: no buffer " + std::to_string(buffer.index));
    return buffers_[buffer.index];
}

std::vector<Compiled> MetalDevice::missing_families(std::span<const Variant> variants) const {
    std::vector<Compiled> families;
    for (const Variant& variant : variants) {
        if (pipelines_.contains(key_of(variant))) continue;
        const ShaderFamily& wanted = family_of(*variant.kernel);
        auto found = std::find_if(families.begin(), families.end(),
                                  [&](const Compiled& family) { return family.family == &wanted; });
        if (found == families.end()) found = families.emplace(families.end());
        found->family = &wanted;
        found->variants.push_back(variant);
    }
    return families;
}

// Both forms of the tile kernels have one interface, so that a compiler that refuses tensor operations, or a GPU that
// only pretends to have them, costs speed and nothing else.
void MetalDevice::compile(std::span<const Variant> variants) {
    std::vector<Compiled> families = missing_families(variants);
    if (families.empty()) return;
    ThreadPool pool(std::min(usable_cores(), static_cast<uint32_t>(families.size())));
    std::pair job{this, &families};
    pool.run(
        static_cast<uint32_t>(families.size()),
        [](void* context, uint32_t i) {
            const auto& [device, wanted] = *static_cast<decltype(job)*>(context);
            device->compile_family(wanted->at(i));
        },
        &job);
    for (const Compiled& family : families) {
        if (!family.error || !family.family->tiles || !tensor_ops_) continue;
        tile_reason_ = "tensor operations do not compile here";
        try {
            std::rethrow_exception(family.error);
        } catch (const std::exception& error) {
            tile_reason_ += std::string(": ") + error.what();
        } catch (...) {
            // Whatever it was, the other form is there.
        }
        tensor_ops_ = false;
        std::erase_if(pipelines_, [](const auto& entry) { return family_of(kKernels[entry.first.first]).tiles; });
        return compile(variants);
    }
    for (Compiled& family : families) {
        if (family.error) std::rethrow_exception(family.error);
        pipelines_.merge(family.pipelines);
        warnings_ += family.warnings;
    }
    pooled([&] { cache_.save(); });
}

void MetalDevice::compile_family(Compiled& family) {
    try {
        pooled([&] {
            MTLCompileOptions* options = [MTLCompileOptions new];
            options.languageVersion = family.family->tiles && tensor_ops_ ? kMetal4 : MTLLanguageVersion3_2;
            options.mathMode = MTLMathModeSafe;
            NSString* source = ns(metal_source(*family.family, family.variants, tensor_ops_));
            NSError* error = nil;
            id<MTLLibrary> library = [device_ newLibraryWithSource:source options:options error:&error];
            if (library == nil) fail(std::string(family.family->name) + ".metal does not compile", error);
            if (error != nil) family.warnings = message_of(error) + "\n";
            library.label = ns(family.family->name);
            for (const Variant& variant : family.variants)
                family.pipelines.emplace(key_of(variant), make_pipeline(library, variant));
        });
    } catch (...) {
        family.error = std::current_exception();
    }
}

id<MTLComputePipelineState> MetalDevice::make_pipeline(id<MTLLibrary> library, const Variant& variant) {
    const std::string name = function_name(variant);
    const NSUInteger threads = variant.kernel->simds * kSimdWidth;
    id<MTLFunction> function = [library newFunctionWithName:ns(name)];
    if (function == nil) throw Error(ErrorKind::kDevice, "metal: " + name + " is not in its compiled library");
    MTLComputePipelineDescriptor* wanted = [MTLComputePipelineDescriptor new];
    wanted.computeFunction = function;
    wanted.label = ns(name);
    wanted.maxTotalThreadsPerThreadgroup = threads;
    wanted.threadGroupSizeIsMultipleOfThreadExecutionWidth = YES;
    id<MTLComputePipelineState> made = cache_.find(wanted);
    if (made == nil) {
        wanted.binaryArchives = @[];
        NSError* error = nil;
        made = [device_ newComputePipelineStateWithDescriptor:wanted
                                                      options:MTLPipelineOptionNone
                                                   reflection:nil
                                                        error:&error];
        if (made == nil) fail(name + " makes no pipeline", error);
        cache_.add(wanted);
    }
    if (made.threadExecutionWidth != kSimdWidth || made.maxTotalThreadsPerThreadgroup < threads ||
        made.staticThreadgroupMemoryLength > device_.maxThreadgroupMemoryLength)
        throw Error(ErrorKind::kUnsupported,
                    "metal: " + name + " needs " + std::to_string(threads) + " threads in simdgroups of 32 and " +
                        std::to_string(made.staticThreadgroupMemoryLength) +
                        " bytes of threadgroup memory; the GPU has " +
                        std::to_string(made.maxTotalThreadsPerThreadgroup) + " in simdgroups of " +
                        std::to_string(made.threadExecutionWidth) + " and " +
                        std::to_string(device_.maxThreadgroupMemoryLength) + " bytes");
    return made;
}

std::unique_ptr<Program> MetalDevice::prepare(const Plan& plan) {
    return pooled([&]() -> std::unique_ptr<Program> {
        compile(variants_of({&plan, 1}));
        auto program = std::make_unique<MetalProgram>();
        program->name = plan.name;
        program->launches = plan.launches;
        const uint64_t arg_bytes = std::max<uint64_t>(plan.launches.size(), 1) * kArgStride;
        program->args = [device_ newBufferWithLength:arg_bytes options:MTLResourceStorageModeShared];
        if (program->args == nil)
            throw Error(ErrorKind::kOutOfMemory, "metal: cannot allocate the arguments of plan " + plan.name);
        program->args.label = ns(plan.name);
        uint64_t arg_offset = 0;
        for (const Launch& launch : program->launches) {
            bind(*program, launch, arg_offset);
            arg_offset += kArgStride;
        }
        return program;
    });
}

// Slots at their own index and the args behind them, so that one call binds all.
void MetalDevice::bind(MetalProgram& program, const Launch& launch, uint64_t arg_offset) const {
    const KernelInfo& kernel = *launch.kernel;
    const Launch* before = program.dispatches.empty() ? nullptr : program.dispatches.back().launch;
    Dispatch dispatch{.pipeline = pipelines_.at(key_of({&kernel, launch.consts})),
                      .launch = &launch,
                      .groups = {},
                      .threads = MTLSizeMake(kernel.simds * kSimdWidth, 1, 1),
                      .first = static_cast<uint32_t>(program.buffers.size()),
                      .count = kernel.slot_count + 1,
                      .new_stage = before != nullptr && before->stage != launch.stage,
                      .new_layer = before != nullptr && before->layer != launch.layer};
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const SlotRef& slot = launch.slots[i];
        id<MTLBuffer> buffer = buffer_of(slot.buffer);
        if (slot.offset > buffer.length || slot.bytes > buffer.length - slot.offset)
            throw Error(ErrorKind::kLogic,
                        std::string(kernel.name) + "." + kernel.slots[i].name + ": leaves its buffer");
        program.buffers.push_back(buffer);
        program.offsets.push_back(slot.offset);
    }
    std::memcpy(static_cast<std::byte*>(program.args.contents) + arg_offset, launch.args.data(), launch.args.size());
    program.buffers.push_back(program.args);
    program.offsets.push_back(arg_offset);
    const std::array<uint32_t, 3> grid = grid_of(kernel.index, launch.args.data(), launch.consts.data());
    dispatch.groups = MTLSizeMake(grid[0], grid[1], grid[2]);
    program.dispatches.push_back(dispatch);
}

// Encodes one submission into command buffers, each with a single concurrent pass. A long program is cut: a command
// buffer ends with a layer once it holds enough work. Programs that belong together are not: when one of them fails,
// those behind it in the same command buffer do not run, and so cannot take what it left behind for its result.
class Encoding {
public:
    Encoding(id<MTLCommandQueue> queue, MTLCommandBufferDescriptor* descriptor, std::shared_ptr<Flights> flights,
             std::shared_ptr<Trace> trace, Ticket ticket, bool may_cut)
        : queue_(queue),
          descriptor_(descriptor),
          flights_(std::move(flights)),
          trace_(std::move(trace)),
          ticket_(ticket),
          may_cut_(may_cut) {}
    Encoding(const Encoding&) = delete;
    Encoding& operator=(const Encoding&) = delete;
    ~Encoding() {
        if (pass_ != nil) [pass_ endEncoding];  // Metal ends the process when a pass is dropped open
    }

    void add(const MetalProgram& program, const Dispatch& dispatch, bool first) {
        const bool layer_ends = may_cut_ && dispatch.new_stage && dispatch.new_layer;
        if (pass_ != nil && (trace_ || (layer_ends && seconds_ > kBufferSeconds))) commit();
        if (pass_ == nil)
            open();
        else if (first || dispatch.new_stage)
            [pass_ memoryBarrierWithScope:MTLBarrierScopeBuffers];
        [pass_ setComputePipelineState:dispatch.pipeline];
        [pass_ setBuffers:&program.buffers[dispatch.first]
                  offsets:&program.offsets[dispatch.first]
                withRange:NSMakeRange(0, dispatch.count)];
        [pass_ dispatchThreadgroups:dispatch.groups threadsPerThreadgroup:dispatch.threads];
        if (work_.empty() || work_.back().program != &program) work_.push_back({&program, &dispatch, &dispatch, 0});
        work_.back().last = &dispatch;
        ++work_.back().count;
        // A program that was never timed may be long: it is cut at every layer, once.
        const double measured = program.seconds.load(std::memory_order_relaxed);
        seconds_ += measured > 0 ? measured : 2 * kBufferSeconds;
    }

    void commit() {
        if (pass_ == nil) return;
        [std::exchange(pass_, nil) endEncoding];
        id<MTLCommandBuffer> buffer = std::exchange(buffer_, nil);
        buffer.label = ns(place());
        const auto flights = flights_;
        const auto trace = trace_;
        const auto work = std::exchange(work_, {});
        const Ticket ticket = ticket_;
        seconds_ = 0;
        [buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
          completed(done, ticket, work, *flights, trace.get());
        }];
        flights->add(ticket);
        [buffer commit];
        if (!trace) return;
        // Each dispatch has a command buffer of its own here; still, nothing may run behind one that failed.
        [buffer waitUntilCompleted];
        if (buffer.status != MTLCommandBufferStatusCompleted)
            fail("the GPU failed in " + text_of(buffer.label), buffer.error);
    }

private:
    // Dispatches of one program in the command buffer.
    struct Work {
        const MetalProgram* program;
        const Dispatch* first;
        const Dispatch* last;
        uint32_t count;
    };

    void open() {
        buffer_ = [queue_ commandBufferWithDescriptor:descriptor_];
        if (buffer_ == nil) throw Error(ErrorKind::kDevice, "metal: cannot make a command buffer");
        pass_ = [buffer_ computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
        if (pass_ == nil) throw Error(ErrorKind::kDevice, "metal: cannot make a compute pass");
    }

    // "decode, layers 3 to 7", for messages and captures.
    std::string place() const {
        std::string text;
        for (const Work& work : work_) {
            text += (text.empty() ? "" : "; ") + work.program->name;
            const int32_t first = work.first->launch->layer, last = work.last->launch->layer;
            if (first >= 0 && last > first)
                text += ", layers " + std::to_string(first) + " to " + std::to_string(last);
            else if (first >= 0 && last == first)
                text += ", layer " + std::to_string(first);
        }
        return text;
    }

    // Runs on a thread of Metal's.
    static void completed(id<MTLCommandBuffer> done, Ticket ticket, const std::vector<Work>& works, Flights& flights,
                          Trace* trace) noexcept {
        const double seconds = done.GPUEndTime - done.GPUStartTime;
        uint32_t count = 0;
        for (const Work& work : works) count += work.count;
        std::string problem;
        auto kind = ErrorKind::kDevice;
        if (done.status == MTLCommandBufferStatusCompleted) {
            for (const Work& work : works) work.program->seconds.store(seconds / count, std::memory_order_relaxed);
            if (trace != nullptr)
                trace->add(function_name({works[0].first->launch->kernel, works[0].first->launch->consts}), seconds);
        } else {
            NSError* error = done.error;
            problem = "metal: the GPU failed in " + text_of(done.label) + ": " + message_of(error);
            if (error.code == MTLCommandBufferErrorOutOfMemory) kind = ErrorKind::kOutOfMemory;
            if (error.code == MTLCommandBufferErrorTimeout) problem += "; a smaller prefill_chunk makes shorter work";
            if (error.code == MTLCommandBufferErrorAccessRevoked) flights.lose(kLost);
        }
        flights.finish(ticket, problem, kind);
    }

    id<MTLCommandQueue> queue_;
    MTLCommandBufferDescriptor* descriptor_;
    std::shared_ptr<Flights> flights_;
    std::shared_ptr<Trace> trace_;
    Ticket ticket_;
    bool may_cut_;
    id<MTLCommandBuffer> buffer_ = nil;
    id<MTLComputeCommandEncoder> pass_ = nil;
    std::vector<Work> work_;
    double seconds_ = 0;
};

Ticket MetalDevice::submit(std::span<const Program* const> programs) {
    flights_->check();
    return pooled([&] {
        const bool captured =
            programs.size() > 1 && steps_until_capture_ > 0 && --steps_until_capture_ == 0 && start_capture();
        const Ticket ticket = ++ticket_;
        flights_->start(ticket);
        try {
            encode(programs, ticket);
        } catch (...) {
            flights_->abandon(ticket);
            throw;
        }
        flights_->finish(ticket, "", ErrorKind::kDevice);
        if (captured) {
            flights_->wait_idle();
            [MTLCaptureManager.sharedCaptureManager stopCapture];
        }
        return ticket;
    });
}

void MetalDevice::encode(std::span<const Program* const> programs, Ticket ticket) {
    Encoding encoding(queue_, command_buffer_, flights_, trace_, ticket, programs.size() == 1);
    for (const Program* each : programs) {
        const auto& program = static_cast<const MetalProgram&>(*each);
        for (const Dispatch& dispatch : program.dispatches)
            encoding.add(program, dispatch, &dispatch == &program.dispatches.front());
    }
    encoding.commit();
}

// For people who debug, so what goes wrong is printed and no more.
bool MetalDevice::start_capture() {
    MTLCaptureManager* manager = MTLCaptureManager.sharedCaptureManager;
    const std::string path = "lily-" + std::to_string(getpid()) + ".gputrace";
    if (![manager supportsDestination:MTLCaptureDestinationGPUTraceDocument]) {
        std::fprintf(stderr, "lily: no capture: start the process with MTL_CAPTURE_ENABLED=1\n");
        return false;
    }
    MTLCaptureDescriptor* descriptor = [MTLCaptureDescriptor new];
    descriptor.captureObject = queue_;
    descriptor.destination = MTLCaptureDestinationGPUTraceDocument;
    descriptor.outputURL = [NSURL fileURLWithPath:ns(path)];
    NSError* error = nil;
    if (![manager startCaptureWithDescriptor:descriptor error:&error]) {
        std::fprintf(stderr, "lily: no capture: %s\n", message_of(error).c_str());
        return false;
    }
    std::fprintf(stderr, "lily: capturing one token into %s\n", path.c_str());
    return true;
}

std::vector<std::pair<std::string, std::string>> MetalDevice::info() const {
    return pooled([&]() -> std::vector<std::pair<std::string, std::string>> {
        return {{"device", name()},
                {"gpu", text_of(device_.name)},
                {"system", text_of(NSProcessInfo.processInfo.operatingSystemVersionString)},
                {"matrix_products", tensor_ops_ ? "tensor operations (Metal 4)" : "simdgroup matrices"},
                {"matrix_products_reason", tile_reason_},
                {"pipelines", std::to_string(pipelines_.size())},
                {"pipelines_from_cache", std::to_string(cache_.hits())},
                {"pipeline_cache", cache_.description()},
                {"compiler_messages", warnings_},
                {"residency", residency_},
                {"working_set_bytes", std::to_string(device_.recommendedMaxWorkingSetSize)},
                {"max_buffer_bytes", std::to_string(device_.maxBufferLength)}};
    });
}

// Tensor operations are not known to take fewer rows than 32.
TileChoice MetalDevice::tiles() const {
    return {.rows = std::span(kGpuTileRows).subspan(tensor_ops_ ? 2 : 0)};
}

std::vector<Variant> MetalDevice::variants() const {
    return listed_variants(tiles().rows);
}

}  // namespace

std::unique_ptr<Device> make_metal_device() {
    // A forked child inherits connections to the system's services that do not work there.
    static const pid_t process = getpid();
    if (getpid() != process)
        throw Error(ErrorKind::kDevice,
                    "metal: the GPU cannot be used in a child of fork(); start a process anew (spawn)");
    return pooled([]() -> std::unique_ptr<Device> {
        id<MTLDevice> device = MTLCreateSystemDefaultDevice();
        if (device == nil) throw Error(ErrorKind::kUnsupported, "metal: this process has no access to a GPU");
        // Apple silicon has Apple7; the GPU that a virtual machine on it shows claims Apple5 only.
        if (![device supportsFamily:MTLGPUFamilyApple5])
            throw Error(ErrorKind::kUnsupported,
                        "metal: " + text_of(device.name) + " is no GPU of Apple silicon; use device='cpu'");
        if (!system_is_at_least(kOldestSystem))
            throw Error(ErrorKind::kUnsupported, "metal: macOS 15 or later is needed, this is " +
                                                     text_of(NSProcessInfo.processInfo.operatingSystemVersionString));
        return std::make_unique<MetalDevice>(device);
    });
}

}  // namespace lily
