#include "plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace lily {

namespace {

constexpr uint32_t kNever = 0;  // stages count from 1 here, so that 0 means "not yet"

// Who touched which bytes of one buffer last. Segments are disjoint, keyed by their first byte. A segment
// needs only the last writer and the latest reader since: earlier accesses are in earlier stages.
class ByteHistory {
public:
    // The latest stage whose access to [first, last) conflicts with the coming one.
    uint32_t latest_conflict(uint64_t first, uint64_t last, bool write) const {
        uint32_t latest = kNever;
        auto it = segments_.upper_bound(first);
        if (it != segments_.begin() && std::prev(it)->second.last > first) --it;
        for (; it != segments_.end() && it->first < last; ++it) {
            latest = std::max(latest, it->second.written);
            if (write) latest = std::max(latest, it->second.read);
        }
        return latest;
    }

    void record(uint64_t first, uint64_t last, bool write, uint32_t stage) {
        split(first);
        split(last);
        auto it = segments_.lower_bound(first);
        if (write) {
            // A slot of the same launch may have read these bytes: its stage is the same, nothing is lost.
            while (it != segments_.end() && it->first < last) it = segments_.erase(it);
            segments_.emplace_hint(it, first, Segment{last, stage, kNever});
            return;
        }
        uint64_t at = first;
        while (at < last) {
            const bool gap = it == segments_.end() || it->first > at;
            if (gap) {
                const uint64_t end = it == segments_.end() ? last : std::min(last, it->first);
                it = segments_.emplace_hint(it, at, Segment{end, kNever, kNever});
            }
            it->second.read = std::max(it->second.read, stage);
            at = it->second.last;
            ++it;
        }
    }

private:
    struct Segment {
        uint64_t last;  // one past
        uint32_t written, read;
    };

    void split(uint64_t at) {
        auto it = segments_.lower_bound(at);
        if (it == segments_.begin()) return;
        Segment& before = std::prev(it)->second;
        if (before.last <= at) return;
        const Segment rest = before;
        before.last = at;
        segments_.emplace_hint(it, at, rest);
    }

    std::map<uint64_t, Segment> segments_;
};

// Puts every launch into the earliest stage its conflicts allow; returns how many stages there are.
uint32_t level(std::vector<Launch>& launches) {
    std::unordered_map<uint32_t, ByteHistory> buffers;
    uint32_t last_stage = kNever;
    for (Launch& launch : launches) {
        const KernelInfo& kernel = *launch.kernel;
        uint32_t stage = kNever;
        for (uint32_t i = 0; i < kernel.slot_count; ++i) {
            const SlotRef& slot = launch.slots[i];
            if (slot.bytes == 0) continue;
            stage = std::max(stage, buffers[slot.buffer.index].latest_conflict(slot.offset, slot.offset + slot.bytes,
                                                                               kernel.slots[i].written));
        }
        ++stage;
        for (const bool write : {false, true}) {
            for (uint32_t i = 0; i < kernel.slot_count; ++i) {
                const SlotRef& slot = launch.slots[i];
                if (slot.bytes == 0 || kernel.slots[i].written != write) continue;
                buffers[slot.buffer.index].record(slot.offset, slot.offset + slot.bytes, write, stage);
            }
        }
        launch.stage = stage - 1;
        last_stage = std::max(last_stage, stage);
    }
    return last_stage;
}

}  // namespace

void Recorder::add(Launch launch) {
    check_launch(launch);
    launch.label = label_;
    launch.layer = layer_;
    launch.recorded = static_cast<uint32_t>(launches_.size());
    launches_.push_back(launch);
}

void Recorder::scope(const char* label, int layer) {
    label_ = label;
    layer_ = layer;
}

Plan Recorder::finish(std::string name) {
    Plan plan{std::move(name), std::exchange(launches_, {}), 0};
    scope("");
    plan.stage_count = level(plan.launches);
    std::stable_sort(plan.launches.begin(), plan.launches.end(),
                     [](const Launch& a, const Launch& b) { return a.stage < b.stage; });
    return plan;
}

std::vector<Variant> variants_of(std::span<const Plan> plans) {
    std::set<std::pair<uint32_t, Consts>> seen;
    std::vector<Variant> variants;
    for (const Plan& plan : plans)
        for (const Launch& launch : plan.launches)
            if (seen.emplace(launch.kernel->index, launch.consts).second)
                variants.push_back({launch.kernel, launch.consts});
    return variants;
}

}  // namespace lily
