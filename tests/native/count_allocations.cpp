// Preloaded into a Python process, counts what Lily's native code allocates: calls of malloc, its kin and operator new
// that come from Lily's libraries, or from the C++ library on their behalf. Python's own allocations do not count.
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

struct Range {
    uintptr_t first, last;
};

std::array<Range, 32> ranges;  // code of the libraries that count
std::atomic<uint32_t> range_count{0};
std::atomic<uint64_t> total{0};
std::array<std::atomic<uintptr_t>, 16> sites;  // distinct callers, the first ones

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

void note(uintptr_t caller) {
    for (uint32_t i = range_count.load(std::memory_order_acquire); i-- > 0;) {
        if (caller < ranges[i].first || caller >= ranges[i].last) continue;
        total.fetch_add(1, std::memory_order_relaxed);
        for (std::atomic<uintptr_t>& site : sites) {
            uintptr_t free = 0;
            if (site.compare_exchange_strong(free, caller) || free == caller) return;
        }
    }
}

void* checked(void* made) {
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

}  // namespace

// From now on the libraries that are loaded count.
EXPORT void lily_count_start() {
    range_count.store(0);
    dl_iterate_phdr(&add_ranges, nullptr);
}

EXPORT uint64_t lily_count() {
    return total.load();
}

// The i-th place that has allocated since the last lily_count_forget(); false if there is none. For addr2line.
EXPORT bool lily_count_site(uint32_t i, char* text, size_t bytes) {
    const uintptr_t caller = i < sites.size() ? sites[i].load() : 0;
    Dl_info info{};
    if (caller == 0 || dladdr(reinterpret_cast<void*>(caller), &info) == 0) return false;
    std::snprintf(text, bytes, "%s+0x%zx", info.dli_fname, caller - reinterpret_cast<uintptr_t>(info.dli_fbase));
    return true;
}

EXPORT void lily_count_forget() {
    for (std::atomic<uintptr_t>& site : sites) site.store(0);
}

EXPORT void* malloc(size_t bytes) {
    note(CALLER);
    return __libc_malloc(bytes);
}

EXPORT void* calloc(size_t count, size_t bytes) {
    note(CALLER);
    return __libc_calloc(count, bytes);
}

EXPORT void* realloc(void* old, size_t bytes) {
    note(CALLER);
    return __libc_realloc(old, bytes);
}

EXPORT void* memalign(size_t alignment, size_t bytes) {
    note(CALLER);
    return __libc_memalign(alignment, bytes);
}

EXPORT void* aligned_alloc(size_t alignment, size_t bytes) {
    note(CALLER);
    return __libc_memalign(alignment, bytes);
}

EXPORT int posix_memalign(void** made, size_t alignment, size_t bytes) {
    note(CALLER);
    void* const found = __libc_memalign(alignment, bytes);
    if (found == nullptr) return ENOMEM;
    *made = found;
    return 0;
}

// Each form has its caller's address only in itself.
#define VISIBLE __attribute__((visibility("default")))
VISIBLE void* operator new(size_t bytes) {
    note(CALLER);
    return checked(__libc_malloc(bytes));
}

VISIBLE void* operator new[](size_t bytes) {
    note(CALLER);
    return checked(__libc_malloc(bytes));
}

VISIBLE void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    note(CALLER);
    return __libc_malloc(bytes);
}

VISIBLE void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
    note(CALLER);
    return __libc_malloc(bytes);
}

VISIBLE void* operator new(size_t bytes, std::align_val_t alignment) {
    note(CALLER);
    return checked(__libc_memalign(static_cast<size_t>(alignment), bytes));
}

VISIBLE void* operator new[](size_t bytes, std::align_val_t alignment) {
    note(CALLER);
    return checked(__libc_memalign(static_cast<size_t>(alignment), bytes));
}
