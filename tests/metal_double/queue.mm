// Command queues and command buffers. A queue has a thread that runs what was committed, in that order, while the
// program goes on: what the program touches too early is a race that the sanitizers see.
#include <unistd.h>
#include <algorithm>

#include <chrono>

#include "objects.h"

using namespace metal_double;

namespace {

CFTimeInterval now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The queue whose thread this is, if any.
thread_local const QueueState* own_queue = nullptr;

size_t count_dispatches(SoftCommandBuffer* buffer) {
    size_t count = 0;
    for (const auto& [name, batches] : buffer->encoders)
        for (const Batch& batch : batches) count += batch.size();
    return count;
}

void wait_for_start(NSUInteger latency_us) {
    std::this_thread::sleep_for(std::chrono::microseconds(latency_us));
    while (setting(Setting::kHold) != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// The error of a command buffer that went wrong in its encoder of this number.
NSError* make_failure(SoftCommandBuffer* buffer, NSInteger code, const std::string& what, size_t faulted);

// Runs what was encoded; with an injected error only the first half of it.
void execute(SoftCommandBuffer* buffer, Executor& executor) {
    const bool injected = fails(Failure::kExecution);
    size_t left = injected ? count_dispatches(buffer) / 2 : SIZE_MAX, encoder = 0, done = 0;
    std::string problem;
    buffer->start = now();
    for (; encoder < buffer->encoders.size() && problem.empty() && left > 0; ++encoder) {
        const std::vector<Batch>& batches = buffer->encoders[encoder].second;
        size_t count = 0;
        for (const Batch& batch : batches) count += batch.size();
        problem = executor.run(batches, left);
        done += std::min(left, count);
        left -= std::min(left, count);
    }
    const int64_t simulated = setting(Setting::kDispatchTime);
    buffer->end =
        simulated == 0 ? now() : buffer->start + 1e-9 * static_cast<double>(simulated) * static_cast<double>(done);
    const size_t faulted = encoder == 0 ? 0 : encoder - 1;
    if (!problem.empty()) buffer->failure = make_failure(buffer, MTLCommandBufferErrorInternal, problem, faulted);
    if (injected && problem.empty())
        buffer->failure =
            make_failure(buffer, setting(Setting::kExecutionError), "injected command buffer error", faulted);
}

// A handler may tell the rest of the program, which may then release what the command buffer used.
void call_handlers(SoftCommandBuffer* buffer, QueueState& queue) {
    if (!buffer->handlers.empty() && setting(Setting::kHandlerObserves) != 0) see_completion(queue, buffer->number);
    for (MTLCommandBufferHandler handler : buffer->handlers) handler(buffer);
    buffer->handlers.clear();
}

void complete(SoftCommandBuffer* buffer, QueueState& queue) {
    if (buffer->failure != nil) add(Counter::kFailedCommandBuffers);
    buffer->encoders.clear();
    buffer->references.clear();
    add(Counter::kInFlight, -1);
    {
        const std::lock_guard lock(queue.mutex);
        --queue.made;
        --queue.running;
    }
    queue.changed.notify_all();
    buffer->state.store(buffer->failure == nil ? MTLCommandBufferStatusCompleted : MTLCommandBufferStatusError);
    const bool late = setting(Setting::kLateHandlers) != 0;
    if (!late) call_handlers(buffer, queue);
    {
        const std::lock_guard lock(buffer->mutex);
        buffer->over = true;
        buffer->completed.notify_all();
    }
    if (late) call_handlers(buffer, queue);
}

}  // namespace

namespace metal_double {

static void stop_using(void* object) {
    // Not even a passing reference: counting it would order this thread with the one that releases the object.
    __unsafe_unretained SoftUsed* const used = (__bridge SoftUsed*)object;
    used->users.fetch_sub(1, std::memory_order_relaxed);
}

void run_queue(const std::shared_ptr<QueueState>& queue) {
    own_queue = queue.get();
    for (;;) {
        @autoreleasepool {
            SoftCommandBuffer* buffer = nil;
            {
                std::unique_lock lock(queue->mutex);
                queue->changed.wait(lock, [&] { return queue->stop || !queue->committed.empty(); });
                if (queue->committed.empty()) return;
                buffer = queue->committed.front();
                queue->committed.pop_front();
            }
            wait_for_start(static_cast<NSUInteger>(setting(Setting::kLatency)));
            buffer->state.store(MTLCommandBufferStatusScheduled);
            execute(buffer, queue->executor);
            complete(buffer, *queue);
        }
    }
}

void see_completion(QueueState& queue, uint64_t number) {
    const std::lock_guard lock(queue.mutex);
    while (!queue.unseen.empty() && queue.unseen.front().first <= number) {
        for (void* object : queue.unseen.front().second) stop_using(object);
        queue.unseen.pop_front();
    }
}

}  // namespace metal_double

@implementation SoftQueue
- (instancetype)initWithDevice:(SoftDevice*)owner {
    self = [super init];
    device = owner;
    queue_state = std::make_shared<QueueState>();
    thread = std::thread([shared = queue_state] { run_queue(shared); });
    return self;
}
- (void)dealloc {
    // A forked process has no such thread, and nobody to open a lock that was closed then.
    if (getpid() != device->process) return thread.detach();
    bool working;
    {
        const std::lock_guard lock(queue_state->mutex);
        queue_state->stop = true;
        working = queue_state->running > 0;
    }
    queue_state->changed.notify_all();
    // Releasing a queue does not wait for its work; and the last reference may go in a completed handler.
    working || own_queue == queue_state.get() ? thread.detach() : thread.join();
}
- (id<MTLDevice>)device {
    return device;
}
- (NSString*)label {
    return name;
}
- (void)setLabel:(NSString*)label {
    name = [label copy];
}
- (void)addResidencySet:(id<MTLResidencySet>)set {
    residency_sets.push_back(checked<SoftResidencySet>(set, "addResidencySet:", device));
    add(Counter::kAttachedResidencySets);
}
- (void)removeResidencySet:(id<MTLResidencySet>)set {
    const auto place = std::find(residency_sets.begin(), residency_sets.end(), set);
    if (place == residency_sets.end()) misuse("removeResidencySet: of one that was not added");
    residency_sets.erase(place);
    add(Counter::kAttachedResidencySets, -1);
}

// As many command buffers as the queue has may exist at once; then this waits for one to complete.
- (void)takePlace {
    const int64_t most = setting(Setting::kMaxCommandBuffers);
    std::unique_lock lock(queue_state->mutex);
    if (queue_state->made >= most) {
        if (queue_state->running == 0)
            misuse("%lld command buffers are made and none is committed", static_cast<long long>(most));
        if (own_queue == queue_state.get()) misuse("a completed handler waits for a command buffer to complete");
        queue_state->changed.wait(lock, [&] { return queue_state->made < most; });
    }
    ++queue_state->made;
}

- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor*)descriptor {
    check_process(device);
    if (descriptor == nil) misuse("commandBufferWithDescriptor: is given nil");
    if (fails(Failure::kCommandBuffer)) return nil;
    [self takePlace];
    SoftCommandBuffer* const made = [SoftCommandBuffer new];
    made->device = device;
    made->queue = self;
    made->queue_state = queue_state;
    made->keeps_references = descriptor.retainedReferences;
    made->reports_encoders = descriptor.errorOptions == MTLCommandBufferErrorOptionEncoderExecutionStatus;
    return made;
}
@end

@implementation SoftCommandBuffer
- (void)dealloc {
    const bool failed = state.load() == MTLCommandBufferStatusError;
    if (state.load() == MTLCommandBufferStatusNotEnqueued) {
        if (!excused) misuse("a command buffer is released without having been committed");
        for (void* object : uses) stop_using(object);
        const std::lock_guard lock(queue_state->mutex);
        --queue_state->made;
    } else if (!checked.load()) {
        if (failed) misuse("nobody looked at the status or error of a command buffer that failed");
        add(Counter::kUncheckedCommandBuffers);
    }
}
- (id<MTLDevice>)device {
    return device;
}
- (id<MTLCommandQueue>)commandQueue {
    return queue;
}
- (BOOL)retainedReferences {
    return keeps_references;
}
- (NSString*)label {
    return name;
}
- (void)setLabel:(NSString*)label {
    name = [label copy];
}

- (void)checkOpen:(const char*)call {
    if (state.load() != MTLCommandBufferStatusNotEnqueued) misuse("%s after commit", call);
}

- (void)use:(SoftUsed*)object {
    if (keeps_references) {
        references.push_back(object);
    } else if (uses.insert((__bridge void*)object).second) {
        object->users.fetch_add(1, std::memory_order_relaxed);
    }
}

- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
    check_process(device);
    [self checkOpen:"computeCommandEncoderWithDispatchType:"];
    if (open_encoder != nil) misuse("a second encoder is opened before endEncoding");
    if (type != MTLDispatchTypeConcurrent) misuse("only concurrent encoders are modelled");
    excused = fails(Failure::kEncoder);
    return excused ? nil : [[SoftEncoder alloc] initWithCommandBuffer:self];
}

- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
    [self checkOpen:"addCompletedHandler:"];
    if (handler == nil) misuse("addCompletedHandler: is given nil");
    handlers.push_back([handler copy]);
}

- (void)commit {
    check_process(device);
    [self checkOpen:"commit"];
    if (open_encoder != nil) misuse("commit while an encoder is open");
    SoftQueue* const owner = queue;
    if (owner == nil) misuse("commit after the queue was released");
    note_commit(owner);
    add(Counter::kCommandBuffers);
    raise_to(Counter::kMaxInFlight, add(Counter::kInFlight));
    state.store(MTLCommandBufferStatusCommitted);
    std::vector<void*> used(uses.begin(), uses.end());
    QueueState& shared = *queue_state;
    {
        const std::lock_guard lock(shared.mutex);
        number = ++shared.commits;
        ++shared.running;
        shared.unseen.emplace_back(number, std::move(used));
        shared.committed.push_back(self);
    }
    uses.clear();
    shared.changed.notify_all();
}

- (bool)isOver {
    const NSUInteger known = state.load();
    return known == MTLCommandBufferStatusCompleted || known == MTLCommandBufferStatusError;
}

// Handlers look at the outcome too, but what they see the rest of the program does not know yet.
- (void)noteSeen {
    if (![self isOver]) return;
    checked.store(true);
    if (own_queue != queue_state.get()) see_completion(*queue_state, number);
}

- (void)waitUntilCompleted {
    check_process(device);
    if (state.load() == MTLCommandBufferStatusNotEnqueued) misuse("waitUntilCompleted before commit never returns");
    if (own_queue == queue_state.get()) misuse("waitUntilCompleted in a completed handler never returns");
    {
        std::unique_lock lock(mutex);
        completed.wait(lock, [&] { return over; });
    }
    see_completion(*queue_state, number);
}

- (MTLCommandBufferStatus)status {
    [self noteSeen];
    return static_cast<MTLCommandBufferStatus>(state.load());
}

- (NSError*)error {
    if (![self isOver]) return nil;
    [self noteSeen];
    return failure;
}

- (CFTimeInterval)GPUStartTime {
    if (![self isOver]) misuse("GPUStartTime before completion");
    return start;
}
- (CFTimeInterval)GPUEndTime {
    if (![self isOver]) misuse("GPUEndTime before completion");
    return end;
}
@end

@interface MTLCommandBufferDescriptor () {
    BOOL references;
    MTLCommandBufferErrorOption option;
}
@end

@implementation MTLCommandBufferDescriptor
- (instancetype)init {
    self = [super init];
    references = YES;
    return self;
}
- (BOOL)retainedReferences {
    return references;
}
- (void)setRetainedReferences:(BOOL)value {
    references = value;
}
- (MTLCommandBufferErrorOption)errorOptions {
    return option;
}
- (void)setErrorOptions:(MTLCommandBufferErrorOption)value {
    option = value;
}
@end

// What an error tells about one encoder.
@interface SoftEncoderInfo : NSObject <MTLCommandBufferEncoderInfo> {
@public
    NSString* name;
    MTLCommandEncoderErrorState outcome;
}
@end

@implementation SoftEncoderInfo
- (NSString*)label {
    return name;
}
- (NSArray*)debugSignposts {
    return @[];
}
- (MTLCommandEncoderErrorState)errorState {
    return outcome;
}
@end

namespace {

NSError* make_failure(SoftCommandBuffer* buffer, NSInteger code, const std::string& what, size_t faulted) {
    NSDictionary* information = @{NSLocalizedDescriptionKey : string(what)};
    if (buffer->reports_encoders) {
        std::vector<SoftEncoderInfo*> infos;
        for (size_t i = 0; i < buffer->encoders.size(); ++i) {
            SoftEncoderInfo* const info = [SoftEncoderInfo new];
            info->name = buffer->encoders[i].first;
            info->outcome = i < faulted    ? MTLCommandEncoderErrorStateCompleted
                            : i == faulted ? MTLCommandEncoderErrorStateFaulted
                                           : MTLCommandEncoderErrorStatePending;
            infos.push_back(info);
        }
        information = @{
            NSLocalizedDescriptionKey : string(what),
            MTLCommandBufferEncoderInfoErrorKey : [NSArray arrayWithObjects:infos.data() count:infos.size()],
        };
    }
    return [NSError errorWithDomain:MTLCommandBufferErrorDomain code:code userInfo:information];
}

}  // namespace
