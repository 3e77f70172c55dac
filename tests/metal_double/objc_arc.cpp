// Reference counting, weak references and autorelease pools: the entry points that clang calls for Objective-C with
// automatic reference counting.
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "objc_abi.h"
#include "objc_runtime.h"

namespace lily_objc {
namespace {

std::atomic<int64_t> without_pool{0};
std::atomic<int64_t> skipped{0};

// Where weak references to an object are; both ways of ending one, and of reading one, hold the mutex.
struct WeakTable {
    std::mutex mutex;
    std::unordered_map<id, std::vector<id*>> places;
};

WeakTable& weak_table() {
    static auto* instance = new WeakTable;
    return *instance;
}

void forget_place(WeakTable& table, id* place) {
    if (*place == nullptr) return;
    const auto entry = table.places.find(*place);
    if (entry == table.places.end()) return;
    std::erase(entry->second, place);
    if (entry->second.empty()) table.places.erase(entry);
}

void add_place(WeakTable& table, id* place, id object) {
    *place = object;
    if (object == nullptr || is_static(object)) return;
    header_of(object).weakly_referenced.store(1, std::memory_order_relaxed);
    table.places[object].push_back(place);
}

// nullptr for an object whose last reference is gone already.
id retain_unless_dying(id object) {
    if (object == nullptr || is_static(object)) return object;
    std::atomic<int64_t>& references = header_of(object).references;
    int64_t count = references.load(std::memory_order_relaxed);
    do {
        if (count == 0) return nullptr;
    } while (!references.compare_exchange_weak(count, count + 1, std::memory_order_relaxed));
    return object;
}

void clear_weak(id object) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    const auto entry = table.places.find(object);
    if (entry == table.places.end()) return;
    for (id* place : entry->second) *place = nullptr;
    table.places.erase(entry);
}

// A thread's autoreleased objects; nullptr marks where a pool begins.
struct Pools {
    std::vector<id> entries;
    int64_t open = 0;

    void drain(size_t keep) {
        while (entries.size() > keep) {
            const id object = entries.back();
            entries.pop_back();
            if (object != nullptr) {
                objc_release(object);
            } else {
                --open;
            }
        }
    }
    ~Pools();
};

thread_local bool pools_ended = false;
thread_local Pools pools;

Pools::~Pools() {
    skipped.fetch_add(open, std::memory_order_relaxed);
    drain(0);
    pools_ended = true;
}

void set_property(id self, ptrdiff_t offset, id value, bool copies) {
    static const SEL copy = intern("copy");
    if (copies && value != nullptr) {
        value = reinterpret_cast<id (*)(id, SEL)>(objc_msgSend)(value, copy);
    } else {
        objc_retain(value);
    }
    id* place = reinterpret_cast<id*>(reinterpret_cast<char*>(self) + offset);
    objc_release(std::exchange(*place, value));
}

// Locks of @synchronized by object; those that nobody holds are dropped.
struct SyncTable {
    struct Lock {
        std::recursive_mutex mutex;
        int users = 0;
    };
    std::mutex mutex;
    std::map<id, Lock> locks;
};

SyncTable& sync_table() {
    static auto* instance = new SyncTable;
    return *instance;
}

}  // namespace

int64_t autoreleased_without_pool() {
    return without_pool.load();
}

int64_t skipped_pools() {
    return skipped.load();
}

int64_t open_pools() {
    return pools.open;
}

}  // namespace lily_objc

using namespace lily_objc;

extern "C" {

id objc_retain(id object) {
    if (object == nullptr) return object;
    if (is_block(object)) return static_cast<id>(_Block_copy(object));
    if (is_static(object)) return object;
    const int64_t before = header_of(object).references.fetch_add(1, std::memory_order_relaxed);
    if (before < 1) fail("%s is retained while it is being deallocated", object->isa->data->name);
    return object;
}

void _Block_release(const void* block);

void objc_release(id object) {
    static const SEL dealloc = intern("dealloc");
    if (object == nullptr) return;
    if (is_block(object)) return _Block_release(object);
    if (is_static(object)) return;
    Header& header = header_of(object);
    const int64_t before = header.references.fetch_sub(1, std::memory_order_acq_rel);
    if (before < 1) fail("over-release of %s", object->isa->data->name);
    if (before > 1) {
        if (before >= kImmortal / 2) header.references.store(kImmortal, std::memory_order_relaxed);
        return;
    }
    if (header.weakly_referenced.load(std::memory_order_relaxed) != 0) clear_weak(object);
    reinterpret_cast<void (*)(id, SEL)>(objc_msgSend)(object, dealloc);
}

id objc_autorelease(id object) {
    if (object == nullptr || (!is_block(object) && is_static(object))) return object;
    if (pools_ended) fail("%s is autoreleased after the thread's last pool", object->isa->data->name);
    if (pools.open == 0) without_pool.fetch_add(1, std::memory_order_relaxed);
    pools.entries.push_back(object);
    return object;
}

void* objc_autoreleasePoolPush() {
    pools.entries.push_back(nullptr);
    ++pools.open;
    return reinterpret_cast<void*>(pools.entries.size());
}

// Pools inside the given one that an exception has skipped are drained with it.
void objc_autoreleasePoolPop(void* pool) {
    const size_t first = reinterpret_cast<size_t>(pool) - 1;
    if (first >= pools.entries.size() || pools.entries[first] != nullptr) fail("a pool is drained twice");
    const int64_t before = pools.open;
    pools.drain(first);
    if (before - pools.open > 1) skipped.fetch_add(before - pools.open - 1, std::memory_order_relaxed);
}

// A returned object goes through the pool even where Apple's runtime hands it over directly; it only dies later.
id objc_retainAutorelease(id object) {
    return objc_autorelease(objc_retain(object));
}
id objc_autoreleaseReturnValue(id object) {
    return objc_autorelease(object);
}
id objc_retainAutoreleaseReturnValue(id object) {
    return objc_autorelease(objc_retain(object));
}
id objc_retainAutoreleasedReturnValue(id object) {
    return objc_retain(object);
}
id objc_claimAutoreleasedReturnValue(id object) {
    return objc_retain(object);
}
id objc_unsafeClaimAutoreleasedReturnValue(id object) {
    return object;
}

id objc_retainBlock(id block) {
    return static_cast<id>(_Block_copy(block));
}

void objc_storeStrong(id* place, id value) {
    objc_retain(value);
    objc_release(std::exchange(*place, value));
}

id objc_initWeak(id* place, id object) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    add_place(table, place, object);
    return object;
}

void objc_destroyWeak(id* place) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    forget_place(table, place);
    *place = nullptr;
}

id objc_storeWeak(id* place, id object) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    forget_place(table, place);
    add_place(table, place, object);
    return object;
}

id objc_loadWeakRetained(id* place) {
    const std::lock_guard lock(weak_table().mutex);
    return retain_unless_dying(*place);
}

id objc_loadWeak(id* place) {
    return objc_autorelease(objc_loadWeakRetained(place));
}

void objc_copyWeak(id* to, id* from) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    add_place(table, to, *from);
}

void objc_moveWeak(id* to, id* from) {
    WeakTable& table = weak_table();
    const std::lock_guard lock(table.mutex);
    add_place(table, to, *from);
    forget_place(table, from);
    *from = nullptr;
}

void objc_setProperty_nonatomic(id self, SEL, id value, ptrdiff_t offset) {
    set_property(self, offset, value, false);
}
void objc_setProperty_nonatomic_copy(id self, SEL, id value, ptrdiff_t offset) {
    set_property(self, offset, value, true);
}

int objc_sync_enter(id object) {
    SyncTable& table = sync_table();
    SyncTable::Lock* lock = nullptr;
    {
        const std::lock_guard guard(table.mutex);
        lock = &table.locks[object];
        ++lock->users;
    }
    lock->mutex.lock();
    return 0;
}

int objc_sync_exit(id object) {
    SyncTable& table = sync_table();
    const std::lock_guard guard(table.mutex);
    const auto entry = table.locks.find(object);
    if (entry == table.locks.end()) fail("@synchronized is left without having been entered");
    entry->second.mutex.unlock();
    if (--entry->second.users == 0) table.locks.erase(entry);
    return 0;
}

}  // extern "C"
