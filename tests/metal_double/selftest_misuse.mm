// What must abort. Each runs in a process of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "objc_runtime.h"
#include "selftest.h"

@interface NSObject (Unknown)
- (void)messageThatNobodyUnderstands;
@end

namespace {

// An open encoder that a test may misuse.
struct Open {
    Gpu gpu;
    Norm norm{gpu, 1};
    id<MTLCommandBuffer> command_buffer = gpu.command_buffer();
    id<MTLComputeCommandEncoder> encoder = gpu.encoder(command_buffer);

    void finish() const {
        [encoder endEncoding];
        [command_buffer commit];
        [command_buffer waitUntilCompleted];
    }
    void bind_at(NSUInteger index, id<MTLBuffer> buffer, NSUInteger offset) const {
        [encoder setBuffers:&buffer offsets:&offset withRange:NSMakeRange(index, 1)];
    }
    void dispatch(MTLSize grid, MTLSize threads) const {
        norm.bind(encoder);
        [encoder dispatchThreadgroups:grid threadsPerThreadgroup:threads];
    }
};

const MTLSize kGrid{Norm::kRows, 1, 1}, kThreads{256, 1, 1};

// Runtime.

void over_release() {
    NSObject* const object = [NSObject new];
    objc_release(object);
    objc_release(object);
}
void freed_object() {
    __unsafe_unretained NSObject* object = nil;
    {
        NSObject* const owner = [NSObject new];
        object = owner;
    }
    [object isEqual:@"another"];
}
void unknown_message() {
    [[NSObject new] messageThatNobodyUnderstands];
}
void array_index() {
    static_cast<void>([@[ @"one" ] objectAtIndex:1]);
}

// Resources.

void empty_buffer() {
    static_cast<void>(Gpu().buffer(0));
}
void long_buffer() {
    const With small("max_buffer_length", 1000);
    static_cast<void>(Gpu().buffer(1001));
}
void buffer_options() {
    static_cast<void>([Gpu().device newBufferWithLength:16 options:MTLResourceHazardTrackingModeUntracked]);
}
void remove_absent_allocation() {
    const Gpu gpu;
    NSError* error = nil;
    const id<MTLResidencySet> set = [gpu.device newResidencySetWithDescriptor:[MTLResidencySetDescriptor new]
                                                                        error:&error];
    [set removeAllocation:gpu.buffer(16)];
}
void foreign_allocation() {
    const Gpu gpu;
    NSError* error = nil;
    const id<MTLResidencySet> set = [gpu.device newResidencySetWithDescriptor:[MTLResidencySetDescriptor new]
                                                                        error:&error];
    const With second("device", 1);
    [set addAllocation:Gpu().buffer(16)];
}
void old_system() {
    const With system("os_major", 14);
    NSError* error = nil;
    static_cast<void>([Gpu().device newResidencySetWithDescriptor:[MTLResidencySetDescriptor new] error:&error]);
}

// Compiling.

void compile(MTLCompileOptions* options, NSError** error) {
    static_cast<void>([Gpu().device newLibraryWithSource:@"" options:options error:error]);
}
void no_options() {
    NSError* error = nil;
    compile((MTLCompileOptions* _Nonnull)nil, &error);
}
void no_language() {
    NSError* error = nil;
    MTLCompileOptions* const options = [MTLCompileOptions new];
    options.mathMode = MTLMathModeSafe;
    compile(options, &error);
}
void no_math_mode() {
    NSError* error = nil;
    MTLCompileOptions* const options = [MTLCompileOptions new];
    options.languageVersion = MTLLanguageVersion3_2;
    compile(options, &error);
}
void fast_math() {
    [MTLCompileOptions new].mathMode = MTLMathModeFast;
}
void lost_error() {
    NSError* __autoreleasing* const nowhere = nullptr;
    compile(compile_options(), nowhere);
}
void no_function() {
    NSError* error = nil;
    static_cast<void>([Gpu().device newComputePipelineStateWithDescriptor:[MTLComputePipelineDescriptor new]
                                                                  options:MTLPipelineOptionNone
                                                               reflection:nil
                                                                    error:&error]);
}
void foreign_function() {
    const Gpu gpu;
    const id<MTLLibrary> library = gpu.compile("rms_norm");
    const With second("device", 1);
    static_cast<void>(Gpu().pipeline(library, "rms_norm"));
}

// Encoding.

void nil_pipeline() {
    [Open().encoder setComputePipelineState:(id<MTLComputePipelineState> _Nonnull)nil];
}
void no_pipeline() {
    const Open open;
    open.bind_at(0, open.norm.x, 0);
    open.norm.dispatch(open.encoder);
}
void foreign_pipeline() {
    const Open open;
    const With second("device", 1);
    const Gpu other;
    [open.encoder setComputePipelineState:Norm(other, 1).pipeline];
}
void nil_buffer() {
    Open().bind_at(0, nil, 0);
}
void high_index() {
    const Open open;
    open.bind_at(31, open.norm.x, 0);
}
void high_offset() {
    const Open open;
    open.bind_at(0, open.norm.x, open.norm.x.length);
}
void unbound_slot() {
    const Open open;
    [open.encoder setComputePipelineState:open.norm.pipeline];
    for (NSUInteger i = 0; i < 4; ++i) open.bind_at(i, open.norm.x, 0);
    open.norm.dispatch(open.encoder);
}
void stale_binding() {
    const Open open;
    open.norm.encode(open.encoder);
    open.norm.dispatch(open.encoder);
}
void surplus_binding() {
    const Open open;
    open.norm.bind(open.encoder);
    open.bind_at(5, open.norm.x, 0);
    open.norm.dispatch(open.encoder);
}
void short_args() {
    const Open open;
    open.norm.bind(open.encoder);
    open.bind_at(4, open.norm.args, 60);
    open.norm.dispatch(open.encoder);
}
void args_alignment() {
    const Open open;
    open.norm.bind(open.encoder);
    open.bind_at(4, open.norm.args, 2);
    open.norm.dispatch(open.encoder);
}
void empty_grid() {
    Open().dispatch({0, 1, 1}, kThreads);
}
void huge_grid() {
    Open().dispatch({1 << 16, 1 << 15, 2}, kThreads);
}
void many_threads() {
    Open().dispatch(kGrid, {512, 1, 1});
}
void other_threads() {
    Open().dispatch(kGrid, {128, 1, 1});
}
void broken_promise() {
    Open().dispatch(kGrid, {100, 1, 1});
}
void other_scope() {
    [Open().encoder memoryBarrierWithScope:MTLBarrierScopeTextures];
}
void after_end() {
    const Open open;
    [open.encoder endEncoding];
    open.norm.dispatch(open.encoder);
}
void end_twice() {
    const Open open;
    [open.encoder endEncoding];
    [open.encoder endEncoding];
}
void two_encoders() {
    const Open open;
    static_cast<void>(open.gpu.encoder(open.command_buffer));
}
void serial_encoder() {
    static_cast<void>([Gpu().command_buffer() computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial]);
}
void dropped_encoder() {
    const Open open;
}
void dropped_command_buffer() {
    [Open().encoder endEncoding];
}

// Committing and waiting.

void commit_open() {
    [Open().command_buffer commit];
}
void commit_twice() {
    const Open open;
    open.finish();
    [open.command_buffer commit];
}
void encode_after_commit() {
    const Open open;
    open.finish();
    static_cast<void>(open.gpu.encoder(open.command_buffer));
}
void late_handler() {
    const Open open;
    open.finish();
    [open.command_buffer addCompletedHandler:^(id<MTLCommandBuffer>){
    }];
}
void wait_before_commit() {
    [Gpu().command_buffer() waitUntilCompleted];
}
void wait_in_handler() {
    const Open open;
    [open.command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      [done waitUntilCompleted];
    }];
    open.finish();
}
void early_time() {
    static_cast<void>(Gpu().command_buffer().GPUStartTime);
}
void no_places() {
    const With places("max_command_buffers", 2);
    const Gpu gpu;
    for (int i = 0; i < 3; ++i) static_cast<void>(gpu.command_buffer());
}
void ignored_error() {
    @autoreleasepool {
        const Open open;
        lily_double_set("fail:execution", 1);
        open.finish();
    }
}
void commit_without_queue() {
    id<MTLCommandBuffer> command_buffer = nil;
    @autoreleasepool {
        command_buffer = Gpu().command_buffer();
    }
    [command_buffer commit];
}

// Running. The GPU finds these after the commit.

void short_buffer() {
    const Open open;
    open.norm.bind(open.encoder);
    open.bind_at(1, open.gpu.buffer(2), 0);
    open.norm.dispatch(open.encoder);
    open.finish();
}
void slot_alignment() {
    const Open open;
    open.norm.bind(open.encoder);
    open.bind_at(1, open.gpu.buffer(4096), 1);
    open.norm.dispatch(open.encoder);
    open.finish();
}
void other_grid() {
    const Open open;
    open.dispatch({2, 1, 1}, kThreads);
    open.finish();
}
void missing_barrier() {
    const Open open;
    open.norm.encode(open.encoder);
    open.norm.encode(open.encoder);
    open.finish();
}

// Releasing.

// Without the pool that temporary references wait in.
struct OpenAlone : std::optional<Open> {
    OpenAlone() {
        @autoreleasepool {
            emplace();
            (*this)->norm.encode((*this)->encoder);
            [(*this)->encoder endEncoding];
        }
    }
};

void released_buffer() {
    const With held("hold", 1);
    OpenAlone open;
    [open->command_buffer commit];
    open->norm.y = nil;
}
void released_unseen_buffer() {
    const With strict("handler_observes", 0);
    OpenAlone open;
    [open->command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      static_cast<void>(done.status);
    }];
    [open->command_buffer commit];
    while (count("in_flight") > 0) usleep(1000);
    open->norm.y = nil;
}
void released_pipeline() {
    OpenAlone open;
    open->norm.pipeline = nil;
}

#if __has_feature(thread_sanitizer)
// Both are late enough to go well; nothing but luck makes them.
void early_read() {
    const OpenAlone open;
    [open->command_buffer commit];
    usleep(50000);
    EXPECT(open->norm.result_is(1));
    [open->command_buffer waitUntilCompleted];
}

void early_release() {
    OpenAlone open;
    [open->command_buffer addCompletedHandler:^(id<MTLCommandBuffer> done) {
      static_cast<void>(done.status);
    }];
    [open->command_buffer commit];
    usleep(50000);
    open->norm.y = nil;
}
#endif

// Other processes, captures.

void after_fork() {
    const Gpu gpu;
    if (fork() == 0) {
        static_cast<void>(gpu.command_buffer());
        _exit(0);
    }
    int status = 0;
    wait(&status);
    if (WIFSIGNALED(status)) _exit(1);
}
void stop_without_capture() {
    [[MTLCaptureManager sharedCaptureManager] stopCapture];
}
void capture_of_nothing() {
    NSError* error = nil;
    static_cast<void>([[MTLCaptureManager sharedCaptureManager] startCaptureWithDescriptor:[MTLCaptureDescriptor new]
                                                                                     error:&error]);
}

}  // namespace

std::span<const Misuse> misuses() {
    static constexpr Misuse all[] = {
        {"over-release", "retain or release of a freed object of class NSObject|heap-use-after-free", over_release},
        {"freed object", "isEqual: sent to a freed object of class NSObject|heap-use-after-free", freed_object},
        {"unknown message", "NSObject does not understand -messageThatNobodyUnderstands", unknown_message},
        {"array index", "index 1 of an array of 1", array_index},
        {"empty buffer", "of no bytes", empty_buffer},
        {"long buffer", "of 1001 bytes, more than maxBufferLength", long_buffer},
        {"buffer options", "with options 256", buffer_options},
        {"absent allocation", "was not added", remove_absent_allocation},
        {"foreign allocation", "addAllocation: is given an object of another device", foreign_allocation},
        {"old system", "new in macOS 15", old_system},
        {"no options", "fast math is the default", no_options},
        {"no language", "without a language version", no_language},
        {"no math mode", "needs the safe math mode", no_math_mode},
        {"fast math", "must be safe", fast_math},
        {"lost error", "has nowhere to put its error", lost_error},
        {"no function", "is given no function", no_function},
        {"foreign function", "of another device", foreign_function},
        {"nil pipeline", "setComputePipelineState: is given nil", nil_pipeline},
        {"no pipeline", "a dispatch without a pipeline", no_pipeline},
        {"foreign pipeline", "of another device", foreign_pipeline},
        {"nil buffer", "setBuffers: is given nil", nil_buffer},
        {"high index", "there are 31", high_index},
        {"high offset", "is past the end", high_offset},
        {"unbound slot", "buffer 4 was not bound", unbound_slot},
        {"stale binding", "buffer 0 was not bound since the last dispatch", stale_binding},
        {"surplus binding", "buffers are bound that it does not have", surplus_binding},
        {"short args", "its args ends after 4 bytes", short_args},
        {"args alignment", "args is not aligned", args_alignment},
        {"empty grid", "an empty grid", empty_grid},
        {"huge grid", "more threadgroups than 32 bits", huge_grid},
        {"many threads", "512 threads per threadgroup, the pipeline allows 256", many_threads},
        {"other threads", "it is written for (256, 1, 1)", other_threads},
        {"broken promise", "as its descriptor promises", broken_promise},
        {"other scope", "another scope than buffers", other_scope},
        {"after end", "after endEncoding", after_end},
        {"end twice", "endEncoding after endEncoding", end_twice},
        {"two encoders", "a second encoder", two_encoders},
        {"serial encoder", "only concurrent encoders", serial_encoder},
        {"dropped encoder", "released without endEncoding", dropped_encoder},
        {"dropped command buffer", "released without having been committed", dropped_command_buffer},
        {"commit open", "commit while an encoder is open", commit_open},
        {"commit twice", "commit after commit", commit_twice},
        {"encode after commit", "computeCommandEncoderWithDispatchType: after commit", encode_after_commit},
        {"late handler", "addCompletedHandler: after commit", late_handler},
        {"wait before commit", "before commit never returns", wait_before_commit},
        {"wait in handler", "in a completed handler never returns", wait_in_handler},
        {"early time", "GPUStartTime before completion", early_time},
        {"no places", "2 command buffers are made and none is committed", no_places},
        {"ignored error", "nobody looked at the status or error", ignored_error},
        {"commit without queue", "after the queue was released", commit_without_queue},
        {"short buffer", "the buffer of w ends after 2 bytes, the kernel uses 128", short_buffer},
        {"slot alignment", "offset of w is not a multiple of 2", slot_alignment},
        {"other grid", "with a grid of (2, 1, 1), its args need (3, 1, 1)", other_grid},
        {"missing barrier", "no barrier between rms_norm and rms_norm: y of one and y of the other", missing_barrier},
        {"released buffer", "a buffer is released while a command buffer uses it", released_buffer},
        {"released unseen buffer", "a buffer is released while a command buffer uses it", released_unseen_buffer},
        {"released pipeline", "a pipeline is released while a command buffer uses it", released_pipeline},
#if __has_feature(thread_sanitizer)
        {"early read", "data race", early_read},
        {"early release", "data race", early_release},
#endif
        {"after fork", "forked after the device was opened", after_fork},
        {"stop without capture", "without a capture", stop_without_capture},
        {"capture of nothing", "nothing to capture", capture_of_nothing},
    };
    return all;
}
