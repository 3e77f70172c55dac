// The compute encoder: it checks every call and collects dispatches, in batches that barriers separate.
#include <algorithm>

#include "objects.h"

using namespace metal_double;

namespace {

constexpr NSUInteger kIndices = 31;  // of buffers

void check_threads(SoftPipeline* pipeline, MTLSize threads) {
    const lily::KernelInfo& kernel = *pipeline->form.function.kernel;
    const NSUInteger count = threads.width * threads.height * threads.depth;
    if (count > pipeline->max_threads)
        misuse("%s: %lu threads per threadgroup, the pipeline allows %lu", kernel.name,
               static_cast<unsigned long>(count), static_cast<unsigned long>(pipeline->max_threads));
    if (pipeline->whole_simdgroups && count % 32 != 0)
        misuse("%s: the threadgroup is not a multiple of the execution width, as its descriptor promises", kernel.name);
    if (threads.width != kernel.simds * 32 || threads.height != 1 || threads.depth != 1)
        misuse("%s: dispatched with threadgroups of (%lu, %lu, %lu), it is written for (%u, 1, 1)", kernel.name,
               static_cast<unsigned long>(threads.width), static_cast<unsigned long>(threads.height),
               static_cast<unsigned long>(threads.depth), kernel.simds * 32);
}

void check_groups(const lily::KernelInfo& kernel, MTLSize grid) {
    constexpr NSUInteger kMost = NSUInteger{1} << 32;
    if (grid.width == 0 || grid.height == 0 || grid.depth == 0) misuse("%s: an empty grid", kernel.name);
    if (grid.width >= kMost || grid.height >= kMost || grid.depth >= kMost ||
        static_cast<unsigned __int128>(grid.width) * grid.height * grid.depth >= kMost)
        misuse("%s: a grid of more threadgroups than 32 bits can count", kernel.name);
}

void check_bindings(const lily::KernelInfo& kernel, const Dispatch& dispatch, uint32_t bound) {
    const uint32_t needed = (1u << (kernel.slot_count + 1)) - 1;
    for (uint32_t i = 0; i <= kernel.slot_count; ++i)
        if ((bound >> i & 1) == 0) misuse("%s: buffer %u was not bound since the last dispatch", kernel.name, i);
    if ((bound & ~needed) != 0) misuse("%s: buffers are bound that it does not have", kernel.name);
    const Binding& args = dispatch.bindings[kernel.slot_count];
    if (args.room < sizeof(uint32_t) * kernel.arg_count)
        misuse("%s: the buffer of its args ends after %lu bytes", kernel.name, static_cast<unsigned long>(args.room));
    if (reinterpret_cast<uintptr_t>(args.address) % static_cast<uintptr_t>(setting(Setting::kConstantAlignment)) != 0)
        misuse("%s: the offset of its args is not aligned", kernel.name);
}

}  // namespace

@implementation SoftEncoder
- (instancetype)initWithCommandBuffer:(SoftCommandBuffer*)owner {
    self = [super init];
    command_buffer = owner;
    owner->open_encoder = self;
    batches.emplace_back();
    add(Counter::kEncoders);
    return self;
}
- (void)dealloc {
    if (!ended) misuse("an encoder is released without endEncoding");
}
- (id<MTLDevice>)device {
    return command_buffer->device;
}
- (NSString*)label {
    return name;
}
- (void)setLabel:(NSString*)label {
    name = [label copy];
}
- (MTLDispatchType)dispatchType {
    return MTLDispatchTypeConcurrent;
}

- (void)checkOpen:(const char*)call {
    if (ended) misuse("%s after endEncoding", call);
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    constexpr const char* kCall = "setComputePipelineState:";
    [self checkOpen:kCall];
    pipeline = checked<SoftPipeline>(state, kCall, command_buffer->device);
    [command_buffer use:pipeline];
}

- (void)setBuffers:(const id<MTLBuffer>*)buffers offsets:(const NSUInteger*)offsets withRange:(NSRange)range {
    constexpr const char* kCall = "setBuffers:";
    [self checkOpen:kCall];
    if (range.length == 0 || range.location >= kIndices || range.length > kIndices - range.location)
        misuse("%s at %lu, %lu of them: there are %lu", kCall, static_cast<unsigned long>(range.location),
               static_cast<unsigned long>(range.length), static_cast<unsigned long>(kIndices));
    for (NSUInteger i = 0; i < range.length; ++i) {
        SoftBuffer* const buffer = checked<SoftBuffer>(buffers[i], kCall, command_buffer->device);
        if (offsets[i] >= buffer->size)
            misuse("%s offset %lu is past the end of a buffer of %lu bytes", kCall,
                   static_cast<unsigned long>(offsets[i]), static_cast<unsigned long>(buffer->size));
        bindings[range.location + i] = {buffer->memory + offsets[i], buffer->size - offsets[i]};
        bound |= 1u << (range.location + i);
        [command_buffer use:buffer];
    }
}

- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
    [self checkOpen:"dispatchThreadgroups:"];
    if (pipeline == nil) misuse("a dispatch without a pipeline");
    const lily::KernelInfo& kernel = *pipeline->form.function.kernel;
    check_threads(pipeline, threads);
    check_groups(kernel, grid);
    Dispatch dispatch{.form = pipeline->form};
    std::copy_n(bindings.begin(), dispatch.bindings.size(), dispatch.bindings.begin());
    dispatch.grid = {static_cast<uint32_t>(grid.width), static_cast<uint32_t>(grid.height),
                     static_cast<uint32_t>(grid.depth)};
    check_bindings(kernel, dispatch, bound);
    bound = 0;
    batches.back().push_back(dispatch);
    add(Counter::kDispatches);
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
    [self checkOpen:"memoryBarrierWithScope:"];
    if (scope != MTLBarrierScopeBuffers) misuse("a barrier of another scope than buffers");
    batches.emplace_back();
    add(Counter::kBarriers);
}

- (void)endEncoding {
    [self checkOpen:"endEncoding"];
    ended = true;
    command_buffer->encoders.emplace_back(name, std::move(batches));
    command_buffer->open_encoder = nil;
}
@end
