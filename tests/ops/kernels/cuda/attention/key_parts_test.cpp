// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/key_parts.h"

#include <gtest/gtest.h>

#include <bit>
#include <queue>
#include <set>
#include <tuple>

#include "espalier/ops/kernels/cuda/attention/tree_attention_backward.h"
#include "tests/ops/kernels/cpu/attention/tile_counts.h"
#include "tests/ops/kernels/cuda/attention/attention_problems.h"
#include "tests/ops/kernels/cuda/emulator.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using cuda::KeyCut;
using cuda::KeyPart;
using cuda::PartInputs;
using testing::EmulatedSchedule;
using testing::ForestShape;
using testing::kIsSanitized;
using testing::seeds;
using testing::test_seed;

struct Problem : testing::ScheduleProblem {
  PartInputs inputs;
};

Problem random_problem(uint64_t seed) {
  std::mt19937_64 random(test_seed(seed));
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  Problem problem{testing::random_schedule_problem(
      random, static_cast<ForestShape>(seed % testing::kNumForestShapes), seed % 10 == 0 ? 200 : 20)};
  const int32_t heads = between(1, 5);
  problem.inputs = {heads, between(1, heads), between(1, 3), between(1, 12), between(1, 30)};
  return problem;
}

/// What the kernel writes.
struct KernelParts {
  EmulatedSchedule schedule;
  testing::EmulatedParts parts;
  std::span<KeyPart> order;
  std::span<KeyCut> cuts;

  explicit KernelParts(const Problem& problem, uint64_t seed = 0)
      : schedule(problem.ends, problem.context, problem.sizes, seed),
        parts(schedule.schedule, problem.inputs, 1, seed),
        order(parts.order(schedule.schedule)),
        cuts(parts.cuts()) {}
};

/// Steps of each key block by the CPU's schedule.
std::vector<int64_t> steps_of_blocks(const Problem& problem) {
  const Schedule schedule = make_schedule(problem.ends, problem.context, problem.sizes);
  std::vector<int64_t> steps;
  for (const auto& query_blocks : testing::query_blocks_of_keys(schedule)) {
    steps.push_back(std::ssize(query_blocks) * problem.inputs.steps_per_tile);
  }
  return steps;
}

struct Expected {
  std::vector<std::array<int32_t, 4>> order;  // block, head, part, parts
  std::vector<std::array<int32_t, 2>> cuts;   // parts, first

  bool operator==(const Expected&) const = default;
};

Expected of_kernel(const KernelParts& emulated) {
  Expected result;
  for (const KeyPart& p : emulated.order) result.order.push_back({p.block, p.head, p.part, p.parts});
  for (const KeyCut& cut : emulated.cuts) result.cuts.push_back({cut.parts, cut.first});
  return result;
}

/// By sorting.
Expected by_definition(const Problem& problem) {
  const PartInputs& inputs = problem.inputs;
  const std::vector<int64_t> steps = steps_of_blocks(problem);
  const int64_t total = std::accumulate(steps.begin(), steps.end(), int64_t{0});
  const int64_t limit =
      std::max<int64_t>(inputs.least_steps, (total + inputs.spare_parts - 1) / inputs.spare_parts);
  Expected result;
  std::vector<std::tuple<int, int, int64_t, int32_t, int32_t, int32_t, int32_t>> sorted;
  int32_t first = 0;
  for (int32_t block = 0; block < std::ssize(steps); ++block) {
    const auto parts = static_cast<int32_t>((steps[block] + limit - 1) / limit);
    const int64_t longest = (steps[block] + parts - 1) / parts;
    result.cuts.push_back({parts, first});
    if (parts > 1) first += parts;
    for (int32_t part = 0; part < parts; ++part) {
      for (int32_t head = 0; head < inputs.heads; ++head) {
        sorted.emplace_back(-std::bit_width(static_cast<uint64_t>(longest)), head / inputs.heads_at_once,
                            -longest, block, part, head, parts);
      }
    }
  }
  std::sort(sorted.begin(), sorted.end());
  for (const auto& [size, group, longest, block, part, head, parts] : sorted)
    result.order.push_back({block, head, part, parts});
  result.order.resize(inputs.heads * (steps.size() + inputs.spare_parts), {-1, 0, 0, 1});
  return result;
}

TEST(KeyPartsTest, AreWhatTheDefinitionSays) {
  int64_t cut = 0, whole = 0;
  for (uint64_t seed = 0; seed < seeds(250); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const KernelParts emulated(problem, seed);
    ASSERT_TRUE(by_definition(problem) == of_kernel(emulated));
    for (const KeyCut& each : emulated.cuts) ++(each.parts > 1 ? cut : whole);
  }
  EXPECT_GT(cut, kIsSanitized ? 0 : 300);
  EXPECT_GT(whole, kIsSanitized ? 0 : 500);
}

TEST(KeyPartsTest, RangesCoverTheSteps) {
  for (const int32_t steps : {1, 7, 64, 4'000'000}) {
    for (const int32_t parts : {1, 2, 3, 7}) {
      int32_t next = 0, longest = 0;
      for (int32_t part = 0; part < parts; ++part) {
        const cuda::StepRange range = KeyPart{0, 0, part, parts}.range(steps);
        EXPECT_EQ(range.begin, next);
        next = range.end;
        longest = std::max(longest, range.end - range.begin);
      }
      EXPECT_EQ(next, steps);
      EXPECT_EQ(longest, (steps + parts - 1) / parts);
    }
  }
}

TEST(KeyPartsTest, MemoryIsEnough) {
  for (uint64_t seed = 300; seed < 300 + seeds(200); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Problem problem = random_problem(seed);
    const KernelParts emulated(problem, seed);
    int64_t parts = 0;
    for (const KeyCut& cut : emulated.cuts) parts += cut.parts > 1 ? cut.parts : 0;
    EXPECT_LE(parts, emulated.parts.parts.cut_parts);
  }
}

TEST(KeyPartsTest, OfNothing) {
  const KernelParts emulated({{{}, {}, {8, 8}}, {2, 1, 1, 1, 3}});
  for (const KeyPart& part : emulated.order) EXPECT_EQ(part.block, -1);
}

TEST(KeyPartsTest, NegativeControlsAreNoticed) {
  int64_t spoiled = 0;
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    const Problem problem = random_problem(seed);
    Problem other = problem;
    ++other.inputs.steps_per_tile;
    other.inputs.least_steps *= 2;
    spoiled += !(by_definition(problem) == of_kernel(KernelParts(other, seed)));
    KernelParts swapped(problem, seed);
    std::swap(swapped.order[0], swapped.order.back());
    EXPECT_FALSE(by_definition(problem) == of_kernel(swapped)) << "seed " << seed;
  }
  EXPECT_GT(spoiled, kIsSanitized ? 0 : 5);
}

// How busy multiprocessors are -----------------------------------------------------------------------------

struct Job {
  int64_t steps;
  bool cut;
};

/// The work of a launch over the time that it takes, if every multiprocessor takes the next block of threads
/// as soon as it has none. Beside its steps one takes time for keys, values and gradients, and more for the
/// sums of a part.
double efficiency(const std::vector<Job>& jobs, int multiprocessors) {
  constexpr int64_t kOfWhole = 2, kOfPart = 6;
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int i = 0; i < multiprocessors; ++i) free_at.push(0);
  int64_t end = 0, work = 0;
  for (const Job& job : jobs) {
    const int64_t done = free_at.top() + job.steps + (job.cut ? kOfPart : kOfWhole);
    free_at.pop();
    free_at.push(done);
    end = std::max(end, done);
    work += job.steps;
  }
  return static_cast<double>(work) / (static_cast<double>(end) * multiprocessors);
}

struct Balance {
  double parts;         // as key_parts.h has it
  double head_by_head;  // whole blocks, by their work within each head
};

Balance balance(std::vector<int32_t> ends, int heads, int key_heads) {
  using Tiles = cuda::BackwardTiles<BFloat16, 128, 2>;
  const auto packing = cuda::RowPacking::of(heads / key_heads);
  const Problem problem{{std::move(ends), {}, cuda::block_sizes<Tiles>(packing)},
                        PartInputs::of(key_heads, key_heads, packing.parts, {132})};
  const std::vector<int64_t> steps = steps_of_blocks(problem);
  std::vector<Job> parts, whole;
  const KernelParts emulated(problem);
  for (const KeyPart& part : emulated.order) {
    if (part.block < 0) continue;
    const cuda::StepRange range = part.range(static_cast<int32_t>(steps[part.block]));
    parts.push_back({range.end - range.begin, part.parts > 1});
  }
  std::vector<int64_t> sorted = steps;
  std::sort(sorted.rbegin(), sorted.rend());
  for (int head = 0; head < key_heads; ++head) {
    for (const int64_t each : sorted) whole.push_back({each, false});
  }
  return {efficiency(parts, 132), efficiency(whole, 132)};
}

std::vector<int32_t> chain(int tokens) {
  return std::vector<int32_t>(tokens, tokens);
}
/// `branches` branches of `length` tokens after a prompt.
std::vector<int32_t> prompt_with_branches(int prompt, int branches, int length) {
  std::vector<int32_t> ends(prompt, prompt + branches * length);
  for (int i = 0; i < branches; ++i) ends.insert(ends.end(), length, prompt + (i + 1) * length);
  return ends;
}

// A simulation in steps, the same on every machine.
TEST(KeyPartsTest, KeepAllMultiprocessorsBusy) {
  struct Row {
    const char* name;
    std::vector<int32_t> ends;
    int heads, key_heads;
  };
  for (const Row& row :
       std::vector<Row>{{"chain of 2k", chain(2048), 16, 4},
                        {"chain of 4k", chain(4096), 16, 4},
                        {"chain of 4k, more heads", chain(4096), 32, 8},
                        {"chain of 8k", chain(8192), 32, 8},
                        {"prompt of 1k, 16 branches of 512", prompt_with_branches(1024, 16, 512), 32, 8},
                        {"prompt of 2k, 64 branches of 256", prompt_with_branches(2048, 64, 256), 16, 8},
                        {"prompt of 512, 8 branches of 4k", prompt_with_branches(512, 8, 4096), 32, 4}}) {
    const Balance got = balance(row.ends, row.heads, row.key_heads);
    std::printf("%-34s %d/%d heads: %.2f busy, head by head %.2f\n", row.name, row.heads, row.key_heads,
                got.parts, got.head_by_head);
    EXPECT_GT(got.parts, row.ends.size() == 2048 ? 0.6 : 0.8) << row.name;
    EXPECT_GT(got.parts, got.head_by_head) << row.name;
  }
  // Where whole blocks fill the GPU already, the order by size and the cuts cost a little.
  const Balance full = balance(chain(16384), 16, 4);
  std::printf("chain of 16k 16/4 heads: %.2f busy, head by head %.2f\n", full.parts, full.head_by_head);
  EXPECT_GT(full.parts, 0.9 * full.head_by_head);
}

}  // namespace
}  // namespace espalier
