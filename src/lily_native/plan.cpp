#include "plan.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace lily {

namespace {

using Places = std::vector<uint32_t>;  // of launches, in the order they were recorded in

// Who touched which bytes of one buffer last. Segments are disjoint, keyed by their first byte. A segment needs only
// the last writer and the readers since: what was before, these have waited for.
class ByteHistory {
public:
    // Adds the launches whose access to [first, last) conflicts with the coming one.
    void conflicts(uint64_t first, uint64_t last, bool write, Places& found) const {
        auto it = segments_.upper_bound(first);
        if (it != segments_.begin() && std::prev(it)->second.last > first) --it;
        for (; it != segments_.end() && it->first < last; ++it) {
            const Segment& segment = it->second;
            if (segment.writer) found.push_back(*segment.writer);
            if (write) found.insert(found.end(), segment.readers.begin(), segment.readers.end());
        }
    }

    void record(uint64_t first, uint64_t last, bool write, uint32_t launch) {
        split(first);
        split(last);
        auto it = segments_.lower_bound(first);
        if (write) {
            // A slot of the same launch may have read these bytes: it needs no wait for itself.
            while (it != segments_.end() && it->first < last) it = segments_.erase(it);
            segments_.emplace_hint(it, first, Segment{last, launch, {}});
            return;
        }
        uint64_t at = first;
        while (at < last) {
            const bool gap = it == segments_.end() || it->first > at;
            if (gap) {
                const uint64_t end = it == segments_.end() ? last : std::min(last, it->first);
                it = segments_.emplace_hint(it, at, Segment{end, std::nullopt, {}});
            }
            it->second.readers.push_back(launch);
            at = it->second.last;
            ++it;
        }
    }

private:
    struct Segment {
        uint64_t last;  // one past
        std::optional<uint32_t> writer;
        Places readers;
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

// Which launches each one must wait for, by itself or by others, as bits.
class Ancestors {
public:
    explicit Ancestors(size_t launches) : words_((launches + 63) / 64), bits_(launches * words_) {}
    bool has(uint32_t launch, uint32_t ancestor) const { return bit(launch, ancestor / 64) >> ancestor % 64 & 1; }
    void add(uint32_t launch, uint32_t parent) {
        for (size_t i = 0; i < words_; ++i) bits_[launch * words_ + i] |= bit(parent, i);
        bits_[launch * words_ + parent / 64] |= uint64_t{1} << parent % 64;
    }

private:
    uint64_t bit(uint32_t launch, size_t word) const { return bits_[launch * words_ + word]; }

    size_t words_;
    std::vector<uint64_t> bits_;
};

// What each launch must wait for, without what it waits for through others.
std::vector<Places> dependencies(const std::vector<Launch>& launches) {
    std::unordered_map<uint32_t, ByteHistory> buffers;
    std::vector<Places> after(launches.size());
    Ancestors ancestors(launches.size());
    for (uint32_t place = 0; place < launches.size(); ++place) {
        const Launch& launch = launches[place];
        const KernelInfo& kernel = *launch.kernel;
        Places found;
        for (uint32_t i = 0; i < kernel.slot_count; ++i) {
            const SlotRef& slot = launch.slots[i];
            if (slot.bytes > 0)
                buffers[slot.buffer.index].conflicts(slot.offset, slot.offset + slot.bytes, kernel.slots[i].written,
                                                     found);
        }
        std::sort(found.begin(), found.end(), std::greater<>());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        // The latest first: an earlier one may be known through it.
        for (const uint32_t parent : found) {
            if (ancestors.has(place, parent)) continue;
            after[place].push_back(parent);
            ancestors.add(place, parent);
        }
        for (const bool write : {false, true}) {
            for (uint32_t i = 0; i < kernel.slot_count; ++i) {
                const SlotRef& slot = launch.slots[i];
                if (slot.bytes == 0 || kernel.slots[i].written != write) continue;
                buffers[slot.buffer.index].record(slot.offset, slot.offset + slot.bytes, write, place);
            }
        }
    }
    return after;
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

// Every launch is in the earliest stage that what it waits for allows.
Plan Recorder::finish(std::string name) {
    Plan plan{std::move(name), std::exchange(launches_, {}), 0, {}};
    scope("");
    const std::vector<Places> after = dependencies(plan.launches);
    for (uint32_t i = 0; i < plan.launches.size(); ++i) {
        uint32_t& stage = plan.launches[i].stage;
        stage = 0;
        for (const uint32_t parent : after[i]) stage = std::max(stage, plan.launches[parent].stage + 1);
        plan.stage_count = std::max(plan.stage_count, stage + 1);
    }
    std::stable_sort(plan.launches.begin(), plan.launches.end(),
                     [](const Launch& a, const Launch& b) { return a.stage < b.stage; });
    std::vector<uint32_t> place(plan.launches.size());
    for (uint32_t i = 0; i < plan.launches.size(); ++i) place[plan.launches[i].recorded] = i;
    for (const Launch& launch : plan.launches) {
        plan.after.push_back(after[launch.recorded]);
        for (uint32_t& parent : plan.after.back()) parent = place[parent];
    }
    return plan;
}

Plan single_launch(const Plan& plan, uint32_t index) {
    Plan single{plan.name, {plan.launches[index]}, 1, {{}}};
    single.launches.front().stage = 0;
    return single;
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
