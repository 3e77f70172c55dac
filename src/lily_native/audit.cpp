#include "audit.h"

#include <algorithm>
#include <cstring>

#include "float_words.h"

namespace lily {
namespace {

// Fills the counts of a row; returns the bits of the largest finite value.
template <class Format>
typename Format::Word scan(const std::byte* from, uint64_t count, AuditRow& row) {
    using Word = typename Format::Word;
    Word largest = 0;
    for (uint64_t i = 0; i < count; ++i) {
        Word size;
        std::memcpy(&size, from + i * sizeof(Word), sizeof(Word));
        size = static_cast<Word>(size & ~Format::kSign);
        if (size >= Format::kInfinity) {
            ++row.nonfinite;
            continue;
        }
        if (Format::kSaturated != 0 && size == Format::kSaturated) ++row.saturated;
        largest = std::max(largest, size);
    }
    row.values = count;
    return largest;
}

}  // namespace

std::vector<AuditRow> audit(Device& device, const Plan& plan) {
    std::vector<AuditRow> rows;
    std::vector<std::byte> bytes;
    for (uint32_t i = 0; i < plan.launches.size(); ++i) {
        const Launch& launch = plan.launches[i];
        const std::unique_ptr<Program> program = device.prepare(single_launch(plan, i));
        device.run(*program);
        std::array<uint64_t, kMaxSlots> counts{};
        launch.kernel->counts(launch.args.data(), launch.consts.data(), counts.data());
        for (uint32_t s = 0; s < launch.kernel->slot_count; ++s) {
            const SlotInfo& slot = launch.kernel->slots[s];
            if (!slot.written) continue;
            AuditRow row{i, launch.kernel->name, launch.label, launch.layer, slot.name, slot.type, 0, 0, 0, 0};
            bytes.resize(launch.slots[s].bytes);
            device.read(launch.slots[s].buffer, launch.slots[s].offset, bytes.data(), bytes.size());
            const bool numbers = with_format(slot.type, [&](auto format) {
                row.largest = format.value(scan<decltype(format)>(bytes.data(), counts[s], row));
            });
            if (numbers) rows.push_back(row);
        }
    }
    return rows;
}

}  // namespace lily
