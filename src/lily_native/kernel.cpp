#include "kernel.h"

#include <cstring>
#include <string>

namespace lily {

namespace {

// Shaders index a slot with 32 bits.
constexpr uint64_t kMaxElements = uint64_t{1} << 32;

[[noreturn]] void fail(const Launch& launch, const char* part, const std::string& what) {
    throw Error(ErrorKind::kLogic, std::string(launch.kernel->name) + "." + part + ": " + what);
}

uint32_t arg_bits(const Launch& launch, uint32_t index) {
    uint32_t value;
    std::memcpy(&value, launch.args.data() + sizeof(value) * index, sizeof(value));
    return value;
}

void check_consts(const Launch& launch) {
    const KernelInfo& kernel = *launch.kernel;
    for (uint32_t i = 0; i < kernel.const_count; ++i) {
        const ConstInfo& info = kernel.consts[i];
        const uint32_t value = launch.consts[i];
        if (info.mirrors >= 0) {
            const uint32_t wanted = arg_bits(launch, static_cast<uint32_t>(info.mirrors));
            if (value != wanted && value != kGenericForm) {
                fail(launch, info.name,
                     "is " + std::to_string(value) + ", but args." + kernel.args[info.mirrors].name + " is " +
                         std::to_string(wanted));
            }
        } else if (value == 0 || value > info.max) {
            fail(launch, info.name, "is " + std::to_string(value) + ", must be 1 to " + std::to_string(info.max));
        }
    }
}

void check_slot(const Launch& launch, uint32_t index, uint64_t needed) {
    const SlotInfo& info = launch.kernel->slots[index];
    const SlotRef& slot = launch.slots[index];
    if (needed == Count::kImpossible) {
        fail(launch, info.name, std::string("shape ") + info.shape + " has no value for these args");
    }
    if (needed > kMaxElements) {
        fail(launch, info.name, "needs " + std::to_string(needed) + " elements, more than 32-bit indices reach");
    }
    const uint64_t count = slot.bytes / info.element_bytes;
    if (count < needed) {
        fail(launch, info.name,
             "has " + std::to_string(count) + " elements, needs " + std::to_string(needed) + " " + info.shape);
    }
    if (slot.buffer == kNoBuffer) fail(launch, info.name, "has no buffer");
    if (slot.offset % info.alignment != 0) {
        fail(launch, info.name,
             "offset " + std::to_string(slot.offset) + " is not a multiple of " + std::to_string(info.alignment) +
                 " bytes (" + info.type + ")");
    }
    if (slot.bytes > std::numeric_limits<uint64_t>::max() - slot.offset) {
        fail(launch, info.name, "offset and size leave the 64-bit range");
    }
}

}  // namespace

void throw_slice_error(uint64_t first, uint64_t count, uint64_t have) {
    throw Error(ErrorKind::kLogic, "slice: " + std::to_string(count) + " elements from " + std::to_string(first) +
                                       " of a slot that has " + std::to_string(have));
}

const KernelInfo* find_kernel(std::string_view name) {
    for (size_t i = 0; i < kKernelCount; ++i) {
        if (name == kKernels[i].name) return &kKernels[i];
    }
    return nullptr;
}

void check_launch(const Launch& launch) {
    if (launch.kernel == nullptr) throw Error(ErrorKind::kLogic, "launch without a kernel");
    check_consts(launch);
    std::array<uint64_t, kMaxSlots> needed{};
    launch.kernel->counts(launch.args.data(), launch.consts.data(), needed.data());
    for (uint32_t i = 0; i < launch.kernel->slot_count; ++i) check_slot(launch, i, needed[i]);
}

std::optional<uint32_t> const_named(const KernelInfo& kernel, const Consts& consts, std::string_view name) {
    for (uint32_t i = 0; i < kernel.const_count; ++i)
        if (kernel.consts[i].name == name) return consts[i];
    return std::nullopt;
}

int variant_score(const KernelInfo& kernel, const uint32_t* variant, const Consts& wanted) {
    int compiled_in = 0;
    for (uint32_t i = 0; i < kernel.const_count; ++i) {
        const bool mirrored = kernel.consts[i].mirrors >= 0;
        if (variant[i] == wanted[i]) {
            compiled_in += mirrored && wanted[i] != 0 ? 1 : 0;
        } else if (!mirrored || variant[i] != 0) {
            return -1;
        }
    }
    return compiled_in;
}

}  // namespace lily
