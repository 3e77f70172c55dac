// What the host knows about kernels: element types, slots (typed slices of device memory), the kernel table
// that tools/kernel_table.py derives from shaders/*.metal, and the launch record that every device replays.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "error.h"

namespace lily {

using uint = uint32_t;

// Storage types: the host moves these bits and never computes with them.
struct half {
    uint16_t bits;
};
struct bfloat {
    uint16_t bits;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
using ushort = uint16_t;

// shape.h is shader text; on the host its address space word means nothing.
#define constant
#include "shape.h"
#undef constant

inline constexpr uint32_t kMaxSlots = 16;
inline constexpr uint32_t kMaxConsts = 4;
inline constexpr uint32_t kMaxArgBytes = 96;
inline constexpr uint32_t kGenericForm = 0;

// One allocation of a device.
struct BufferId {
    uint32_t index;

    bool operator==(const BufferId&) const = default;
};
inline constexpr BufferId kNoBuffer{std::numeric_limits<uint32_t>::max()};

[[noreturn]] void throw_slice_error(uint64_t first, uint64_t count, uint64_t have);

// A typed slice of a buffer. T is const where only reading is allowed.
template <class T>
struct Slot {
    BufferId buffer;
    uint64_t offset;  // bytes
    uint64_t count;   // elements

    // Elements first ... first+n-1; throws kLogic when they are not all inside.
    Slot slice(uint64_t first, uint64_t n) const {
        if (first > count || n > count - first) throw_slice_error(first, n, count);
        return {buffer, offset + first * sizeof(T), n};
    }
    uint64_t bytes() const { return count * sizeof(T); }
    operator Slot<const T>() const
        requires(!std::is_const_v<T>)
    {
        return {buffer, offset, count};
    }
};

struct SlotInfo {
    const char* name;
    const char* type;  // as written in the shader: "float", "act_t", "StepState"
    uint32_t element_bytes;
    bool written;       // a written slot may also be read
    const char* shape;  // "[rows, dim]"
    uint32_t alignment;
};

struct ArgInfo {
    const char* name;
    char type;  // 'u' uint, 'i' int, 'f' float; 4 bytes each, in order
};

struct ConstInfo {
    const char* name;
    int32_t mirrors;  // index of the args field it copies, or -1: chosen by the plan
    uint32_t max;     // largest value of a chosen const; no limit (UINT32_MAX) for a mirrored one
};

struct KernelInfo {
    const char* name;
    const char* where;  // "norm.metal:17"
    const char* used;   // "encode_layer, encode_head", "reference" or "bench"
    uint32_t index;     // position in kKernels
    uint32_t simds;     // simdgroups of a threadgroup at SIMD width 32
    const SlotInfo* slots;
    uint32_t slot_count;
    const char* args_type;  // as named in the shader: "qmv_args"
    const ArgInfo* args;
    uint32_t arg_count;
    const ConstInfo* consts;
    uint32_t const_count;
    // out[i]: elements slot i must hold; UINT64_MAX when the shape has no value (overflow, x / 0, 1 - 2).
    void (*counts)(const void* args, const uint32_t* consts, uint64_t* out);
    // Bytes of slot i that are really read and written, each counted once: all of a slot that is only read, and of a
    // written one all as written and none as read, unless the shader says otherwise.
    void (*traffic)(const void* args, const uint32_t* consts, uint64_t* read, uint64_t* written);
};

struct ListedVariant {
    uint32_t kernel;  // KernelInfo::index
    std::array<uint32_t, kMaxConsts> consts;
};

struct ShapeConstant {
    const char* name;
    uint32_t value;
};

// Generated tables (kernels.gen.cpp).
extern const KernelInfo kKernels[];
extern const size_t kKernelCount;
extern const ListedVariant kListedVariants[];  // what shaders/host/cpu_consts.txt names
extern const size_t kListedVariantCount;
extern const ShapeConstant kShapeConstants[];
extern const size_t kShapeConstantCount;
extern const uint64_t kTableHash;

// nullptr when there is no such kernel.
const KernelInfo* find_kernel(std::string_view name);

struct SlotRef {
    BufferId buffer;
    uint64_t offset;
    uint64_t bytes;
};

template <class T>
SlotRef slot_ref(const Slot<T>& slot) {
    return {slot.buffer, slot.offset, slot.bytes()};
}

using Consts = std::array<uint32_t, kMaxConsts>;

// One compiled form of a kernel: its constants in the order of KernelInfo::consts, unused entries 0.
struct Variant {
    const KernelInfo* kernel;
    Consts consts;
};

// A variant in maps.
using VariantKey = std::pair<uint32_t, Consts>;
inline VariantKey key_of(const Variant& variant) {
    return {variant.kernel->index, variant.consts};
}

// One kernel with everything it needs. Made by launch() of the generated structs, or by hand from a
// KernelInfo.
struct Launch {
    const KernelInfo* kernel = nullptr;
    // Declaration order; a mirrored const holds the value of its args field, or kGenericForm to force the form that
    // reads it at run time.
    Consts consts{};
    std::array<SlotRef, kMaxSlots> slots{};
    alignas(16) std::array<std::byte, kMaxArgBytes> args{};
    const char* label = "";  // static text
    int32_t layer = -1;
    uint32_t recorded = 0;  // place in the order that the model was written down in
    uint32_t stage = 0;
};

// The only check of a launch: buffers, sizes, alignment, consts. Throws kLogic naming kernel and slot.
void check_launch(const Launch& launch);

// The value of the const of this name, if the kernel has one.
std::optional<uint32_t> const_named(const KernelInfo& kernel, const Consts& consts, std::string_view name);

// How well a compiled variant fits the consts of a launch: -1 when it cannot run it, else the number of
// mirrored consts it was compiled for. A device takes the variant of the highest score.
int variant_score(const KernelInfo& kernel, const uint32_t* variant, const Consts& wanted);

// Element counts of shapes: unsigned arithmetic that sticks at kImpossible instead of wrapping or trapping.
class Count {
public:
    static constexpr uint64_t kImpossible = std::numeric_limits<uint64_t>::max();

    template <class T>
        requires std::is_integral_v<T>
    constexpr Count(T value) : value_(static_cast<uint64_t>(value)) {
        if constexpr (std::is_signed_v<T>) {
            if (value < 0) value_ = kImpossible;
        }
    }
    constexpr uint64_t value() const { return value_; }

    friend constexpr Count operator+(Count a, Count b) {
        return a.value_ > kImpossible - b.value_ ? kImpossible : a.value_ + b.value_;
    }
    friend constexpr Count operator-(Count a, Count b) {
        return a.impossible() || b.value_ > a.value_ ? kImpossible : a.value_ - b.value_;
    }
    friend constexpr Count operator*(Count a, Count b) {
        if (a.impossible() || b.impossible()) return kImpossible;
        return b.value_ != 0 && a.value_ > kImpossible / b.value_ ? kImpossible : a.value_ * b.value_;
    }
    friend constexpr Count operator/(Count a, Count b) {
        return a.impossible() || b.impossible() || b.value_ == 0 ? kImpossible : a.value_ / b.value_;
    }

private:
    constexpr bool impossible() const { return value_ == kImpossible; }

    uint64_t value_;
};

}  // namespace lily
