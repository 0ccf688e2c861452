// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/tree_attention_queries.h"

#include <gtest/gtest.h>

#include "tests/ops/kernels/cuda/attention/attention_case.h"

namespace espalier {
namespace {

using namespace testing;
using cuda::AttentionGrid;
using cuda::BackwardParams;
using cuda::BackwardTiles;
using cuda::QueryGradientTiles;

struct Run {
  bool deterministic = false;
  uint64_t seed = 0;
  cuda::CutRule cuts = {.multiprocessors = 4};
  ListedTiles* tiles = nullptr;
  EmulatedCounts* counts = nullptr;
  int64_t* cut_blocks = nullptr;  // counted
};

/// On such a GPU blocks of small forests are cut.
constexpr cuda::CutRule kFineCuts{.multiprocessors = 3, .least_steps = 1};

/// Inputs and outputs of backward in memory.
template <class Element>
struct Tensors {
  std::vector<cuda::KeySource> sources;
  std::vector<HeadTensor<Element>> grad_k, grad_v;
  std::vector<cuda::KeyGradients> grad_sources;
  HeadTensor<Element> out, grad_q;
  std::vector<float> lse, delta, sums;

  Tensors(AttentionCase<Element>& c, AttentionValues exact, uint64_t seed)
      : out(c.tokens, c.heads, c.dim, seed + 1), grad_q(c.tokens, c.heads, c.dim, seed + 2) {
    lse.resize(c.heads * c.tokens);
    delta.assign(c.heads * c.tokens, NAN);
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        lse[h * c.tokens + t] = static_cast<float>(*exact.lse.row(t, h));
        for (int64_t d = 0; d < c.dim; ++d) {
          const auto value = static_cast<float>(exact.out.row(t, h)[d]);
          out.at(t, h, d) = {simt::emulator::round_to_bits(value, Element{})};
        }
      }
    }
    for (size_t s = 0; s < c.k.size(); ++s) {
      sources.push_back({c.k[s].data(), c.v[s].data()});
      grad_k.emplace_back(c.k[s].tokens, c.key_heads, c.dim, seed + s);
      grad_v.emplace_back(c.k[s].tokens, c.key_heads, c.dim, seed + s + 1);
    }
    for (size_t s = 0; s < c.k.size(); ++s) grad_sources.push_back({grad_k[s].data(), grad_v[s].data()});
  }
};

void launch(const AttentionGrid& grid, int threads, int64_t shared_bytes, const Run& run,
            const std::function<void()>& kernel) {
  const EmulatedCounts counts = emulate({{grid.x, grid.y, grid.z}, threads, shared_bytes, run.seed}, kernel);
  if (run.counts == nullptr) return;
  run.counts->matrix_reads += counts.matrix_reads;
  run.counts->matrix_accesses += counts.matrix_accesses;
}

template <class Element, int kDim, int kStages>
AttentionValues run_backward(AttentionCase<Element>& c, const AttentionValues& exact, const Run& run) {
  using Tiles = BackwardTiles<Element, kDim, kStages>;
  using QueryTiles = QueryGradientTiles<Element, kDim>;
  const auto group = static_cast<int32_t>(c.heads / c.key_heads);
  const cuda::RowPacking packing = cuda::RowPacking::of(group);
  const EmulatedSchedule schedule(c.ends, c.rectangles, cuda::block_sizes<Tiles>(packing), run.seed);
  Tensors<Element> tensors(c, exact, run.seed);
  const auto key_heads = static_cast<int32_t>(c.key_heads);
  const EmulatedParts parts(schedule.schedule,
                            cuda::PartInputs::of(key_heads, key_heads, packing.parts, run.cuts),
                            Tiles::kKeys * kDim, run.seed);
  if (run.cut_blocks != nullptr) *run.cut_blocks += parts.cut_blocks();
  BackwardParams params{schedule.schedule,
                        parts.parts,
                        tensors.sources.data(),
                        tensors.grad_sources.data(),
                        c.q.data(),
                        c.grad_out.data(),
                        tensors.out.data(),
                        tensors.grad_q.data(),
                        tensors.lse.data(),
                        tensors.delta.data(),
                        nullptr,
                        packing,
                        group,
                        static_cast<int32_t>(c.heads),
                        c.scale};
  launch({static_cast<int32_t>(cuda::delta_grid<kDim>(c.tokens, c.heads)), 1, 1}, cuda::kDeltaThreads, 0, run,
         [&] { cuda::attention_delta<Element, kDim>(params); });
  if (!run.deterministic) {
    tensors.sums.assign(cuda::num_sums<Tiles>(schedule.schedule, packing, params.num_heads), 0.0F);
    params.sums = tensors.sums.data();
  }
  launch(cuda::parts_grid(params), Tiles::kThreads, Tiles::kSharedBytes, run,
         [&] { cuda::attend_keys<Tiles>(params); });
  launch(cuda::join_grid(params), Tiles::kThreads, cuda::kJoinSharedBytes<Tiles>, run,
         [&] { cuda::join_keys<Tiles>(params); });
  if (run.tiles != nullptr) run.tiles->count(schedule.schedule);
  if (run.deterministic) {
    const EmulatedSchedule by_query(c.ends, c.rectangles, cuda::block_sizes<QueryTiles>(packing), run.seed);
    params.schedule = by_query.schedule;
    launch(cuda::queries_grid(params), QueryTiles::kThreads, QueryTiles::kSharedBytes, run,
           [&] { cuda::attend_queries<QueryTiles>(params); });
  } else {
    launch(cuda::sums_grid(params), Tiles::kThreads, cuda::kSumsSharedBytes<Tiles>, run,
           [&] { cuda::sums_to_queries<Tiles>(params); });
  }
  AttentionValues result;
  result.grad_q = values(tensors.grad_q);
  for (size_t s = 0; s < c.k.size(); ++s) {
    result.grad_k.push_back(values(tensors.grad_k[s]));
    result.grad_v.push_back(values(tensors.grad_v[s]));
  }
  return result;
}

/// Of keys [begin, end) alone.
Values keys_of(const Values& all, int64_t begin, int64_t end) {
  Values part = all;
  const int64_t row = all.heads * all.dim;
  part.numbers.assign(all.numbers.begin() + begin * row, all.numbers.begin() + end * row);
  return part;
}

/// Keys of a source that the context's rectangle names.
template <class Element>
std::pair<int64_t, int64_t> named_keys(const AttentionCase<Element>& c, size_t source) {
  for (const ContextRectangle& r : c.rectangles) {
    if (1 + r.segment == static_cast<int32_t>(source)) return {r.key_begin, r.key_end};
  }
  return {0, 0};
}

template <class Element>
double backward_ratio(const AttentionCase<Element>& c, const AttentionValues& got,
                      const AttentionValues& exact) {
  const auto dense = dense_attention<float, true>(c);
  const double roundoff = unit_roundoff<Element>();
  double ratio = error_ratio(got.grad_q, dense.grad_q, exact.grad_q, roundoff);
  const auto compare = [&](size_t s, int64_t begin, int64_t end) {
    for (const auto list : {&AttentionValues::grad_k, &AttentionValues::grad_v}) {
      const auto part = [&](const AttentionValues& values) { return keys_of((values.*list)[s], begin, end); };
      ratio = std::max(ratio, error_ratio(part(got), part(dense), part(exact), roundoff));
    }
  };
  compare(0, 0, c.tokens);
  for (const ContextRectangle& r : c.rectangles) compare(1 + r.segment, r.key_begin, r.key_end);
  return ratio;
}

template <class Element_, int kDim_, int kStages_>
struct Kernel {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kStages = kStages_;
};
template <class Kernel>
class TreeAttentionBackwardTest : public ::testing::Test {};
using Kernels = ::testing::Types<Kernel<BFloat16, 64, 2>, Kernel<Float16, 64, 2>, Kernel<BFloat16, 128, 2>,
                                 Kernel<Float16, 128, 2>, Kernel<BFloat16, 256, 2>, Kernel<Float16, 256, 1>>;
TYPED_TEST_SUITE(TreeAttentionBackwardTest, Kernels);

TYPED_TEST(TreeAttentionBackwardTest, MatchesDenseOnRandomForests) {
  using Element = typename TypeParam::Element;
  constexpr int kDim = TypeParam::kDim;
  ListedTiles tiles;
  int64_t cut_blocks = 0;
  const int groups[] = {1, 2, 4, 7, 9};  // of the last three heads at a time
  const uint64_t seeds = std::is_same_v<Element, BFloat16> && !kIsSanitized ? 14 : 7;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const int group = groups[seed % 5];
    CaseOptions options{.head_dim = kDim, .key_heads = seed % 4 == 0 ? 2 : 1, .group = group};
    options.ends = random_ends(seed, 12, seed % 2 == 0 ? 10 : 36 / group + 6);
    options.num_rectangles = static_cast<int>(seed % 3);
    AttentionCase<Element> c(options, seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(c.tokens) + " tokens");
    EmulatedCounts counts;
    const AttentionValues exact = dense_attention<double, false>(c);
    Run run{.deterministic = seed / 3 % 2 == 1, .seed = seed, .tiles = &tiles, .counts = &counts};
    run.cut_blocks = &cut_blocks;
    if (seed % 2 == 1) run.cuts = kFineCuts;
    const AttentionValues got = run_backward<Element, kDim, TypeParam::kStages>(c, exact, run);
    EXPECT_LE(backward_ratio(c, got, exact), 2);
    EXPECT_EQ(counts.matrix_accesses, counts.matrix_reads) << "bank conflicts";
  }
  EXPECT_TRUE(tiles.all_hit());
  EXPECT_GT(cut_blocks, 0);
}

TYPED_TEST(TreeAttentionBackwardTest, MatchesDenseAroundBlockSizes) {
  using Element = typename TypeParam::Element;
  for (const int tokens : {1, 63, 64, 65, 127, 129, 200}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    AttentionCase<Element> c({.head_dim = TypeParam::kDim, .ends = std::vector<int32_t>(tokens, tokens)},
                             tokens);
    const AttentionValues exact = dense_attention<double, false>(c);
    const AttentionValues got = run_backward<Element, TypeParam::kDim, TypeParam::kStages>(
        c, exact, {.deterministic = tokens % 2 == 0, .seed = 1});
    EXPECT_LE(backward_ratio(c, got, exact), 2);
  }
}

TEST(TreeAttentionBackwardOrder, NeighboursLeaveABranchBitwiseAsItWas) {
  Neighbours<BFloat16> c({.head_dim = 64, .group = 2});
  const auto run = [](auto& given) {
    return run_backward<BFloat16, 64, 2>(given, dense_attention<double, false>(given),
                                         {.deterministic = true, .seed = 4});
  };
  const AttentionValues before = run(c.before), after = run(c.after);
  EXPECT_TRUE(c.left_alone(before.grad_q, after.grad_q));
  EXPECT_TRUE(c.left_alone(before.grad_k[0], after.grad_k[0]));
  EXPECT_TRUE(c.left_alone(before.grad_v[0], after.grad_v[0]));
}

TEST(TreeAttentionBackwardOrder, DeterministicGradientsAreTheSameBits) {
  AttentionCase<BFloat16> c({.head_dim = 64, .group = 2, .ends = random_ends(6, 12, 20), .num_rectangles = 2},
                            6);
  const AttentionValues exact = dense_attention<double, false>(c);
  const auto run = [&](bool deterministic, uint64_t seed) {
    return run_backward<BFloat16, 64, 2>(c, exact,
                                         {.deterministic = deterministic, .seed = seed, .cuts = kFineCuts});
  };
  const AttentionValues first = run(true, 1);
  for (uint64_t seed = 2; seed < 5; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const AttentionValues again = run(true, seed), atomic = run(false, seed);
    EXPECT_EQ(again.grad_q.numbers, first.grad_q.numbers);
    for (size_t s = 0; s < first.grad_k.size(); ++s) {
      const std::pair<int64_t, int64_t> keys =
          s == 0 ? std::pair<int64_t, int64_t>(0, c.tokens) : named_keys(c, s);
      for (const auto list : {&AttentionValues::grad_k, &AttentionValues::grad_v}) {
        const auto bits = [&](const AttentionValues& values) {
          return keys_of((values.*list)[s], keys.first, keys.second).numbers;
        };
        EXPECT_EQ(bits(again), bits(first));
        EXPECT_EQ(bits(atomic), bits(first)) << "atomics are for dQ alone";
      }
    }
  }
}

TEST(TreeAttentionBackwardOrder, NegativeControlIsNoticed) {
  for (const bool deterministic : {false, true}) {
    AttentionCase<BFloat16> c({.head_dim = 64, .ends = {9, 6, 6, 4, 6, 6, 9, 8, 9}}, 1);
    const AttentionValues exact = dense_attention<double, false>(c);
    AttentionCase<BFloat16> wrong = c;
    wrong.ends[3] = 5;  // token 4 sees token 3 too
    const AttentionValues got = run_backward<BFloat16, 64, 2>(wrong, exact, {.deterministic = deterministic});
    EXPECT_GT(backward_ratio(c, got, exact), 4);
  }
}

}  // namespace
}  // namespace espalier
