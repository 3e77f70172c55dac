// Preloaded into a Python process, makes allocations of Lily's native code fail: memory, that of the CPU device among
// it, and threads.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allocations.h"

namespace {

std::atomic<uint64_t> made{0};          // since the last lily_fail_at()
std::atomic<uint64_t> first_failed{0};  // 0: none
std::atomic<bool> all_fail{false};      // those behind it, too
std::atomic<uint64_t> failures{0};
std::atomic<uintptr_t> site{0};  // of the first one

bool allowed(uintptr_t caller) {
    const uint64_t number = made.fetch_add(1) + 1, first = first_failed.load();
    if (first == 0 || (all_fail.load() ? number < first : number != first)) return true;
    if (failures.fetch_add(1) == 0) site.store(caller);
    return false;
}

}  // namespace

EXPORT void lily_fail_start() {
    find_ranges();
}

// Counting from now, the n-th allocation fails, and with `all` those behind it; 0 lets all succeed.
EXPORT void lily_fail_at(uint64_t n, bool all) {
    first_failed.store(0);
    all_fail.store(all);
    failures.store(0);
    made.store(0);
    first_failed.store(n);
}

// How many have failed since the last lily_fail_at().
EXPORT uint64_t lily_fail_count() {
    return failures.load();
}

// Where the first of them was.
EXPORT bool lily_fail_site(char* text, size_t bytes) {
    return describe(site.load(), text, bytes);
}

EXPORT void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
    if (!passes(CALLER)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}

EXPORT void* mmap64(void* address, size_t bytes, int protection, int flags, int file, off64_t offset)
    __attribute__((alias("mmap")));

EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*), void* argument) {
    using Create = decltype(&pthread_create);
    static const auto next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    return passes(CALLER) ? next(thread, attributes, work, argument) : EAGAIN;
}
