// Numbers in memory by their bits, for code that searches slots of any floating-point type and computes nothing.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "kernel.h"

namespace lily {

inline float half_value(uint16_t bits) {
    const int exponent = bits >> 10, fraction = bits & 0x3ff;
    return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
}

// The sign left out, sizes compare as their bits do, and infinity and then NaN come last.
struct FloatFormat {
    using Word = uint32_t;
    static constexpr Word kSign = 0x80000000, kInfinity = 0x7f800000;
    static constexpr Word kSaturated = 0;  // the type does not saturate
    static float value(Word size) { return std::bit_cast<float>(size); }
};

struct BfloatFormat {
    using Word = uint16_t;
    static constexpr Word kSign = 0x8000, kInfinity = 0x7f80, kSaturated = 0;
    static float value(Word size) { return std::bit_cast<float>(uint32_t{size} << 16); }
};

struct HalfFormat {
    using Word = uint16_t;
    static constexpr Word kSign = 0x8000, kInfinity = 0x7c00;
    static constexpr Word kSaturated = 0x7bff;  // 65504, as a half is an act_t
    static float value(Word size) { return half_value(size); }
};

// Calls visit(format) for a slot's type, as written in the shader; false for one that holds no floating-point numbers.
template <class Visit>
bool with_format(std::string_view type, const Visit& visit) {
    if (type == "act_t") type = std::is_same_v<act_t, half> ? "half" : "bfloat";
    if (type == "float")
        visit(FloatFormat{});
    else if (type == "bfloat")
        visit(BfloatFormat{});
    else if (type == "half")
        visit(HalfFormat{});
    else
        return false;
    return true;
}

}  // namespace lily
