// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cpu/attention/schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "espalier/base/check.h"

namespace espalier {

void check_forest(std::span<const int32_t> subtree_end) {
  const auto num_tokens = static_cast<int64_t>(subtree_end.size());
  std::vector<int64_t> open_ends;  // ends of the subtrees enclosing the current token, strictly descending
  for (int64_t i = 0; i < num_tokens; ++i) {
    while (!open_ends.empty() && open_ends.back() <= i) open_ends.pop_back();
    const int64_t limit = open_ends.empty() ? num_tokens : open_ends.back();
    const int64_t end = subtree_end[i];
    ESPALIER_CHECK(
        i < end && end <= limit,
        "subtree_end[{}]: expected a value in [{}, {}] (a subtree lies inside its parent's), received {}", i,
        i + 1, limit, end);
    if (open_ends.empty() || end < limit) open_ends.push_back(end);
  }
}

int32_t Schedule::query_end(int32_t block) const {
  return std::min(query_begin(block) + sizes.queries, num_tokens);
}

namespace {

std::vector<KeyBlock> make_key_blocks(std::span<const int32_t> subtree_end,
                                      std::span<const ContextRectangle> context, int32_t size) {
  const auto num_tokens = static_cast<int32_t>(subtree_end.size());
  std::vector<KeyBlock> blocks;
  for (int32_t begin = 0; begin < num_tokens; begin += size) {
    const int32_t end = std::min(begin + size, num_tokens);
    const auto [low, high] = std::minmax_element(subtree_end.begin() + begin, subtree_end.begin() + end);
    blocks.push_back(forest_block(begin, end, *low, *high));
  }
  for (const ContextRectangle& r : context) {
    for (int32_t begin = r.key_begin; begin < r.key_end; begin += size) {
      blocks.push_back(context_block(r, begin, std::min(begin + size, r.key_end)));
    }
  }
  return blocks;
}

std::vector<int32_t> iota(size_t size) {
  std::vector<int32_t> numbers(size);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Filters the tiles of the forest by a sliding window.
class WindowedTiles {
 public:
  WindowedTiles(const Schedule& schedule, std::span<const int32_t> subtree_end)
      : window_(schedule.window), blocks_(schedule.key_blocks), subtree_end_(subtree_end.data()) {
    if (!window_.exists()) return;
    for (const KeyBlock& block : blocks_) {
      Positions positions;
      for (int32_t key = block.begin; key < block.end; ++key) positions.add(window_.key_position(block, key));
      keys_.push_back(positions);
    }
  }

  /// Starts a block of queries.
  void start(QueryRange queries) {
    queries_ = queries;
    query_positions_ = {};
    for (int32_t j = queries.begin; window_.exists() && j < queries.end; ++j) {
      query_positions_.add(window_.position[j]);
    }
  }

  TileClass classify(int32_t block, TileClass in_forest) const {
    if (!window_.exists()) return in_forest;
    const Positions& keys = keys_[block];
    if (query_positions_.least - keys.most >= window_.size) return TileClass::kEmpty;
    if (query_positions_.most - keys.least < window_.size) return in_forest;
    return any_visible(blocks_[block]) ? TileClass::kPartial : TileClass::kEmpty;
  }

 private:
  struct Positions {
    int32_t least = std::numeric_limits<int32_t>::max();
    int32_t most = 0;

    void add(int32_t position) {
      least = std::min(least, position);
      most = std::max(most, position);
    }
  };

  // Backwards, since later keys are nearer.
  bool any_visible(const KeyBlock& block) const {
    for (int32_t key = block.end; key-- > block.begin;) {
      const int32_t position = window_.key_position(block, key);
      const QueryRange queries = queries_of_key(block, key, subtree_end_, queries_);
      for (int32_t j = queries.begin; j < queries.end; ++j) {
        if (window_.sees(j, position)) return true;
      }
    }
    return false;
  }

  const SlidingWindow& window_;
  std::span<const KeyBlock> blocks_;
  const int32_t* subtree_end_;
  std::vector<Positions> keys_;  // by key block
  QueryRange queries_{};
  Positions query_positions_;
};

// Sweeps over query blocks with the set of visible key blocks. Without a window, a step only visits key
// blocks that it lists or closes.
void list_tiles(Schedule& schedule, std::span<const int32_t> subtree_end) {
  WindowedTiles windowed(schedule, subtree_end);
  const std::vector<KeyBlock>& blocks = schedule.key_blocks;
  std::vector<int32_t> opening = iota(blocks.size());
  std::stable_sort(opening.begin(), opening.end(),
                   [&](int32_t a, int32_t b) { return blocks[a].query_begin < blocks[b].query_begin; });
  auto next = opening.begin();
  std::vector<int32_t> open;
  for (int32_t begin = 0; begin < schedule.num_tokens; begin += schedule.sizes.queries) {
    const int32_t end = std::min(begin + schedule.sizes.queries, schedule.num_tokens);
    std::erase_if(open, [&](int32_t block) { return blocks[block].query_end <= begin; });
    for (; next != opening.end() && blocks[*next].query_begin < end; ++next) open.push_back(*next);
    windowed.start({begin, end});
    for (const int32_t block : open) {
      const TileClass tile = windowed.classify(block, classify(blocks[block], begin, end));
      if (tile == TileClass::kEmpty) continue;
      schedule.tiles.values.push_back({block, 0, tile == TileClass::kFull});
    }
    schedule.tiles.end_row();
  }
}

void order_query_blocks(Schedule& schedule) {
  std::vector<int64_t> work(schedule.num_query_blocks());
  for (int32_t q = 0; q < schedule.num_query_blocks(); ++q) {
    for (const Tile& tile : schedule.tiles.row(q)) {
      work[q] += static_cast<int64_t>(schedule.query_end(q) - schedule.query_begin(q)) *
                 schedule.key_blocks[tile.key_block].num_keys();
    }
    schedule.num_pairs += work[q];
  }
  schedule.query_order = iota(work.size());
  std::stable_sort(schedule.query_order.begin(), schedule.query_order.end(),
                   [&](int32_t a, int32_t b) { return work[a] > work[b]; });
  std::vector<int32_t> turns(schedule.key_blocks.size());
  for (const int32_t q : schedule.query_order) {
    for (Tile& tile : schedule.tiles.row(q)) tile.turn = turns[tile.key_block]++;
  }
}

}  // namespace

Schedule make_schedule(std::span<const int32_t> subtree_end, std::span<const ContextRectangle> context,
                       BlockSizes sizes, const SlidingWindow& window) {
  ESPALIER_ASSERT(sizes.queries > 0 && sizes.keys > 0);
  check_forest(subtree_end);
  Schedule schedule;
  schedule.sizes = sizes;
  schedule.num_tokens = static_cast<int32_t>(subtree_end.size());
  schedule.key_blocks = make_key_blocks(subtree_end, context, sizes.keys);
  schedule.window = window;
  list_tiles(schedule, subtree_end);
  order_query_blocks(schedule);
  return schedule;
}

}  // namespace espalier
