// SPDX-License-Identifier: Apache-2.0
// Divided micro-batches: what the queries of every rank see, once keys are exchanged, against root paths.
#include "espalier/plan/key_reads.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>

#include "espalier/plan/partition.h"
#include "espalier/tree/synth.h"
#include "tests/test_seed.h"
#include "tests/tree/naive.h"

namespace espalier {
namespace {

using testing::seeds;
using testing::test_seed;

constexpr double kPair = 0.01;

/// A plan whose micro-batches so many ranks divide.
struct Divided {
  Forest forest;
  std::vector<MicroBatch> batches;
  int64_t ranks;
  Sharding sharding = Sharding::kBalanced;
  std::vector<Layout> layouts{};
  std::vector<TokenDivision> divisions{};

  void divide() {
    for (const MicroBatch& batch : batches) {
      layouts.push_back(make_layout(forest, batch.runs, RootRuns::kContinueContext));
      divisions.emplace_back(layouts.back(), ranks, kPair, sharding);
    }
  }
};

/// Changes what a rank does.
using Spoil = std::function<void(KeyReads*)>;

/// The keys of a rank as forest tokens: of each source those that it has, then the ones received.
std::vector<std::vector<int64_t>> segments_of(const Divided& given, int64_t m, int64_t rank,
                                              const std::vector<int64_t>& sources,
                                              const std::vector<KeyReads>& reads) {
  const auto held_by = [&](int64_t source, int64_t holder) {
    std::vector<int64_t> held;
    for (const int64_t token : given.divisions[source].tokens(holder))
      held.push_back(given.layouts[source].forest_token[token]);
    return held;
  };
  std::vector<std::vector<int64_t>> segments;
  for (size_t s = 0; s + 1 < sources.size(); ++s) segments.push_back(held_by(sources[s], rank));
  std::vector<int64_t>& received = segments.emplace_back();
  for (int64_t sender = 0; sender < given.ranks; ++sender) {
    const KeyReads& sent = reads[sender];
    std::vector<int64_t> all;
    for (size_t s = 0; s < sources.size(); ++s) {
      const std::vector<int64_t> held = held_by(sources[s], sender);
      for (const int64_t pick : sent.picks[s]) all.push_back(held.at(pick));
    }
    std::vector<int64_t> ordered = all;
    for (size_t i = 0; i < sent.order.size(); ++i) ordered[i] = all.at(sent.order[i]);
    const int64_t before = std::accumulate(sent.send.begin(), sent.send.begin() + rank, int64_t{0});
    EXPECT_EQ(sent.send[rank], reads[rank].receive[sender]) << m;
    received.insert(received.end(), ordered.begin() + before, ordered.begin() + before + sent.send[rank]);
  }
  return segments;
}

/// The first difference between what queries see within a window and a chunk, and their root paths, or "".
std::string fault_of(const Divided& given, int64_t window, int64_t chunk, const Spoil& spoil = {}) {
  const ContextIndex index(given.batches);
  for (int64_t m = 0; m < std::ssize(given.batches); ++m) {
    const std::vector<ContextBlock> context = context_blocks(index, m);
    std::vector<int64_t> sources;
    for (const ContextBlock& block : context) {
      if (sources.empty() || sources.back() != block.ancestor) sources.push_back(block.ancestor);
    }
    sources.push_back(m);
    const Layout& layout = given.layouts[m];
    const DividedMicroBatch divided{layout, context, given.divisions, given.divisions[m], given.ranks};
    std::vector<KeyReads> reads;
    for (int64_t rank = 0; rank < given.ranks; ++rank) {
      reads.push_back(key_reads(divided, rank, window, chunk));
      if (spoil && rank == given.ranks - 1) spoil(&reads.back());
    }
    int64_t tokens = 0;
    for (int64_t rank = 0; rank < given.ranks; ++rank) {
      const auto segments = segments_of(given, m, rank, sources, reads);
      const std::vector<int64_t> own = given.divisions[m].tokens(rank);
      tokens += std::ssize(own);
      for (int64_t q = 0; q < std::ssize(own); ++q) {
        const int64_t query = layout.forest_token[own[q]];
        std::multiset<int64_t> seen;
        for (int64_t k = 0; k <= q; ++k) {  // the forest of its own tokens
          const int64_t end = given.divisions[m].before(rank, layout.subtree_end[own[k]]);
          if (q < end) seen.insert(layout.forest_token[own[k]]);
        }
        for (size_t b = 0; b < reads[rank].positions.size(); ++b) {
          const int64_t* block = &reads[rank].blocks[5 * b];
          if (q < block[3] || q >= block[4]) continue;
          for (int64_t key = block[1]; key < block[2]; ++key) {
            const int64_t token = segments.at(block[0]).at(key);
            if (token_position(given.forest, token) != reads[rank].positions[b] + key - block[1])
              return "a wrong position";
            seen.insert(token);
          }
        }
        std::multiset<int64_t> expected, visible;
        const int64_t position = token_position(given.forest, query);
        const auto in_reach = [&](int64_t token) {
          const int64_t other = token_position(given.forest, token);
          return (window == 0 || position - other < window) &&
                 (chunk == 0 || position / chunk == other / chunk);
        };
        for (int64_t token = query; token >= 0; token = token_before(given.forest, token))
          if (in_reach(token)) expected.insert(token);
        std::ranges::copy_if(seen, std::inserter(visible, visible.end()), in_reach);
        if (visible != expected)
          return fmt::format("micro-batch {}, rank {}: query {} sees {} keys, expected {}", m, rank, query,
                             visible.size(), expected.size());
      }
    }
    if (tokens != layout.num_tokens()) return "a token on no rank, or on two";
  }
  return "";
}

Divided random_case(uint64_t seed, Sharding sharding = Sharding::kBalanced) {
  Rng rng(test_seed(seed), 0xD171);
  Divided given{.forest = testing::forest_of(synthesize({.num_trees = rng.between(1, 3),
                                                         .depth = rng.between(1, 4),
                                                         .branching = rng.between(1, 3),
                                                         .node_length = rng.between(1, 9),
                                                         .end_inside = rng.uniform(),
                                                         .duplicate = rng.uniform(),
                                                         .seed = test_seed(seed)})),
                .batches = {},
                .ranks = rng.between(2, 6),
                .sharding = sharding};
  given.batches = partition(given.forest, rng.between(1, given.forest.tree_tokens()), Merge::kAll);
  given.divide();
  return given;
}

TEST(KeyReads, EveryQuerySeesItsRootPathOnce) {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    SCOPED_TRACE(seed);
    const Divided given = random_case(seed, seed % 3 == 2 ? Sharding::kContiguous : Sharding::kBalanced);
    for (const int64_t window : {0, 1, 3, 8}) {
      for (const int64_t chunk : {0, 1, 4, 9}) {
        ASSERT_EQ(fault_of(given, window, chunk), "") << window << " " << chunk;
      }
    }
  }
}

// The comparison notices keys that are left out, sent in another order, or seen by others.
TEST(KeyReads, WrongExchangesAreNoticed) {
  int lost = 0, lost_in_chunks = 0, swapped = 0, moved = 0, cases = 0;
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    const Divided given = random_case(seed);
    const auto spoilt = [&](const Spoil& spoil, int64_t chunk = 0) {
      return !fault_of(given, 0, chunk, spoil).empty();
    };
    const auto lose = [](KeyReads* reads) {
      if (reads->positions.empty()) return;
      reads->positions.pop_back();
      reads->blocks.resize(reads->blocks.size() - 5);
    };
    ++cases;
    lost += spoilt(lose);
    lost_in_chunks += spoilt(lose, 9);
    swapped += spoilt([](KeyReads* reads) { std::ranges::reverse(reads->picks.back()); });
    moved += spoilt([](KeyReads* reads) {
      for (size_t b = 4; b < reads->blocks.size(); b += 5) reads->blocks[b] -= 1;
    });
  }
  EXPECT_GT(lost, cases / 3);
  EXPECT_GT(lost_in_chunks, cases / 5);
  EXPECT_GT(swapped, cases / 3);
  EXPECT_GT(moved, cases / 3);
}

// Only keys that a window reaches are sent, and those of chunks that a range begins in.
TEST(KeyReads, AWindowOrAChunkNeedsItsNeighboursAlone) {
  std::vector<int32_t> chain(400);
  std::iota(chain.begin(), chain.end(), 0);
  Csr<int32_t> rows;
  rows.push_row(chain);
  Divided given{.forest = testing::forest_of(rows), .batches = {}, .ranks = 4};
  given.batches = partition(given.forest, 400, Merge::kAll);
  given.divide();
  const DividedMicroBatch divided{given.layouts[0], {}, given.divisions, given.divisions[0], 4};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto received = [&](int64_t window, int64_t chunk) {
      const std::vector<int64_t> counts = key_reads(divided, rank, window, chunk).receive;
      return std::accumulate(counts.begin(), counts.end(), int64_t{0});
    };
    EXPECT_LE(received(5, 0), 4 * 4);
    EXPECT_LE(received(0, 7), 4 * 6);
    EXPECT_LE(received(5, 7), std::min(received(5, 0), received(0, 7)));
    EXPECT_GE(received(0, 0), 100);
  }
}

}  // namespace
}  // namespace espalier
