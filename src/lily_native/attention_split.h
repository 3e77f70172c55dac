// What devices tell and the model asks about attention of one row.
#pragma once

#include <limits>

#include "kernel.h"

namespace lily {

// How a device's threadgroups share attention of one row.
struct AttentionSplit {
    uint32_t whole = 2 * KV_BLOCK;                         // contexts up to here are attended in one block
    uint32_t block = KV_BLOCK;                             // tokens of a block, at least
    uint32_t most = std::numeric_limits<uint32_t>::max();  // blocks; where there would be more, they are longer
};

}  // namespace lily
