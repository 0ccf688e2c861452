// SPDX-License-Identifier: Apache-2.0
// Schedules and contexts for tests of attention kernels in the emulator.
#pragma once

#include <cstring>
#include <memory>
#include <span>

#include "espalier/ops/kernels/cuda/attention/key_parts.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/kernels/cuda/emulator.h"

namespace espalier::testing {

/// Rectangles of keys seen by ranges of [0, num_tokens) that are nested or disjoint, each of a segment of its
/// own and not from its first key, sorted as attention wants them.
inline std::vector<ContextRectangle> random_rectangles(std::mt19937_64& random, size_t num_tokens, int count,
                                                       int max_keys) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  std::vector<ContextRectangle> rectangles;
  for (int32_t segment = 0; segment < count; ++segment) {
    const int32_t key = between(0, 3);
    ContextRectangle r{segment, key, key + between(1, max_keys), 0, static_cast<int32_t>(num_tokens)};
    // Down into ranges drawn before, or beside them: into a half of what is left as long as the coin says so.
    while (r.query_end - r.query_begin > 1 && between(0, 2) > 0) {
      const int32_t middle = (r.query_begin + r.query_end) / 2;
      (between(0, 1) == 0 ? r.query_begin : r.query_end) = middle;
    }
    rectangles.push_back(r);
  }
  cuda::sort_rectangles(rectangles.data(), count);
  return rectangles;
}

struct ScheduleProblem {
  std::vector<int32_t> ends;
  std::vector<ContextRectangle> context;
  BlockSizes sizes;
};

/// A random forest with context, and blocks of a few tokens.
inline ScheduleProblem random_schedule_problem(std::mt19937_64& random, ForestShape shape, int max_nodes) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  ScheduleProblem problem;
  problem.ends = random_subtree_end(random, shape, max_nodes, between(1, 12));
  problem.context = random_rectangles(random, problem.ends.size(), between(0, 6), 40);
  problem.sizes = {between(1, 9), between(1, 9)};
  return problem;
}

inline cuda::ScheduleInputs schedule_inputs(std::span<const int32_t> subtree_end,
                                            std::span<const ContextRectangle> rectangles, BlockSizes sizes) {
  cuda::ScheduleInputs inputs{subtree_end.data(),
                              static_cast<int32_t>(subtree_end.size()),
                              rectangles.data(),
                              static_cast<int32_t>(rectangles.size()),
                              0,
                              sizes};
  for (const ContextRectangle& r : rectangles) inputs.num_context_blocks += num_context_blocks(r, sizes.keys);
  return inputs;
}

/// `place` puts arrays into memory that is rubbish.
template <class Place>
void place_in(std::unique_ptr<std::byte[]>& memory, const Place& place) {
  cuda::Arena size(nullptr);
  place(size);
  memory = std::make_unique<std::byte[]>(size.bytes());
  std::memset(memory.get(), 0xff, size.bytes());
  cuda::Arena arena(memory.get());
  place(arena);
}

/// A schedule built by the kernels in the emulator. What it is made of must outlive it.
struct EmulatedSchedule {
  std::unique_ptr<std::byte[]> memory;
  cuda::TileSchedule schedule;

  EmulatedSchedule(std::span<const int32_t> subtree_end, std::span<const ContextRectangle> rectangles,
                   BlockSizes sizes, uint64_t seed) {
    const cuda::ScheduleInputs inputs = schedule_inputs(subtree_end, rectangles, sizes);
    place_in(memory, [&](cuda::Arena& arena) { cuda::place_schedule(inputs, arena, &schedule); });
    const auto run = [&](int32_t warps, void (*kernel)(const cuda::TileSchedule&)) {
      emulate({{cuda::schedule_grid(warps), 1, 1}, cuda::kScheduleThreads, 0, seed},
              [&] { kernel(schedule); });
    };
    const int32_t blocks = inputs.num_key_blocks() + inputs.num_query_blocks();
    run(inputs.num_forest_blocks() + inputs.num_rectangles, &cuda::list_key_blocks);
    run(blocks, &cuda::link_blocks);
    run(inputs.num_query_blocks(), &cuda::order_blocks);
  }
};

/// Parts of key blocks, ordered by the kernel in the emulator. What is not written is rubbish.
struct EmulatedParts {
  std::unique_ptr<std::byte[]> memory;
  cuda::KeyParts parts;
  int32_t key_blocks;

  EmulatedParts(const cuda::TileSchedule& schedule, const cuda::PartInputs& inputs, int64_t key_floats,
                uint64_t seed)
      : key_blocks(schedule.inputs.num_key_blocks()) {
    place_in(memory, [&](cuda::Arena& arena) {
      cuda::place_parts(inputs, schedule.inputs, key_floats, arena, &parts);
      arena.place(parts.sums, parts.num_sums());
    });
    emulate({{cuda::schedule_grid(cuda::part_warps(schedule)), 1, 1}, cuda::kScheduleThreads, 0, seed},
            [&] { cuda::order_parts(schedule, parts); });
  }
  std::span<cuda::KeyPart> order(const cuda::TileSchedule& schedule) const {
    return {parts.order, static_cast<size_t>(cuda::part_blocks(parts.inputs, schedule.inputs))};
  }
  std::span<cuda::KeyCut> cuts() const { return {parts.cuts, static_cast<size_t>(key_blocks)}; }
  int64_t cut_blocks() const {
    return std::ranges::count_if(cuts(), [](const cuda::KeyCut& cut) { return cut.parts > 1; });
  }
};

}  // namespace espalier::testing
