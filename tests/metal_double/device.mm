// The device, its buffers and residency sets.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "objects.h"

using namespace metal_double;

#if __has_feature(thread_sanitizer)
extern "C" void __tsan_ignore_thread_begin();
extern "C" void __tsan_ignore_thread_end();
#endif

namespace {

constexpr NSUInteger kPage = 16384;  // of Apple silicon

#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define METAL_DOUBLE_EXACT_BUFFERS 1
#endif

NSUInteger whole_pages(NSUInteger length) {
    return (length + kPage - 1) / kPage * kPage;
}

// Zeroed memory whose end is guarded: by the sanitizer to the byte, else by a page without access. To the sanitizer of
// threads, freeing is an access too: a kernel that still reads is a race, even when it won.
std::byte* allocate(NSUInteger length) {
#ifdef METAL_DOUBLE_EXACT_BUFFERS
    void* memory = nullptr;
    if (posix_memalign(&memory, kPage, length) != 0) return nullptr;
    std::memset(memory, 0, length);
    return static_cast<std::byte*>(memory);
#else
    const NSUInteger whole = whole_pages(length);
    void* reserved = mmap(nullptr, whole + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return nullptr;
    // The system's own pages may be smaller than the ones that the start shall be aligned to.
    const uintptr_t before = (kPage - reinterpret_cast<uintptr_t>(reserved) % kPage) % kPage;
    auto* memory = static_cast<std::byte*>(reserved) + before;
    if (before > 0) munmap(reserved, before);
    if (before < kPage) munmap(memory + whole + kPage, kPage - before);
    if (mprotect(memory, whole, PROT_READ | PROT_WRITE) == 0) return memory;
    munmap(memory, whole + kPage);
    return nullptr;
#endif
}

void deallocate(std::byte* memory, [[maybe_unused]] NSUInteger length) {
#if __has_feature(thread_sanitizer)
    // The sanitizer looks away in -dealloc.
    __tsan_ignore_thread_end();
    std::free(memory);
    __tsan_ignore_thread_begin();
#elif defined(METAL_DOUBLE_EXACT_BUFFERS)
    std::free(memory);
#else
    munmap(memory, whole_pages(length) + kPage);
#endif
}

}  // namespace

namespace metal_double {

NSString* string(const std::string& text) {
    return [[NSString alloc] initWithBytes:text.data() length:text.size() encoding:NSUTF8StringEncoding];
}

void check_error_place(NSError** out, const char* call) {
    if (out == nullptr) misuse("%s has nowhere to put its error", call);
}

void set_error(NSError** out, const char* call, NSErrorDomain domain, NSInteger code, const std::string& what) {
    check_error_place(out, call);
    *out = [NSError errorWithDomain:domain code:code userInfo:@{NSLocalizedDescriptionKey : string(what)}];
}

void check_process(SoftDevice* device) {
    if (getpid() != device->process) misuse("used in a process that was forked after the device was opened");
}

void check_device(SoftDevice* have, SoftDevice* wanted, const char* call) {
    if (have != wanted) misuse("%s is given an object of another device", call);
}

}  // namespace metal_double

@implementation SoftDevice
- (NSString*)name {
    return string(gpu);
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)wanted {
}
- (BOOL)hasUnifiedMemory {
    return YES;
}
- (NSUInteger)maxBufferLength {
    return static_cast<NSUInteger>(setting(Setting::kMaxBufferLength));
}
- (uint64_t)recommendedMaxWorkingSetSize {
    return static_cast<uint64_t>(setting(Setting::kWorkingSet));
}
- (NSUInteger)maxThreadgroupMemoryLength {
    return 32768;
}
- (NSUInteger)currentAllocatedSize {
    return static_cast<NSUInteger>(allocated.load());
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
    constexpr NSInteger kApple1 = 1001, kCommon1 = 3001, kCommon3 = 3003, kMac2 = 2002, kMetal3 = 5001, kMetal4 = 5002;
    const bool newest_system = system_major() >= 26;
    const int64_t apple = std::min<int64_t>(setting(Setting::kAppleFamily), newest_system ? INT64_MAX : 9);
    const auto number = static_cast<NSInteger>(family);
    if (number == kMetal4) return newest_system && setting(Setting::kMetal4) != 0;
    if (number == kMac2 || number == kMetal3 || (number >= kCommon1 && number <= kCommon3)) return apple >= 7;
    return number >= kApple1 && number < kApple1 + apple;
}
- (id<MTLCommandQueue>)newCommandQueue {
    check_process(self);
    return fails(Failure::kQueue) ? nil : [[SoftQueue alloc] initWithDevice:self];
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
    check_process(self);
    if (options != MTLResourceStorageModeShared)
        misuse("newBufferWithLength: with options %lu", static_cast<unsigned long>(options));
    if (length == 0) misuse("newBufferWithLength: of no bytes");
    if (length > self.maxBufferLength)
        misuse("newBufferWithLength: of %lu bytes, more than maxBufferLength", static_cast<unsigned long>(length));
    return fails(Failure::kBuffer) ? nil : [[SoftBuffer alloc] initWithDevice:self length:length];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError**)error {
    check_process(self);
    return make_library(self, source, options, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:
                                                              (MTLAutoreleasedComputePipelineReflection*)reflection
                                                               error:(NSError**)error {
    check_process(self);
    if (reflection != nullptr) misuse("a pipeline's reflection is not modelled");
    return make_pipeline(self, descriptor, options, error);
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor error:(NSError**)error {
    check_process(self);
    if (descriptor == nil) misuse("newBinaryArchiveWithDescriptor: is given nil");
    return [[SoftArchive alloc] initWithDevice:self url:descriptor.url error:error];
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor error:(NSError**)error {
    check_process(self);
    check_error_place(error, "newResidencySetWithDescriptor:");
    if (setting(Setting::kOsMajor) < 15) misuse("residency sets are new in macOS 15");
    if (descriptor == nil) misuse("newResidencySetWithDescriptor: is given nil");
    if (fails(Failure::kResidencySet)) {
        set_error(error, "newResidencySetWithDescriptor:", @"MTLResidencySetErrorDomain", 1,
                  "injected residency error");
        return nil;
    }
    SoftResidencySet* const made = [SoftResidencySet new];
    made->device = self;
    return made;
}
@end

@implementation SoftUsed
- (void)checkUnused:(const char*)what {
    // Without an order of its own, which would hide a program that releases too early from the sanitizer. A forked
    // process has no GPU that could use anything.
    if (users.load(std::memory_order_relaxed) != 0 && getpid() == device->process)
        misuse("a %s is released while a command buffer uses it whose completion the program has not seen", what);
}
@end

@implementation SoftBuffer
- (instancetype)initWithDevice:(SoftDevice*)owner length:(NSUInteger)length {
    self = [super init];
    memory = allocate(length);
    if (memory == nullptr) return nil;
    device = owner;
    size = length;
    device->allocated.fetch_add(static_cast<int64_t>(whole_pages(size)));
    add(Counter::kBufferBytes, static_cast<int64_t>(size));
    return self;
}
- (void)dealloc {
    if (memory == nullptr) return;
    [self checkUnused:"buffer"];
    deallocate(memory, size);
    device->allocated.fetch_sub(static_cast<int64_t>(whole_pages(size)));
    add(Counter::kBufferBytes, -static_cast<int64_t>(size));
}
- (id<MTLDevice>)device {
    return device;
}
- (void*)contents {
    return memory;
}
- (NSUInteger)length {
    return size;
}
- (NSUInteger)allocatedSize {
    return whole_pages(size);
}
- (NSString*)label {
    return name;
}
- (void)setLabel:(NSString*)label {
    name = [label copy];
}
@end

// Changes take effect when they are committed. The set keeps what it holds alive.
@implementation SoftResidencySet
- (id<MTLDevice>)device {
    return device;
}
- (void)addAllocation:(id<MTLAllocation>)allocation {
    wanted.push_back(checked<SoftBuffer>(allocation, "addAllocation:", device));
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
    const auto place = std::find(wanted.begin(), wanted.end(), allocation);
    if (place == wanted.end()) misuse("removeAllocation: of something that was not added");
    wanted.erase(place);
}
- (void)commit {
    const auto before = static_cast<int64_t>(committed.size());
    committed = wanted;
    if (requested) add(Counter::kResidentBuffers, static_cast<int64_t>(committed.size()) - before);
}
- (void)requestResidency {
    if (!requested) add(Counter::kResidentBuffers, static_cast<int64_t>(committed.size()));
    requested = true;
}
- (void)endResidency {
    if (requested) add(Counter::kResidentBuffers, -static_cast<int64_t>(committed.size()));
    requested = false;
}
- (NSUInteger)allocationCount {
    return committed.size();
}
- (uint64_t)allocatedSize {
    uint64_t sum = 0;
    for (id<MTLAllocation> allocation : committed) sum += allocation.allocatedSize;
    return sum;
}
- (void)dealloc {
    [self endResidency];
}
@end

@interface MTLResidencySetDescriptor ()
@property(nonatomic, copy) NSString* label;
@property(nonatomic) NSUInteger initialCapacity;
@end
@implementation MTLResidencySetDescriptor
@end

// One object per GPU for as long as anyone holds it, as with Metal.
id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
    struct Slot {
        __weak SoftDevice* device;
    };
    static std::mutex mutex;
    static std::array<Slot, 4>& slots = *new std::array<Slot, 4>;
    if (fails(Failure::kDevice)) return nil;
    const std::lock_guard lock(mutex);
    Slot& slot = slots.at(static_cast<size_t>(setting(Setting::kDevice)));
    SoftDevice* device = slot.device;
    if (device != nil && device->process == getpid()) return device;
    device = [SoftDevice new];
    device->process = getpid();
    device->gpu = text(Text::kGpuName);
    device->os_build = text(Text::kOsBuild);
    slot.device = device;
    return device;
}
