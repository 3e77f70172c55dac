// The objects behind Metal's protocols. Every object keeps its device alive, as Metal's do. What Metal declares and the
// Metal device does not use is not there: sending it aborts with the name of the message.
#pragma once

#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control.h"
#include "executor.h"
#include "kernels.h"

namespace metal_double {
struct QueueState;
}

@class SoftBuffer, SoftCommandBuffer, SoftEncoder, SoftFunction, SoftLibrary, SoftPipeline, SoftQueue;

@interface SoftDevice : NSObject <MTLDevice> {
@public
    pid_t process;
    std::string gpu, os_build;  // of the moment when it was made
    std::atomic<int64_t> allocated;
}
@end

// Something that command buffers use without keeping it alive. `users` counts the command buffers whose completion the
// program has not seen yet: until then releasing the object is misuse, whatever the GPU has really done.
@interface SoftUsed : NSObject {
@public
    SoftDevice* device;
    std::atomic<int64_t> users;
}
- (void)checkUnused:(const char*)what;
@end

@interface SoftBuffer : SoftUsed <MTLBuffer> {
@public
    std::byte* memory;
    NSUInteger size;
    NSString* name;
}
- (instancetype)initWithDevice:(SoftDevice*)owner length:(NSUInteger)length;
@end

@interface SoftPipeline : SoftUsed <MTLComputePipelineState> {
@public
    metal_double::Form form;
    NSString* name;
    NSUInteger max_threads, threadgroup_memory;
    bool whole_simdgroups;  // promised by the descriptor
}
@end

@interface SoftLibrary : NSObject <MTLLibrary> {
@public
    SoftDevice* device;
    NSString* name;
    metal_double::Source source;
    std::string identity;  // of text and options
}
@end

@interface SoftFunction : NSObject <MTLFunction> {
@public
    SoftLibrary* library;
    std::string function_name;
    metal_double::Function function;
}
@end

@interface SoftArchive : NSObject <MTLBinaryArchive> {
@public
    SoftDevice* device;
    std::mutex mutex;
    std::set<std::string> pipelines;  // identities
}
// nil, and the error, when the file is not an archive of this device and system.
- (instancetype)initWithDevice:(SoftDevice*)owner url:(NSURL*)url error:(NSError**)error;
- (bool)contains:(const std::string&)identity;
@end

@interface SoftResidencySet : NSObject <MTLResidencySet> {
@public
    SoftDevice* device;
    std::vector<id<MTLAllocation>> wanted, committed;
    bool requested;
}
@end

@interface SoftEncoder : NSObject <MTLComputeCommandEncoder> {
@public
    SoftCommandBuffer* command_buffer;
    NSString* name;
    std::vector<metal_double::Batch> batches;
    __unsafe_unretained SoftPipeline* pipeline;
    std::array<metal_double::Binding, 31> bindings;
    uint32_t bound;  // a bit for each index that was bound since the last dispatch
    bool ended;
}
- (instancetype)initWithCommandBuffer:(SoftCommandBuffer*)owner;
@end

@interface SoftCommandBuffer : NSObject <MTLCommandBuffer> {
@public
    SoftDevice* device;
    // Not kept alive, though Metal would: a queue that dies waits for its thread, and then nothing of it is left.
    __weak SoftQueue* queue;
    std::shared_ptr<metal_double::QueueState> queue_state;
    NSString* name;
    bool keeps_references, reports_encoders;
    __unsafe_unretained SoftEncoder* open_encoder;
    std::vector<std::pair<NSString*, std::vector<metal_double::Batch>>> encoders;
    std::vector<id> references;
    std::set<void*> uses;  // SoftUsed, counted in `users` of each and not kept alive
    std::vector<MTLCommandBufferHandler> handlers;
    std::atomic<NSUInteger> state;  // MTLCommandBufferStatus
    std::atomic<bool> checked;      // someone has looked at the outcome
    bool excused;                   // an injected failure is why it will not be committed
    uint64_t number;                // of the commit, in its queue
    NSError* failure;
    CFTimeInterval start, end;
    std::mutex mutex;
    std::condition_variable completed;
    bool over;  // those who wait may go on
}
- (void)use:(SoftUsed*)object;
- (bool)isOver;
@end

namespace metal_double {

// What the thread of a queue works on; it outlives the queue object when that dies on the thread itself.
struct QueueState {
    Executor executor;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<SoftCommandBuffer*> committed;
    // Objects that command buffers use, by the number of the commit, until the program has seen their completion.
    std::deque<std::pair<uint64_t, std::vector<void*>>> unseen;
    uint64_t commits = 0;
    int64_t made = 0, running = 0;  // command buffers not completed, and those of them that are committed
    bool stop = false;
};

void run_queue(const std::shared_ptr<QueueState>& queue);
// The program knows that the command buffers up to this number are completed.
void see_completion(QueueState& queue, uint64_t number);

// Misuse when an argument is nil, of another implementation, or of another device.
template <class T>
T* checked(id object, const char* call, SoftDevice* device);
void check_device(SoftDevice* have, SoftDevice* wanted, const char* call);

NSString* string(const std::string& text);
// An error with a description. `out` is what a call was given; losing the description is misuse.
void set_error(NSError** out, const char* call, NSErrorDomain domain, NSInteger code, const std::string& what);
void check_error_place(NSError** out, const char* call);
// After fork() nothing of Metal may be used.
void check_process(SoftDevice* device);

// What an archive stores for a pipeline.
std::string identity_of(MTLComputePipelineDescriptor* descriptor);
SoftPipeline* make_pipeline(SoftDevice* device, MTLComputePipelineDescriptor* descriptor, MTLPipelineOption options,
                            NSError** error);
SoftLibrary* make_library(SoftDevice* device, NSString* text, MTLCompileOptions* options, NSError** error);
// The capture manager counts what is committed while it captures.
void note_commit(SoftQueue* queue);

}  // namespace metal_double

@interface SoftQueue : NSObject <MTLCommandQueue> {
@public
    SoftDevice* device;
    NSString* name;
    std::shared_ptr<metal_double::QueueState> queue_state;
    std::thread thread;
    std::vector<id<MTLResidencySet>> residency_sets;
}
- (instancetype)initWithDevice:(SoftDevice*)owner;
@end

namespace metal_double {

template <class T>
T* checked(id object, const char* call, SoftDevice* device) {
    if (object == nil) misuse("%s is given nil", call);
    if (![object isKindOfClass:[T class]]) misuse("%s is given an object of another kind", call);
    T* const known = object;
    check_device(known->device, device, call);
    return known;
}

}  // namespace metal_double
