// What the double does when it is used well.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "selftest.h"

namespace {

namespace fs = std::filesystem;

// A folder for the files of a test.
class Folder {
public:
    Folder() : path_(fs::temp_directory_path() / ("metal-double-" + std::to_string(getpid()))) {
        fs::create_directory(path_);
    }
    ~Folder() { fs::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string file(const char* name) const { return (path_ / name).string(); }
    NSURL* url(const char* name) const { return [NSURL fileURLWithPath:text(file(name))]; }

private:
    fs::path path_;
};

void kernels_run() {
    const Gpu gpu;
    const Norm norm(gpu, 3);
    EXPECT(norm.pipeline.threadExecutionWidth == 32 && norm.pipeline.maxTotalThreadsPerThreadgroup == 256);
    EXPECT(norm.pipeline.staticThreadgroupMemoryLength == 0 && [norm.pipeline.label isEqualToString:@"rms_norm"]);
    EXPECT(run(gpu, {&norm}) && norm.result_is(3));
    EXPECT(count("dispatches") == 1 && count("barriers") == 1 && count("encoders") == 1);
    EXPECT(count("command_buffers") == 1 && count("in_flight") == 0 && count("max_in_flight") == 1);
    EXPECT(count("unchecked_command_buffers") == 0 && count("libraries") == 1 && count("pipelines_compiled") == 1);
}

void kernels_run_at_width_32() {
    const With wide("width", 32);
    const Gpu gpu;
    const Norm norm(gpu, 5);
    EXPECT(run(gpu, {&norm}) && norm.result_is(5));
}

void consts_choose_forms() {
    const Gpu gpu;
    const id<MTLLibrary> library = gpu.compile("qmv", {8, 2048});
    EXPECT(library.functionNames.count == 1 && [library.functionNames[0] isEqualToString:@"qmv_8_2048"]);
    EXPECT(gpu.pipeline(library, "qmv_8_2048") != nil);
    EXPECT([library newFunctionWithName:@"qmv_8_4096"] == nil && [library newFunctionWithName:@"qmv"] == nil);
    EXPECT(gpu.pipeline(gpu.compile("qmv", {8, 1024}), "qmv_8_1024") != nil);  // by the form for every K
    EXPECT(gpu.pipeline(gpu.compile("qmv", {5, 1024}), "qmv_5_1024") == nil);  // no CPU form has 5 bits
}

void order_is_free_between_barriers() {
    const With unchecked("hazards", 0);
    const Gpu gpu;
    const Norm one(gpu, 1);
    Norm two(gpu, 2);
    two.y = one.y;
    EXPECT(run(gpu, {&one, &two}, false) && one.result_is(2));
    const With reversed("order", 1);
    EXPECT(run(gpu, {&one, &two}, false) && one.result_is(1));
    EXPECT(run(gpu, {&one, &two}, true) && one.result_is(2));
    const With shuffled("order", 2);
    int firsts = 0;
    for (int i = 0; i < 32; ++i) {
        EXPECT(run(gpu, {&one, &two}, false));
        firsts += one.result_is(1) ? 1 : 0;
    }
    EXPECT(firsts > 0 && firsts < 32);
}

void program_and_gpu_run_apart() {
    const Gpu gpu;
    const Norm norm(gpu, 4);
    const With held("hold", 1);
    const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    const id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);
    norm.encode(encoder);
    [encoder endEncoding];
    std::atomic<int> handled{0};
    std::atomic<int>* const counter = &handled;
    [command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      if (done.status == MTLCommandBufferStatusCompleted && done.error == nil) counter->fetch_add(1);
    }];
    EXPECT(command_buffer.status == MTLCommandBufferStatusNotEnqueued);
    [command_buffer commit];
    EXPECT(command_buffer.status == MTLCommandBufferStatusCommitted && command_buffer.error == nil);
    EXPECT(count("in_flight") == 1 && handled == 0);
    lily_double_set("hold", 0);
    [command_buffer waitUntilCompleted];
    EXPECT(command_buffer.status == MTLCommandBufferStatusCompleted && handled == 1 && norm.result_is(4));
    EXPECT(command_buffer.GPUEndTime > command_buffer.GPUStartTime);
}

// The handler cannot end before the waiting does, so that waiting for the handler would never return.
void handlers_can_be_late() {
    const With late("late_handlers", 1);
    const Gpu gpu;
    std::atomic<bool> waited{false}, handled{false};
    std::atomic<bool>*const before = &waited, *const after = &handled;
    const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    [gpu.encoder(command_buffer) endEncoding];
    [command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      while (!before->load()) std::this_thread::yield();
      after->store(done.status == MTLCommandBufferStatusCompleted);
    }];
    [command_buffer commit];
    [command_buffer waitUntilCompleted];
    waited = true;
    while (!handled) std::this_thread::yield();
}

void time_can_be_simulated() {
    const With slow("dispatch_ns", 1000000000);
    const Gpu gpu;
    const Norm norm(gpu, 4);
    const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    const id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);
    norm.encode(encoder);
    [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    norm.encode(encoder);
    [encoder endEncoding];
    [command_buffer commit];
    [command_buffer waitUntilCompleted];
    EXPECT(command_buffer.status == MTLCommandBufferStatusCompleted);
    EXPECT(command_buffer.GPUEndTime - command_buffer.GPUStartTime > 1.99);
}

// With two places, the third command buffer waits for the first one to complete.
void queues_have_places() {
    const With places("max_command_buffers", 2);
    const With late("latency_us", 2000);
    const Gpu gpu;
    const Norm norm(gpu, 4);
    std::vector<id<MTLCommandBuffer>> all;
    for (int i = 0; i < 5; ++i) {
        all.push_back(gpu.command_buffer());
        const id<MTLComputeCommandEncoder> encoder = gpu.encoder(all.back());
        norm.encode(encoder);
        [encoder endEncoding];
        [all.back() commit];
    }
    [all.back() waitUntilCompleted];
    for (const id<MTLCommandBuffer>& each : all) EXPECT(each.status == MTLCommandBufferStatusCompleted);
    EXPECT(count("max_in_flight") == 2);
}

void references_can_be_kept() {
    const Gpu gpu;
    const int64_t before = count("live_buffers");
    id<MTLCommandBuffer> command_buffer = nil;
    @autoreleasepool {
        const Norm norm(gpu, 4);
        command_buffer = [gpu.queue commandBufferWithDescriptor:[MTLCommandBufferDescriptor new]];
        const id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);
        norm.encode(encoder);
        [encoder endEncoding];
    }
    EXPECT(count("live_buffers") == before + 5);
    [command_buffer commit];
    [command_buffer waitUntilCompleted];
    EXPECT(command_buffer.status == MTLCommandBufferStatusCompleted && count("live_buffers") == before);
}

// The queue goes last, from its own thread.
void queues_may_die_on_their_thread() {
    const With held("hold", 1);
    @autoreleasepool {
        __block id<MTLCommandQueue> queue = nil;
        {
            const Gpu gpu;
            queue = gpu.queue;
            const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
            [gpu.encoder(command_buffer) endEncoding];
            [command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
              if (done.status == MTLCommandBufferStatusCompleted) queue = nil;
            }];
            [command_buffer commit];
        }
    }
    lily_double_set("hold", 0);
    while (count("live_queues") > 0 || count("live_command_buffers") > 0 || count("live_blocks") > 0)
        std::this_thread::yield();
}

void libraries_compile_in_parallel() {
    const Gpu gpu;
    std::vector<std::thread> threads;
    for (const char* name : {"rms_norm", "moe_combine", "gated_rms_norm", "moe_scan"}) {
        threads.emplace_back([&gpu, name] {
            @autoreleasepool {
                for (int i = 0; i < 3; ++i) EXPECT(gpu.pipeline(gpu.compile(name), name) != nil);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(count("libraries") == 12 && count("pipelines_compiled") == 12);
    EXPECT(count("autoreleased_without_pool") == 0);
}

void memory_is_counted() {
    const Gpu gpu;
    const NSUInteger before = gpu.device.currentAllocatedSize;
    const int64_t bytes = count("buffer_bytes");
    @autoreleasepool {
        const id<MTLBuffer> buffer = gpu.buffer(20000);
        EXPECT(buffer.length == 20000 && reinterpret_cast<uintptr_t>(buffer.contents) % 16384 == 0);
        for (NSUInteger i = 0; i < 20000; ++i) EXPECT(static_cast<char*>(buffer.contents)[i] == 0);
        EXPECT(gpu.device.currentAllocatedSize == before + 32768 && count("buffer_bytes") == bytes + 20000);
        NSError* error = nil;
        const id<MTLResidencySet> set = [gpu.device newResidencySetWithDescriptor:[MTLResidencySetDescriptor new]
                                                                            error:&error];
        [gpu.queue addResidencySet:set];
        [set addAllocation:buffer];
        [set requestResidency];
        EXPECT(count("resident_buffers") == 0);
        [set commit];
        EXPECT(count("resident_buffers") == 1 && set.allocationCount == 1);
        [set removeAllocation:buffer];
        [set commit];
        EXPECT(count("resident_buffers") == 0);
        [set endResidency];
    }
    EXPECT(gpu.device.currentAllocatedSize == before && count("buffer_bytes") == bytes);
}

void machines_differ() {
    const id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    EXPECT(device == MTLCreateSystemDefaultDevice() && [device.name isEqualToString:@"Apple M4 Double"]);
    EXPECT(device.hasUnifiedMemory && device.maxThreadgroupMemoryLength == 32768);
    const auto apple10 = static_cast<MTLGPUFamily>(1010), metal4 = static_cast<MTLGPUFamily>(5002);
    EXPECT([device supportsFamily:MTLGPUFamilyApple7] && [device supportsFamily:MTLGPUFamilyApple9]);
    const With newer("apple_family", 10);
    const With four("metal4", 1);
    EXPECT(![device supportsFamily:apple10] && ![device supportsFamily:metal4]);
    const With system("os_major", 26);
    EXPECT([device supportsFamily:apple10] && [device supportsFamily:metal4]);
    const With old("apple_family", 6);
    EXPECT(![device supportsFamily:MTLGPUFamilyApple7]);
    const With small("max_buffer_length", 1 << 20);
    EXPECT(device.maxBufferLength == 1 << 20 && device.recommendedMaxWorkingSetSize == uint64_t{12} << 30);
}

bool compiles(const std::string& source, NSUInteger major, NSUInteger minor, const char* message) {
    NSError* error = nil;
    const id<MTLLibrary> library = [MTLCreateSystemDefaultDevice() newLibraryWithSource:text(source)
                                                                                options:compile_options(major, minor)
                                                                                  error:&error];
    if (library == nil)
        EXPECT(error.code == MTLLibraryErrorCompileFailure && [error.domain isEqual:MTLLibraryErrorDomain]);
    EXPECT(std::string(error.localizedDescription.UTF8String).find(message) != std::string::npos);
    return library != nil;
}

void compilers_refuse() {
    const std::string kernel = "KERNEL(rms_norm, 8)(\n";
    const std::string instance = "template [[host_name(\"qmv_4_64\")]] [[kernel]] decltype(qmv<4, 64>) qmv<4, 64>;\n";
    const std::string templated = "template <uint BITS, uint K>\nKERNEL(qmv, 8)(\n";
    EXPECT(compiles(kernel, 3, 2, "warning"));
    EXPECT(!compiles(kernel, 4, 0, "invalid value 'metal4.0'") && !compiles(kernel, 3, 1, "bfloat"));
    EXPECT(!compiles("#error no good\n" + kernel, 3, 2, "program_source:1:1: error: no good"));
    EXPECT(compiles("#ifdef NO\n#error no good\n#endif\n" + kernel, 3, 2, "warning"));
    EXPECT(!compiles("#define LILY_TENSOR_OPS 1\n" + kernel, 3, 2, "MetalPerformancePrimitives"));
    EXPECT(compiles(templated + instance, 3, 2, "warning"));
    EXPECT(!compiles(instance, 3, 2, "no template named 'qmv'") &&
           !compiles("KERNEL(qmv, 8)(\n", 3, 2, "without consts"));
    EXPECT(!compiles(templated + instance + instance, 3, 2, "program_source:4:1: error: redefinition"));
    std::string other = instance;
    other.replace(other.find("<4, 64>"), 7, "<8, 64>");
    EXPECT(!compiles(templated + other, 3, 2, "does not agree"));
    const With system("os_major", 26);
    EXPECT(compiles("#define LILY_TENSOR_OPS 1\n" + kernel, 4, 0, "warning"));
}

id<MTLBinaryArchive> open_archive(const Gpu& gpu, NSURL* url) {
    MTLBinaryArchiveDescriptor* const descriptor = [MTLBinaryArchiveDescriptor new];
    descriptor.url = url;
    NSError* error = nil;
    const id<MTLBinaryArchive> archive = [gpu.device newBinaryArchiveWithDescriptor:descriptor error:&error];
    if (archive == nil) EXPECT(error.code == MTLBinaryArchiveErrorInvalidFile);
    return archive;
}

void archives_save_compiling() {
    const Gpu gpu;
    const Folder folder;
    const id<MTLLibrary> library = gpu.compile("rms_norm");
    MTLComputePipelineDescriptor* const descriptor = [MTLComputePipelineDescriptor new];
    descriptor.computeFunction = [library newFunctionWithName:@"rms_norm"];
    descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth = YES;
    const id<MTLBinaryArchive> archive = open_archive(gpu, nil);
    NSError* error = nil;
    EXPECT([archive addComputePipelineFunctionsWithDescriptor:descriptor error:&error]);
    EXPECT([archive serializeToURL:folder.url("a") error:&error]);
    EXPECT(![archive serializeToURL:folder.url("none/a") error:&error] && error != nil);
    const id<MTLBinaryArchive> again = open_archive(gpu, folder.url("a"));
    const auto only = MTLPipelineOptionFailOnBinaryArchiveMiss;
    EXPECT(gpu.pipeline(library, "rms_norm", @[ again ], only) != nil && count("pipelines_from_archive") == 1);
    const id<MTLLibrary> other = gpu.compile("moe_combine");
    EXPECT(gpu.pipeline(other, "moe_combine", @[ again ], only) == nil && count("archive_misses") == 1);
    EXPECT(gpu.pipeline(other, "moe_combine", @[ again ]) != nil && count("pipelines_compiled") == 1);
    EXPECT(count("archives_opened") == 1 && count("archives_saved") == 1);
}

void archives_are_checked() {
    const Gpu gpu;
    const Folder folder;
    NSError* error = nil;
    EXPECT([open_archive(gpu, nil) serializeToURL:folder.url("a") error:&error]);
    EXPECT(open_archive(gpu, folder.url("a")) != nil && open_archive(gpu, folder.url("missing")) == nil);
    std::ofstream(folder.file("text")) << "something else\n";
    EXPECT(open_archive(gpu, folder.url("text")) == nil);
    std::ofstream(folder.file("a"), std::ios::app) << "more\n";
    EXPECT(open_archive(gpu, folder.url("a")) == nil);
}

void archives_belong_to_a_system() {
    const Folder folder;
    @autoreleasepool {
        const Gpu gpu;
        NSError* error = nil;
        EXPECT([open_archive(gpu, nil) serializeToURL:folder.url("a") error:&error]);
    }
    lily_double_set_text("os_build", "25A1");
    const Gpu updated;
    EXPECT(open_archive(updated, folder.url("a")) == nil);
}

void work_can_be_captured() {
    const Gpu gpu;
    const Folder folder;
    const Norm norm(gpu, 2);
    MTLCaptureManager* const manager = [MTLCaptureManager sharedCaptureManager];
    EXPECT([manager supportsDestination:MTLCaptureDestinationGPUTraceDocument] && !manager.isCapturing);
    MTLCaptureDescriptor* const descriptor = [MTLCaptureDescriptor new];
    descriptor.captureObject = gpu.queue;
    descriptor.destination = MTLCaptureDestinationGPUTraceDocument;
    descriptor.outputURL = folder.url("a.gputrace");
    NSError* error = nil;
    EXPECT([manager startCaptureWithDescriptor:descriptor error:&error] && manager.isCapturing);
    EXPECT(![manager startCaptureWithDescriptor:descriptor error:&error]);
    EXPECT(error.code == MTLCaptureErrorAlreadyCapturing);
    EXPECT(run(gpu, {&norm}) && run(gpu, {&norm}));
    [manager stopCapture];
    EXPECT(run(gpu, {&norm}) && count("captured_command_buffers") == 2 && count("captures") == 1);
    EXPECT(fs::exists(folder.file("a.gputrace/index")));
    EXPECT(![manager startCaptureWithDescriptor:descriptor error:&error]);
    EXPECT(error.code == MTLCaptureErrorInvalidDescriptor);
    const With forbidden("capture_supported", 0);
    EXPECT(![manager supportsDestination:MTLCaptureDestinationGPUTraceDocument]);
}

}  // namespace

std::span<const Check> double_checks() {
    static constexpr Check checks[] = {
        {"kernels run", kernels_run},
        {"kernels run at width 32", kernels_run_at_width_32},
        {"consts choose forms", consts_choose_forms},
        {"order is free between barriers", order_is_free_between_barriers},
        {"program and GPU run apart", program_and_gpu_run_apart},
        {"handlers can be late", handlers_can_be_late},
        {"time can be simulated", time_can_be_simulated},
        {"queues have places", queues_have_places},
        {"references can be kept", references_can_be_kept},
        {"queues may die on their thread", queues_may_die_on_their_thread},
        {"libraries compile in parallel", libraries_compile_in_parallel},
        {"memory is counted", memory_is_counted},
        {"machines differ", machines_differ},
        {"compilers refuse", compilers_refuse},
        {"archives save compiling", archives_save_compiling},
        {"archives are checked", archives_are_checked},
        {"archives belong to a system", archives_belong_to_a_system},
        {"work can be captured", work_can_be_captured},
    };
    return checks;
}
