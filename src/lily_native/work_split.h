// What devices tell, and the model asks, about how work is divided among threadgroups.
#pragma once

#include <limits>
#include <span>

#include "kernel.h"

namespace lily {

// How a device's threadgroups share attention of one row.
struct AttentionSplit {
    uint32_t whole = 2 * KV_BLOCK;                         // contexts up to here are attended in one block
    uint32_t block = KV_BLOCK;                             // tokens of a block, at least
    uint32_t most = std::numeric_limits<uint32_t>::max();  // blocks; where there would be more, they are longer
};

// Into what tiles a device would have products of many rows divided.
struct TileChoice {
    std::span<const uint32_t> rows;  // of the tiles that it multiplies well, ascending
    uint32_t floors = 1;             // of tiles above each other, that it would rather have than higher ones
};
inline constexpr uint32_t kLowTile = 32;  // rows up to which a tile's height makes little difference

}  // namespace lily
