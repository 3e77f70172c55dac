// Runs a plan launch by launch and looks at every number that is written: where a checkpoint's activations overflow.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"

namespace lily {

// What one launch left in one of its slots of floating-point numbers.
struct AuditRow {
    uint32_t launch;  // its place in the plan
    const char* kernel;
    const char* label;
    int32_t layer;  // -1: none
    const char* slot;
    const char* type;    // of the slot, as written in the shader
    uint64_t values;     // looked at
    uint64_t saturated;  // act_t values at the end of its range; 0 where act_t has the range of float
    uint64_t nonfinite;
    float largest;  // absolute value of the finite ones
};

// Every element of a slot counts, so a pass should have as many rows as its plan has room for. Nothing else may use the
// device meanwhile.
std::vector<AuditRow> audit(Device& device, const Plan& plan);

}  // namespace lily
