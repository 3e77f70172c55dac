// Preloaded into a Python process, counts what Lily's native code allocates.
#include "allocations.h"

namespace {

std::atomic<uint64_t> total{0};
std::array<std::atomic<uintptr_t>, 16> sites;  // distinct callers, the first ones

bool allowed(uintptr_t caller) {
    total.fetch_add(1, std::memory_order_relaxed);
    for (std::atomic<uintptr_t>& site : sites) {
        uintptr_t free = 0;
        if (site.compare_exchange_strong(free, caller) || free == caller) break;
    }
    return true;
}

}  // namespace

EXPORT void lily_count_start() {
    find_ranges();
}

EXPORT uint64_t lily_count() {
    return total.load();
}

// The i-th place that has allocated since the last lily_count_forget(); false if there is none.
EXPORT bool lily_count_site(uint32_t i, char* text, size_t bytes) {
    return i < sites.size() && describe(sites[i].load(), text, bytes);
}

EXPORT void lily_count_forget() {
    for (std::atomic<uintptr_t>& site : sites) site.store(0);
}
