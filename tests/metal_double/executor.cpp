#include "executor.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "control.h"

namespace metal_double {
namespace {

using lily::KernelInfo;

constexpr uint64_t kInlineBytes = 32u << 10;  // a dispatch that touches less is done before a thread has woken up

// The bytes of a slot that a dispatch may touch.
struct Range {
    const std::byte *first, *last;
    bool written;
    const Dispatch* dispatch;
    const char* slot;
};

const void* args_of(const Dispatch& dispatch) {
    return dispatch.bindings[dispatch.form.function.kernel->slot_count].address;
}

std::array<uint64_t, lily::kMaxSlots> bytes_of_slots(const Dispatch& dispatch) {
    const auto& [kernel, consts] = dispatch.form.function;
    std::array<uint64_t, lily::kMaxSlots> counts{};
    kernel->counts(args_of(dispatch), consts.data(), counts.data());
    for (uint32_t i = 0; i < kernel->slot_count; ++i) {
        if (counts[i] == lily::Count::kImpossible)
            misuse("%s: the shape of %s has no value for these args", kernel->name, kernel->slots[i].name);
        counts[i] *= kernel->slots[i].element_bytes;
    }
    return counts;
}

void check_slots(const Dispatch& dispatch, const std::array<uint64_t, lily::kMaxSlots>& bytes) {
    const KernelInfo& kernel = *dispatch.form.function.kernel;
    for (uint32_t i = 0; i < kernel.slot_count; ++i) {
        const lily::SlotInfo& slot = kernel.slots[i];
        const Binding& binding = dispatch.bindings[i];
        if (binding.room < bytes[i])
            misuse("%s: the buffer of %s ends after %llu bytes, the kernel uses %llu", kernel.name, slot.name,
                   static_cast<unsigned long long>(binding.room), static_cast<unsigned long long>(bytes[i]));
        if (reinterpret_cast<uintptr_t>(binding.address) % slot.alignment != 0)
            misuse("%s: the offset of %s is not a multiple of %u", kernel.name, slot.name, slot.alignment);
    }
}

void check_mirrored_consts(const Dispatch& dispatch) {
    const auto& [kernel, consts] = dispatch.form.function;
    const auto* args = static_cast<const uint32_t*>(args_of(dispatch));
    for (uint32_t i = 0; i < kernel->const_count; ++i) {
        const int32_t mirrored = kernel->consts[i].mirrors;
        if (mirrored >= 0 && consts[i] != lily::kGenericForm && consts[i] != args[mirrored])
            misuse("%s: compiled for %s = %u, but the args say %u", kernel->name, kernel->consts[i].name, consts[i],
                   args[mirrored]);
    }
}

void check_grid(const Dispatch& dispatch) {
    const std::array<uint32_t, 3> wanted = needed_grid(dispatch.form.function, args_of(dispatch));
    const std::array<uint32_t, 3>& grid = dispatch.grid;
    if (grid != wanted)
        misuse("%s: dispatched with a grid of (%u, %u, %u), its args need (%u, %u, %u)",
               dispatch.form.function.kernel->name, grid[0], grid[1], grid[2], wanted[0], wanted[1], wanted[2]);
}

// Dispatches that run at once must not touch what another one writes.
void check_hazards(const Batch& batch) {
    std::vector<Range> ranges;
    for (const Dispatch& dispatch : batch) {
        const KernelInfo& kernel = *dispatch.form.function.kernel;
        const auto bytes = bytes_of_slots(dispatch);
        for (uint32_t i = 0; i < kernel.slot_count; ++i) {
            const std::byte* first = dispatch.bindings[i].address;
            if (bytes[i] > 0)
                ranges.push_back({first, first + bytes[i], kernel.slots[i].written, &dispatch, kernel.slots[i].name});
        }
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
    for (size_t i = 0; i < ranges.size(); ++i) {
        for (size_t j = i + 1; j < ranges.size() && ranges[j].first < ranges[i].last; ++j) {
            const Range &a = ranges[i], &b = ranges[j];
            if (a.dispatch == b.dispatch || (!a.written && !b.written)) continue;
            misuse("no barrier between %s and %s: %s of one and %s of the other overlap",
                   a.dispatch->form.function.kernel->name, b.dispatch->form.function.kernel->name, a.slot, b.slot);
        }
    }
}

// A dispatch that threads share.
struct Job {
    const lily::CpuKernel* kernel;
    lily::CpuRun run;
    uint32_t groups, groups_per_chunk;
    std::atomic<const char*> error{nullptr};
};

void run_chunk(void* context, uint32_t chunk) {
    Job& job = *static_cast<Job*>(context);
    const uint32_t first = chunk * job.groups_per_chunk;
    const uint32_t last = first + std::min(job.groups - first, job.groups_per_chunk);
    if (const char* error = job.kernel->run(job.run, first, last)) job.error.store(error, std::memory_order_relaxed);
}

}  // namespace

Executor::Executor()
    : pool_(static_cast<uint32_t>(std::max<int64_t>(1, setting(Setting::kThreads)))),
      random_(static_cast<uint32_t>(setting(Setting::kSeed))) {}

std::string Executor::run(const Dispatch& dispatch) {
    const KernelInfo& kernel = *dispatch.form.function.kernel;
    const auto bytes = bytes_of_slots(dispatch);
    check_slots(dispatch, bytes);
    check_mirrored_consts(dispatch);
    check_grid(dispatch);
    std::array<void*, lily::kMaxSlots> slots{};
    for (uint32_t i = 0; i < kernel.slot_count; ++i) slots[i] = dispatch.bindings[i].address;
    Job job{dispatch.form.run, {slots.data(), args_of(dispatch), {}}, 0, 0, {}};
    std::copy(dispatch.grid.begin(), dispatch.grid.end(), job.run.grid);
    // Other forms than a GPU's may do more or less per threadgroup.
    if (!dispatch.form.exact) job.kernel->grid(job.run.args, job.run.grid);
    job.groups = job.run.grid[0] * job.run.grid[1] * job.run.grid[2];
    const uint64_t touched = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
    const uint32_t parts = touched <= kInlineBytes ? 1 : pool_.size() * 4;
    job.groups_per_chunk = std::max(1u, (job.groups + parts - 1) / parts);
    pool_.run((job.groups + job.groups_per_chunk - 1) / job.groups_per_chunk, &run_chunk, &job);
    const char* error = job.error.load(std::memory_order_relaxed);
    return error == nullptr ? "" : std::string(kernel.name) + ": " + error;
}

std::string Executor::run(const std::vector<Batch>& batches, size_t limit) {
    for (const Batch& batch : batches) {
        std::vector<const Dispatch*> order;
        for (const Dispatch& dispatch : batch)
            if (order.size() < limit) order.push_back(&dispatch);
        limit -= order.size();
        if (setting(Setting::kHazards) != 0) check_hazards(batch);
        if (setting(Setting::kOrder) == 1) std::reverse(order.begin(), order.end());
        if (setting(Setting::kOrder) == 2) std::shuffle(order.begin(), order.end(), random_);
        for (const Dispatch* dispatch : order)
            if (std::string error = run(*dispatch); !error.empty()) return error;
    }
    return "";
}

}  // namespace metal_double
