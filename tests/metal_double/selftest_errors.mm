// Injected errors, and errors of command buffers.
#include "selftest.h"

namespace {

void devices_and_queues_fail() {
    lily_double_set("fail:device", 2);
    EXPECT(MTLCreateSystemDefaultDevice() != nil);
    EXPECT(MTLCreateSystemDefaultDevice() == nil);
    const id<MTLDevice> device = MTLCreateSystemDefaultDevice();
    lily_double_set("fail:queue", 1);
    EXPECT([device newCommandQueue] == nil && [device newCommandQueue] != nil);
}

void resources_fail() {
    const Gpu gpu;
    lily_double_set("fail:buffer", 3);
    EXPECT(gpu.buffer(1) != nil && gpu.buffer(1) != nil && gpu.buffer(1) == nil && gpu.buffer(1) != nil);
    lily_double_set("fail:residency_set", 1);
    NSError* error = nil;
    EXPECT([gpu.device newResidencySetWithDescriptor:[MTLResidencySetDescriptor new] error:&error] == nil);
    EXPECT(error != nil);
}

void compiling_fails() {
    const Gpu gpu;
    lily_double_set("fail:library", 1);
    EXPECT(gpu.compile("rms_norm") == nil);
    const id<MTLLibrary> library = gpu.compile("rms_norm");
    lily_double_set("fail:function", 1);
    EXPECT(gpu.pipeline(library, "rms_norm") == nil);
    lily_double_set("fail:pipeline", 1);
    EXPECT(gpu.pipeline(library, "rms_norm") == nil);
    lily_double_set("fail:pipeline_lookup", 1);
    EXPECT(gpu.pipeline(library, "rms_norm") != nil);
    lily_double_set("threadgroup_memory:rms_norm", 32768);
    EXPECT(gpu.pipeline(library, "rms_norm").staticThreadgroupMemoryLength == 32768);
    lily_double_set("threadgroup_memory:rms_norm", 32769);
    EXPECT(gpu.pipeline(library, "rms_norm") == nil);
    lily_double_set("threadgroup_memory:rms_norm", 0);
    const With few("max_threads", 224);
    EXPECT(gpu.pipeline(library, "rms_norm").maxTotalThreadsPerThreadgroup == 224);
}

void archives_fail() {
    const Gpu gpu;
    NSError* error = nil;
    lily_double_set("fail:archive_open", 1);
    MTLBinaryArchiveDescriptor* const none = [MTLBinaryArchiveDescriptor new];
    EXPECT([gpu.device newBinaryArchiveWithDescriptor:none error:&error] == nil && error != nil);
    const id<MTLBinaryArchive> archive = [gpu.device newBinaryArchiveWithDescriptor:none error:&error];
    MTLComputePipelineDescriptor* const descriptor = [MTLComputePipelineDescriptor new];
    const id<MTLLibrary> library = gpu.compile("rms_norm");
    descriptor.computeFunction = [library newFunctionWithName:@"rms_norm"];
    lily_double_set("fail:archive_add", 1);
    EXPECT(![archive addComputePipelineFunctionsWithDescriptor:descriptor error:&error]);
    lily_double_set("fail:archive_serialize", 1);
    EXPECT(![archive serializeToURL:[NSURL fileURLWithPath:@"/nowhere"] error:&error]);
}

void captures_fail() {
    const Gpu gpu;
    MTLCaptureDescriptor* const descriptor = [MTLCaptureDescriptor new];
    descriptor.captureObject = gpu.device;
    descriptor.destination = MTLCaptureDestinationGPUTraceDocument;
    descriptor.outputURL = [NSURL fileURLWithPath:@"/nowhere/a.gputrace"];
    NSError* error = nil;
    EXPECT(![[MTLCaptureManager sharedCaptureManager] startCaptureWithDescriptor:descriptor error:&error]);
    lily_double_set("fail:capture", 1);
    EXPECT(![[MTLCaptureManager sharedCaptureManager] startCaptureWithDescriptor:descriptor error:&error]);
    EXPECT(error.code == MTLCaptureErrorNotSupported);
}

void encoding_fails() {
    const Gpu gpu;
    lily_double_set("fail:command_buffer", 1);
    EXPECT(gpu.command_buffer() == nil);
    lily_double_set("fail:encoder", 1);
    @autoreleasepool {
        EXPECT(gpu.encoder(gpu.command_buffer()) == nil);
    }
    const Norm norm(gpu, 1);
    EXPECT(run(gpu, {&norm}));
}

void execution_fails() {
    const With code("execution_error", MTLCommandBufferErrorOutOfMemory);
    const Gpu gpu;
    const Norm one(gpu, 1), two(gpu, 2);
    lily_double_set("fail:execution", 1);
    const id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    const id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);
    one.encode(encoder);
    [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    two.encode(encoder);
    [encoder endEncoding];
    [command_buffer commit];
    [command_buffer waitUntilCompleted];
    EXPECT(command_buffer.status == MTLCommandBufferStatusError);
    NSError* const error = command_buffer.error;
    EXPECT(error.code == MTLCommandBufferErrorOutOfMemory && [error.domain isEqual:MTLCommandBufferErrorDomain]);
    NSArray<id<MTLCommandBufferEncoderInfo>>* const infos = error.userInfo[MTLCommandBufferEncoderInfoErrorKey];
    EXPECT(infos.count == 1 && infos[0].errorState == MTLCommandEncoderErrorStateFaulted);
    EXPECT([infos[0].label isEqualToString:@"test"]);
    EXPECT(one.result_is(1) && two.result_is(0));
    EXPECT(run(gpu, {&two}) && two.result_is(2) && count("failed_command_buffers") == 1);
}

}  // namespace

std::span<const Check> error_checks() {
    static constexpr Check checks[] = {
        {"devices and queues fail", devices_and_queues_fail},
        {"resources fail", resources_fail},
        {"compiling fails", compiling_fails},
        {"archives fail", archives_fail},
        {"captures fail", captures_fail},
        {"encoding fails", encoding_fails},
        {"execution fails", execution_fails},
    };
    return checks;
}
