// SPDX-License-Identifier: Apache-2.0
// What the tiles of a schedule are.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/ops/kernels/cpu/attention/schedule.h"

namespace espalier::testing {

struct TileCounts {
  int64_t empty = 0;
  int64_t partial = 0;
  int64_t full = 0;

  void add(const Schedule& schedule) {
    for (const Tile& tile : schedule.tiles.values) ++(tile.full ? full : partial);
    empty += static_cast<int64_t>(schedule.key_blocks.size()) * schedule.num_query_blocks() -
             static_cast<int64_t>(schedule.tiles.values.size());
  }
  static TileCounts of(const Schedule& schedule) {
    TileCounts counts;
    counts.add(schedule);
    return counts;
  }
};

/// By key block, the query blocks that have a tile with it.
inline std::vector<std::vector<int32_t>> query_blocks_of_keys(const Schedule& schedule) {
  std::vector<std::vector<int32_t>> blocks(schedule.key_blocks.size());
  for (const int32_t q : schedule.query_order) {
    for (const Tile& tile : schedule.tiles.row(q)) blocks[tile.key_block].push_back(q);
  }
  return blocks;
}

}  // namespace espalier::testing
