#include "audit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>

namespace lily {
namespace {

constexpr uint16_t kLargestHalf = 0x7bff;  // 65504

// How numbers of a type are told apart by their bits, the sign left out.
template <class Word>
struct Format {
    Word sign;
    Word infinity;   // all bits of the exponent
    Word saturated;  // 0: the type does not saturate
};
constexpr Format<uint32_t> kFloat{0x80000000u, 0x7f800000u, 0};
constexpr Format<uint16_t> kBfloat{0x8000, 0x7f80, 0};
constexpr Format<uint16_t> kHalf{0x8000, 0x7c00, kLargestHalf};

// Fills the counts of a row; returns the bits of the largest finite value. Sizes compare as their bits do.
template <class Word>
Word scan(const std::byte* from, uint64_t count, const Format<Word>& format, AuditRow& row) {
    Word largest = 0;
    for (uint64_t i = 0; i < count; ++i) {
        Word size;
        std::memcpy(&size, from + i * sizeof(Word), sizeof(Word));
        size = static_cast<Word>(size & ~format.sign);
        if (size >= format.infinity) {
            ++row.nonfinite;
            continue;
        }
        if (format.saturated != 0 && size == format.saturated) ++row.saturated;
        largest = std::max(largest, size);
    }
    row.values = count;
    return largest;
}

float half_value(uint16_t bits) {
    const int exponent = bits >> 10, fraction = bits & 0x3ff;
    return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

// False for a slot that holds no floating-point numbers.
bool look(const std::byte* from, uint64_t count, AuditRow& row) {
    std::string_view type = row.type;
    if (type == "act_t") type = std::is_same_v<act_t, half> ? "half" : "bfloat";
    if (type == "float")
        row.largest = std::bit_cast<float>(scan(from, count, kFloat, row));
    else if (type == "bfloat")
        row.largest = std::bit_cast<float>(uint32_t{scan(from, count, kBfloat, row)} << 16);
    else if (type == "half")
        row.largest = half_value(scan(from, count, kHalf, row));
    else
        return false;
    return true;
}

}  // namespace

std::vector<AuditRow> audit(Device& device, const Plan& plan) {
    std::vector<AuditRow> rows;
    std::vector<std::byte> bytes;
    for (uint32_t i = 0; i < plan.launches.size(); ++i) {
        Plan single{plan.name, {plan.launches[i]}, 1, {{}}};
        Launch& launch = single.launches.front();
        launch.stage = 0;
        const std::unique_ptr<Program> program = device.prepare(single);
        device.run(*program);
        std::array<uint64_t, kMaxSlots> counts{};
        launch.kernel->counts(launch.args.data(), launch.consts.data(), counts.data());
        for (uint32_t s = 0; s < launch.kernel->slot_count; ++s) {
            const SlotInfo& slot = launch.kernel->slots[s];
            if (!slot.written) continue;
            AuditRow row{i, launch.kernel->name, launch.label, launch.layer, slot.name, slot.type, 0, 0, 0, 0};
            bytes.resize(launch.slots[s].bytes);
            device.read(launch.slots[s].buffer, launch.slots[s].offset, bytes.data(), bytes.size());
            if (look(bytes.data(), counts[s], row)) rows.push_back(row);
        }
    }
    return rows;
}

}  // namespace lily
