// What libraries share that are preloaded into a Python process to see what Lily's native code allocates: calls of
// malloc, its kin and operator new that come from Lily's libraries, or from the C++ library on their behalf. Python's
// own allocations do not count. The one file that includes this defines allowed().
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

// The GNU C library's own names: looking the next malloc up would allocate.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

#define EXPORT extern "C" __attribute__((visibility("default")))
#define CALLER reinterpret_cast<uintptr_t>(__builtin_return_address(0))

namespace {

// Called for every allocation of Lily's, with the address that it came from; false lets it fail.
bool allowed(uintptr_t caller);

struct Range {
    uintptr_t first, last;
};

std::array<Range, 32> ranges;  // code of the libraries that count
std::atomic<uint32_t> range_count{0};

bool counts(const char* path) {
    const char* slash = std::strrchr(path, '/');
    const char* name = slash != nullptr ? slash + 1 : path;
    for (const char* start : {"_native.", "liblily_cpu", "libstdc++", "libc++"})
        if (std::strncmp(name, start, std::strlen(start)) == 0) return true;
    return false;
}

int add_ranges(dl_phdr_info* info, size_t, void*) {
    if (!counts(info->dlpi_name)) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr) & segment = info->dlpi_phdr[i];
        const uint32_t place = range_count.load();
        if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0 || place == ranges.size()) continue;
        const uintptr_t first = info->dlpi_addr + segment.p_vaddr;
        ranges[place] = {first, first + segment.p_memsz};
        range_count.store(place + 1, std::memory_order_release);
    }
    return 0;
}

// From now on the libraries that are loaded count.
void find_ranges() {
    range_count.store(0);
    dl_iterate_phdr(&add_ranges, nullptr);
}

// Where a place lies, for addr2line; false if it is in no library.
bool describe(uintptr_t caller, char* text, size_t bytes) {
    Dl_info info{};
    if (caller == 0 || dladdr(reinterpret_cast<void*>(caller), &info) == 0) return false;
    std::snprintf(text, bytes, "%s+0x%zx", info.dli_fname, caller - reinterpret_cast<uintptr_t>(info.dli_fbase));
    return true;
}

bool passes(uintptr_t caller) {
    for (uint32_t i = range_count.load(std::memory_order_acquire); i-- > 0;)
        if (caller >= ranges[i].first && caller < ranges[i].last) return allowed(caller);
    return true;
}

void* checked(void* made) {
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

}  // namespace

EXPORT void* malloc(size_t bytes) {
    return passes(CALLER) ? __libc_malloc(bytes) : nullptr;
}

EXPORT void* calloc(size_t count, size_t bytes) {
    return passes(CALLER) ? __libc_calloc(count, bytes) : nullptr;
}

EXPORT void* realloc(void* old, size_t bytes) {
    return passes(CALLER) ? __libc_realloc(old, bytes) : nullptr;
}

EXPORT void* memalign(size_t alignment, size_t bytes) {
    return passes(CALLER) ? __libc_memalign(alignment, bytes) : nullptr;
}

EXPORT void* aligned_alloc(size_t alignment, size_t bytes) {
    return passes(CALLER) ? __libc_memalign(alignment, bytes) : nullptr;
}

EXPORT int posix_memalign(void** made, size_t alignment, size_t bytes) {
    void* const found = passes(CALLER) ? __libc_memalign(alignment, bytes) : nullptr;
    if (found == nullptr) return ENOMEM;
    *made = found;
    return 0;
}

// Each form has its caller's address only in itself.
#define VISIBLE __attribute__((visibility("default")))
VISIBLE void* operator new(size_t bytes) {
    return checked(passes(CALLER) ? __libc_malloc(bytes) : nullptr);
}

VISIBLE void* operator new[](size_t bytes) {
    return checked(passes(CALLER) ? __libc_malloc(bytes) : nullptr);
}

VISIBLE void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    return passes(CALLER) ? __libc_malloc(bytes) : nullptr;
}

VISIBLE void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
    return passes(CALLER) ? __libc_malloc(bytes) : nullptr;
}

VISIBLE void* operator new(size_t bytes, std::align_val_t alignment) {
    return checked(passes(CALLER) ? __libc_memalign(static_cast<size_t>(alignment), bytes) : nullptr);
}

VISIBLE void* operator new[](size_t bytes, std::align_val_t alignment) {
    return checked(passes(CALLER) ? __libc_memalign(static_cast<size_t>(alignment), bytes) : nullptr);
}
