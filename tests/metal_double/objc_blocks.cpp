// Blocks: copying to the heap, reference counts, and variables that blocks share. The layout is the one that clang
// emits (Block-ABI-Apple). Of our own rather than a library, so that the sanitizers see the counts.
#include <cstdlib>
#include <cstring>

#include "objc_abi.h"
#include "objc_runtime.h"

namespace {

enum Flags : int32_t {
    kReferences = 0x00ffffff,
    kOnHeap = 1 << 24,
    kHasHelpers = 1 << 25,  // copy and destroy what was captured
    kIsGlobal = 1 << 28,
};

// What a captured variable is: the last argument of the functions that the helpers call.
enum Field : int {
    kObject = 3,
    kBlock = 7,
    kShared = 8,            // declared __block
    kCalledByShared = 128,  // a shared variable's own helper: it holds what it holds without counting
};

struct Descriptor {
    unsigned long reserved, size;
    void (*copy)(void* to, const void* from);
    void (*destroy)(const void* block);
};

struct Block {
    void* isa;
    std::atomic<int32_t> flags;
    int32_t reserved;
    void (*code)();
    Descriptor* descriptor;
};

struct Shared {
    void* isa;
    Shared* home;  // where the variable lives now
    std::atomic<int32_t> flags;
    uint32_t size;
    void (*copy)(Shared* to, Shared* from);
    void (*destroy)(Shared* variable);
};

std::atomic<int64_t> blocks_on_heap{0};

// True for the last reference.
bool drop_reference(std::atomic<int32_t>& flags, const char* what) {
    const int32_t before = flags.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kReferences) == 0) lily_objc::fail("over-release of a %s", what);
    return (before & kReferences) == 1;
}

template <class T>
T* copy_bytes(const T* from, size_t size) {
    auto* to = static_cast<T*>(std::malloc(size));
    if (to == nullptr) lily_objc::fail("no memory for a block");
    std::memcpy(static_cast<void*>(to), static_cast<const void*>(from), size);
    return to;
}

Shared* retain_shared(Shared* variable) {
    Shared* home = variable->home;
    if ((home->flags.load(std::memory_order_relaxed) & kOnHeap) != 0) {
        home->flags.fetch_add(1, std::memory_order_relaxed);
        return home;
    }
    Shared* copy = copy_bytes(home, home->size);
    // One reference is the block's, one the stack frame's.
    copy->flags.store(home->flags.load(std::memory_order_relaxed) | kOnHeap | 2, std::memory_order_relaxed);
    copy->home = copy;
    home->home = copy;
    if ((home->flags.load(std::memory_order_relaxed) & kHasHelpers) != 0) home->copy(copy, home);
    return copy;
}

void release_shared(Shared* variable) {
    Shared* home = variable->home;
    const int32_t flags = home->flags.load(std::memory_order_relaxed);
    if ((flags & kOnHeap) == 0 || !drop_reference(home->flags, "shared variable")) return;
    if ((flags & kHasHelpers) != 0) home->destroy(home);
    std::free(home);
}

}  // namespace

namespace lily_objc {

int64_t live_blocks() {
    return blocks_on_heap.load();
}

}  // namespace lily_objc

extern "C" {

void* _NSConcreteGlobalBlock[32];
void* _NSConcreteStackBlock[32];
void* _NSConcreteMallocBlock[32];

void* _Block_copy(const void* block) {
    if (block == nullptr) return nullptr;
    auto* from = static_cast<Block*>(const_cast<void*>(block));
    const int32_t flags = from->flags.load(std::memory_order_relaxed);
    if ((flags & kIsGlobal) != 0) return from;
    if ((flags & kOnHeap) != 0) {
        from->flags.fetch_add(1, std::memory_order_relaxed);
        return from;
    }
    Block* copy = copy_bytes(from, from->descriptor->size);
    copy->isa = _NSConcreteMallocBlock;
    copy->flags.store((flags & ~kReferences) | kOnHeap | 1, std::memory_order_relaxed);
    if ((flags & kHasHelpers) != 0) from->descriptor->copy(copy, from);
    blocks_on_heap.fetch_add(1, std::memory_order_relaxed);
    return copy;
}

void _Block_release(const void* block) {
    if (block == nullptr) return;
    auto* dying = static_cast<Block*>(const_cast<void*>(block));
    const int32_t flags = dying->flags.load(std::memory_order_relaxed);
    if ((flags & kOnHeap) == 0 || !drop_reference(dying->flags, "block")) return;
    if ((flags & kHasHelpers) != 0) dying->descriptor->destroy(dying);
    blocks_on_heap.fetch_sub(1, std::memory_order_relaxed);
    std::free(dying);
}

void _Block_object_assign(void* place, const void* value, int field) {
    auto* to = static_cast<const void**>(place);
    auto* object = static_cast<id>(const_cast<void*>(value));
    if ((field & kCalledByShared) != 0) {
        *to = value;
    } else if ((field & kShared) != 0) {
        *to = retain_shared(static_cast<Shared*>(const_cast<void*>(value)));
    } else {
        *to = field == kBlock ? _Block_copy(value) : objc_retain(object);
    }
}

void _Block_object_dispose(const void* value, int field) {
    if ((field & kCalledByShared) != 0) return;
    if ((field & kShared) != 0) return release_shared(static_cast<Shared*>(const_cast<void*>(value)));
    if (field == kBlock) return _Block_release(value);
    objc_release(static_cast<id>(const_cast<void*>(value)));
}

}  // extern "C"
