// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "espalier/ops/kernels/cuda/attention/hopper_attention_host.h"
#include "tests/ops/kernels/cuda/attention/attention_case.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using namespace testing;
namespace hopper = cuda::hopper;
using hopper::BackwardParams;
using hopper::ForwardParams;
using hopper::HeadPacking;

/// A GPU whose cache has room for everything, and on which no key block of these tests is cut.
hopper::Target large_gpu() {
  return {
      {.compute_capability = 90, .multiprocessors = 8, .shared_bytes = 227 << 10, .cache_bytes = 50 << 20},
      {8}};
}
/// One on which key blocks are cut, and the cache has room for some heads.
hopper::Target small_gpu() {
  return {{90, 12, 227 << 10, 200000}, {.multiprocessors = 12, .least_steps = 1}};
}

/// Runs in the emulator what the host's side launches; `change` may spoil what kernels are given.
struct EmulatedLauncher {
  uint64_t seed;
  ListedTiles* listed = nullptr;
  std::function<void(ForwardParams&)> change_forward = [](ForwardParams&) {};
  std::function<void(BackwardParams&)> change_backward = [](BackwardParams&) {};
  bool deterministic = false;
  std::function<void(hopper::QueryGradientParams&)> change_queries = [](hopper::QueryGradientParams&) {};
  hopper::Target gpu = large_gpu();
  int64_t* cut_blocks = nullptr;  // counted
  int calls = 1;

  hopper::Target target() const { return gpu; }
  void schedule(const cuda::TileSchedule& schedule) const {
    const cuda::ScheduleInputs& inputs = schedule.inputs;
    const auto run = [&](int32_t warps, void (*kernel)(const cuda::TileSchedule&)) {
      emulate({{cuda::schedule_grid(warps), 1, 1}, cuda::kScheduleThreads, 0, seed},
              [&] { kernel(schedule); });
    };
    const int32_t blocks = inputs.num_key_blocks() + inputs.num_query_blocks();
    run(inputs.num_forest_blocks() + inputs.num_rectangles, &cuda::list_key_blocks);
    run(blocks, &cuda::link_blocks);
    run(inputs.num_query_blocks(), &cuda::order_blocks);
    if (listed != nullptr) listed->count(schedule);
  }
  void order_parts(const cuda::TileSchedule& schedule, const cuda::KeyParts& parts) const {
    emulate({{cuda::schedule_grid(cuda::part_warps(schedule)), 1, 1}, cuda::kScheduleThreads, 0, seed},
            [&] { cuda::order_parts(schedule, parts); });
    if (cut_blocks == nullptr) return;
    *cut_blocks += std::count_if(parts.cuts, parts.cuts + schedule.inputs.num_key_blocks(),
                                 [](const cuda::KeyCut& cut) { return cut.parts > 1; });
  }
  void place_keys(const hopper::PlaceParams& params) const {
    emulate({{params.schedule.inputs.num_key_blocks(), 1, 1}, 32, 0, seed},
            [&] { hopper::place_keys(params); });
  }
  static void write_maps(const std::vector<simt::TensorMap>& maps, simt::TensorMap* to) {
    std::copy(maps.begin(), maps.end(), to);
  }
  template <class Element, int kDim>
  void forward(ForwardParams params) const {
    change_forward(params);
    emulate(
        {{params.workers, 1, 1}, hopper::kThreads, hopper::ForwardTiles<Element, kDim>::kSharedBytes, seed},
        [&] { hopper::forward_tile<Element, kDim>(params); });
    EXPECT_EQ(params.taken->taken, 0);
    EXPECT_EQ(params.taken->finished, 0);
  }
  template <class Element, int kDim>
  void backward(BackwardParams params) const {
    change_backward(params);
    const hopper::Grid tiles = hopper::tile_grid(params), parts = hopper::part_grid(params);
    const hopper::Grid cuts = hopper::cut_grid(params);
    emulate({{tiles.x, tiles.y, 1}, hopper::kRowThreads, 0, seed},
            [&] { hopper::prepare_backward<Element, kDim>(params); });
    const bool adds_queries = params.grad_q != nullptr;
    emulate(
        {{parts.x, parts.y, 1}, hopper::kThreads, hopper::BackwardTiles<Element, kDim>::kSharedBytes, seed},
        [&] {
          adds_queries ? hopper::backward_keys<Element, kDim, true>(params)
                       : hopper::backward_keys<Element, kDim, false>(params);
        });
    emulate({{cuts.x, cuts.y, 1}, hopper::kConsumers, 0, seed},
            [&] { hopper::join_key_gradients<Element, kDim>(params); });
    if (!adds_queries) return;
    emulate({{tiles.x, tiles.y, 1}, hopper::kConsumers, 0, seed},
            [&] { hopper::finish_grad_q<Element, kDim>(params); });
  }
  template <class Element, int kDim>
  void queries(hopper::QueryGradientParams params) const {
    change_queries(params);
    emulate({{params.order.blocks(), 1, 1},
             hopper::kThreads,
             hopper::QueryGradientTiles<Element, kDim>::kSharedBytes,
             seed},
            [&] { hopper::backward_queries<Element, kDim>(params); });
  }
};

/// A problem as callers fill it in.
template <class Element>
struct HopperCase {
  std::vector<cuda::KeySource> sources;
  cuda::AttentionProblem problem{};

  explicit HopperCase(AttentionCase<Element>& c) {
    constexpr bool kBFloat16 = std::is_same_v<Element, BFloat16>;
    problem.element = kBFloat16 ? cuda::ElementKind::kBFloat16 : cuda::ElementKind::kFloat16;
    problem.num_tokens = static_cast<int32_t>(c.tokens);
    problem.num_heads = static_cast<int32_t>(c.heads);
    problem.num_key_heads = static_cast<int32_t>(c.key_heads);
    problem.head_dim = static_cast<int32_t>(c.dim);
    problem.softmax_scale = c.scale;
    problem.subtree_end = c.ends.data();
    problem.q = c.q.data();
    for (size_t s = 0; s < c.k.size(); ++s) sources.push_back({c.k[s].data(), c.v[s].data()});
    problem.sources = problem.host_sources = sources.data();
    problem.rectangles = problem.host_rectangles = c.rectangles.data();
    problem.num_rectangles = static_cast<int32_t>(c.rectangles.size());
  }
};

/// Of exactly so many bytes, aligned to 256, full of NaN.
struct ScratchMemory {
  std::unique_ptr<void, void (*)(void*)> memory;

  explicit ScratchMemory(int64_t bytes) : memory(std::aligned_alloc(256, bytes), &std::free) {
    std::memset(memory.get(), 0xff, bytes);
  }
};

/// Calls `call` with scratch memory so many times, of which all but the first one find schedules.
template <class Call>
void repeat(cuda::AttentionProblem& problem, const cuda::AttentionMemory& needed, int calls,
            const Call& call) {
  const ScratchMemory schedules(needed.schedules);
  problem.schedules = schedules.memory.get();
  for (int i = 0; i < calls; ++i) {
    const ScratchMemory scratch(needed.scratch);
    problem.scheduled = i > 0;
    call(scratch.memory.get());
  }
}

/// Gradients of the kernels.
template <class Element>
AttentionValues run_backward(AttentionCase<Element>& c, AttentionValues& exact, EmulatedLauncher launcher) {
  HopperCase<Element> at(c);
  at.problem.deterministic = launcher.deterministic;
  const uint64_t seed = launcher.seed;
  HeadTensor<Element> out(c.tokens, c.heads, c.dim, seed), grad_q(c.tokens, c.heads, c.dim, seed + 1);
  std::vector<float> lse(c.heads * c.tokens);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t d = 0; d < c.dim; ++d) {
        const auto value = static_cast<float>(exact.out.row(t, h)[d]);
        out.at(t, h, d) = {simt::emulator::round_to_bits(value, Element{})};
      }
      lse[h * c.tokens + t] = static_cast<float>(exact.lse.row(t, h)[0]);
    }
  }
  std::vector<HeadTensor<Element>> grad_k, grad_v;
  std::vector<cuda::KeyGradients> gradients;
  for (size_t s = 0; s < c.k.size(); ++s) {
    grad_k.emplace_back(c.k[s].tokens, c.key_heads, c.dim, seed + s);
    grad_v.emplace_back(c.k[s].tokens, c.key_heads, c.dim, seed + s + 1);
  }
  for (size_t s = 0; s < c.k.size(); ++s) gradients.push_back({grad_k[s].data(), grad_v[s].data()});
  const cuda::AttentionGradients pointers{c.grad_out.data(), out.data(), lse.data(), grad_q.data(),
                                          gradients.data()};
  repeat(at.problem, hopper::backward_memory(at.problem, launcher.target()), launcher.calls,
         [&](void* scratch) { hopper::attend_backward(at.problem, pointers, scratch, launcher); });
  AttentionValues result;
  result.grad_q = values(grad_q);
  for (size_t s = 0; s < c.k.size(); ++s) {
    result.grad_k.push_back(values(grad_k[s]));
    result.grad_v.push_back(values(grad_v[s]));
  }
  return result;
}

/// Output and lse of the kernel.
template <class Element>
AttentionValues run_forward(AttentionCase<Element>& c, EmulatedLauncher launcher) {
  HopperCase<Element> at(c);
  HeadTensor<Element> out(c.tokens, c.heads, c.dim, launcher.seed);
  std::vector<float> lse(c.heads * c.tokens, NAN);
  repeat(at.problem, hopper::forward_memory(at.problem, launcher.target()), launcher.calls,
         [&](void* scratch) { hopper::attend(at.problem, {out.data(), lse.data()}, scratch, launcher); });
  AttentionValues result;
  result.out = values(out);
  result.lse = Values(c.tokens, c.heads, 1);
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) *result.lse.row(t, h) = lse[h * c.tokens + t];
  }
  return result;
}

/// Of the named keys alone; whatever else a kernel has written would be no NaN any more.
template <class Element>
double gradient_ratio(const AttentionCase<Element>& c, AttentionValues& got, AttentionValues& dense,
                      AttentionValues& exact) {
  const double roundoff = unit_roundoff<Element>();
  double worst = error_ratio(got.grad_q, dense.grad_q, exact.grad_q, roundoff);
  const auto judge = [&](size_t s, Values& a, Values& b, Values& e, int64_t begin, int64_t end) {
    for (int64_t t = 0; t < c.k[s].tokens; ++t) {
      if (begin <= t && t < end) continue;
      for (int64_t i = 0; i < c.key_heads * c.dim; ++i) {
        EXPECT_TRUE(std::isnan(a.row(t, 0)[i])) << "written, and not to be";
      }
    }
    const auto part = [&](Values& all) {
      Values some(end - begin, c.key_heads, c.dim);
      std::copy(all.row(begin, 0), all.row(end, 0), some.numbers.begin());
      return some;
    };
    worst = std::max(worst, error_ratio(part(a), part(b), part(e), roundoff));
  };
  const auto both = [&](size_t s, int64_t begin, int64_t end) {
    judge(s, got.grad_k[s], dense.grad_k[s], exact.grad_k[s], begin, end);
    judge(s, got.grad_v[s], dense.grad_v[s], exact.grad_v[s], begin, end);
  };
  both(0, 0, c.tokens);
  for (const ContextRectangle& r : c.rectangles) both(1 + r.segment, r.key_begin, r.key_end);
  return worst;
}

template <class Element_, int kDim_>
struct Kernel {
  using Element = Element_;
  static constexpr int kDim = kDim_;
};

using Kernels = ::testing::Types<Kernel<BFloat16, 64>, Kernel<Float16, 64>, Kernel<BFloat16, 128>,
                                 Kernel<Float16, 128>, Kernel<BFloat16, 256>, Kernel<Float16, 256>>;
using Details = ::testing::Types<Kernel<BFloat16, 64>, Kernel<BFloat16, 128>, Kernel<BFloat16, 256>>;

/// What kernels are judged by.
struct Reference {
  AttentionValues exact, dense;

  template <class Element>
  explicit Reference(const AttentionCase<Element>& c)
      : exact(dense_attention<double, false>(c)), dense(dense_attention<float, true>(c)) {}
};

template <class Kernel>
class HopperBackwardTest : public ::testing::Test {
 public:
  using Element = typename Kernel::Element;
  static constexpr bool kCutsKeys = true;

  static double ratio(AttentionCase<Element>& c, Reference& by, const EmulatedLauncher& launcher) {
    auto got = run_backward(c, by.exact, launcher);
    return gradient_ratio(c, got, by.dense, by.exact);
  }
};
TYPED_TEST_SUITE(HopperBackwardTest, Kernels);

/// What does not depend on the element.
template <class Kernel>
class HopperBackwardDetailTest : public HopperBackwardTest<Kernel> {};
TYPED_TEST_SUITE(HopperBackwardDetailTest, Details);

template <class Kernel>
class HopperForwardTest : public ::testing::Test {
 public:
  using Element = typename Kernel::Element;
  static constexpr bool kCutsKeys = false;

  static double ratio(AttentionCase<Element>& c, Reference& by, const EmulatedLauncher& launcher) {
    const auto got = run_forward(c, launcher);
    return std::max(error_ratio(got.out, by.dense.out, by.exact.out, unit_roundoff<Element>()),
                    error_ratio(got.lse, by.dense.lse, by.exact.lse, kFloat32Roundoff));
  }
};
TYPED_TEST_SUITE(HopperForwardTest, Kernels);

/// What does not depend on the element.
template <class Kernel>
class HopperForwardDetailTest : public HopperForwardTest<Kernel> {};
TYPED_TEST_SUITE(HopperForwardDetailTest, Details);

/// Test: a fixture of forward or of backward.
template <class Test, class Kernel>
void expect_dense_on_random_forests() {
  using Element = typename Kernel::Element;
  ListedTiles listed;
  int64_t cut_blocks = 0;
  const int groups[] = {1, 2, 4, 6};
  for (uint64_t seed = 0; seed < 7; ++seed) {
    const int group = groups[seed % 4];
    CaseOptions options{.head_dim = Kernel::kDim, .key_heads = seed % 5 == 1 ? 2 : 1, .group = group};
    options.ends = random_ends(seed, 12, 60 / group + 8);
    options.num_rectangles = static_cast<int>(seed % 3);
    options.max_context_keys = 200;
    AttentionCase<Element> c(options, seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(c.tokens) + " tokens");
    Reference by(c);
    EmulatedLauncher launcher{.seed = seed, .listed = &listed, .cut_blocks = &cut_blocks};
    if (seed % 3 != 0) launcher.gpu = small_gpu();
    EXPECT_LE(Test::ratio(c, by, launcher), 2);
  }
  EXPECT_TRUE(listed.all_hit());
  EXPECT_EQ(cut_blocks > 0, Test::kCutsKeys);
}

template <class Test, class Kernel>
void expect_dense_around_block_sizes() {
  using Element = typename Kernel::Element;
  for (const int tokens : {1, 127, 129, 256}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens");
    AttentionCase<Element> c({.head_dim = Kernel::kDim, .ends = std::vector<int32_t>(tokens, tokens)},
                             tokens);
    Reference by(c);
    EXPECT_LE(Test::ratio(c, by, {1}), 2);
  }
}

TYPED_TEST(HopperForwardTest, MatchesDenseOnRandomForests) {
  expect_dense_on_random_forests<TestFixture, TypeParam>();
}
TYPED_TEST(HopperForwardDetailTest, MatchesDenseAroundBlockSizes) {
  expect_dense_around_block_sizes<TestFixture, TypeParam>();
}
TYPED_TEST(HopperBackwardTest, MatchesDenseOnRandomForests) {
  expect_dense_on_random_forests<TestFixture, TypeParam>();
}
TYPED_TEST(HopperBackwardDetailTest, MatchesDenseAroundBlockSizes) {
  expect_dense_around_block_sizes<TestFixture, TypeParam>();
}

/// One tree of several keys and queries blocks, with context: what every spoiled kernel below must fail on.
template <class Element>
AttentionCase<Element> case_of_all_classes(int dim) {
  std::mt19937_64 random(testing::test_seed(11));
  CaseOptions options{.head_dim = dim, .group = 2, .num_rectangles = 2, .max_context_keys = 150};
  while (options.ends.size() < 160) options.ends = random_subtree_end(random, ForestShape::kWide, 9, 50);
  return AttentionCase<Element>(options, 5);
}

/// Every query sees all keys of the first block: so says its schedule then.
template <class Params>
void mark_as_full(Params& params, int64_t tokens) {
  params.schedule.key_blocks[0].block.full_begin = 0;
  params.schedule.key_blocks[0].block.full_end = static_cast<int32_t>(tokens);
}

/// A key that some later queries do not see.
size_t key_with_end(const std::vector<int32_t>& ends) {
  return std::find_if(ends.begin(), ends.end(), [&](int32_t end) { return end < std::ssize(ends); }) -
         ends.begin();
}

TYPED_TEST(HopperForwardDetailTest, ManyInterleavings) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  for (uint64_t seed = 100; seed < 103; ++seed) EXPECT_LE(TestFixture::ratio(c, by, {seed}), 2) << seed;
}

TYPED_TEST(HopperForwardDetailTest, NegativeControlsAreNoticed) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  const auto ratio = [&](const std::function<void(ForwardParams&)>& change) {
    return TestFixture::ratio(c, by, {.seed = 1, .change_forward = change});
  };
  const size_t key = key_with_end(c.ends);
  EXPECT_GT(ratio([&](ForwardParams& p) { ++const_cast<int32_t*>(p.ends)[key]; }), 2);
  EXPECT_GT(ratio([](ForwardParams& p) { ++const_cast<hopper::KeyPlace*>(p.places)->token; }), 2);
  EXPECT_GT(ratio([&](ForwardParams& p) { mark_as_full(p, c.tokens); }), 2);
  EXPECT_GT(ratio([](ForwardParams& p) { std::swap(p.keys.k, p.keys.v); }), 2);
  EXPECT_GT(ratio([](ForwardParams& p) { p.problem.softmax_scale *= 1.05F; }), 2);
}

/// The bits of all gradients, as numbers.
std::vector<double> all_numbers(const AttentionValues& values) {
  std::vector<double> all = values.grad_q.numbers;
  for (const auto* list : {&values.grad_k, &values.grad_v}) {
    for (const Values& gradient : *list)
      all.insert(all.end(), gradient.numbers.begin(), gradient.numbers.end());
  }
  for (double& number : all) number = std::isnan(number) ? 1e30 : number;  // so that it equals itself
  return all;
}

TYPED_TEST(HopperBackwardDetailTest, ManyInterleavings) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  for (uint64_t seed = 100; seed < 103; ++seed) {
    EXPECT_LE(TestFixture::ratio(c, by, {.seed = seed, .gpu = small_gpu()}), 2) << seed;
  }
}

TYPED_TEST(HopperBackwardDetailTest, LaterCallsFindTheirSchedules) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  int64_t counted = 0;
  const EmulatedLauncher launcher{
      .seed = 3, .deterministic = true, .gpu = small_gpu(), .cut_blocks = &counted, .calls = 2};
  auto got = run_backward(c, by.exact, launcher);
  got.out = run_forward(c, launcher).out;
  EXPECT_LE(gradient_ratio(c, got, by.dense, by.exact), 2);
  EXPECT_LE(error_ratio(got.out, by.dense.out, by.exact.out, unit_roundoff<typename TypeParam::Element>()),
            2);
  const int64_t of_two_calls = std::exchange(counted, 0);
  EmulatedLauncher once = launcher;
  once.calls = 1;
  run_backward(c, by.exact, once);
  EXPECT_GT(counted, 0);
  EXPECT_EQ(of_two_calls, counted) << "parts were ordered again";
}

TYPED_TEST(HopperBackwardDetailTest, KeyGradientsOfCutBlocksHaveTheSameBits) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  const auto bits = [&](uint64_t seed) {
    AttentionValues got = run_backward(c, by.exact, {.seed = seed, .gpu = small_gpu()});
    got.grad_q.numbers.clear();
    return all_numbers(got);
  };
  EXPECT_EQ(bits(1), bits(2));
}

TYPED_TEST(HopperBackwardDetailTest, DeterministicGivesTheSameBits) {
  using Element = typename TypeParam::Element;
  for (const int group : {1, 4, 6}) {
    const hopper::Target gpu = group == 4 ? small_gpu() : large_gpu();
    CaseOptions options{
        .head_dim = TypeParam::kDim, .group = group, .num_rectangles = 2, .max_context_keys = 200};
    options.ends = random_ends(group, 12, 240 / group + 8);
    AttentionCase<Element> c(options, group);
    SCOPED_TRACE("group " + std::to_string(group) + ", " + std::to_string(c.tokens) + " tokens");
    Reference by(c);
    auto got = run_backward(c, by.exact, {.seed = 1, .deterministic = true, .gpu = gpu});
    EXPECT_LE(gradient_ratio(c, got, by.dense, by.exact), 2);
    EXPECT_EQ(all_numbers(got),
              all_numbers(run_backward(c, by.exact, {.seed = 2, .deterministic = true, .gpu = gpu})));
    const auto spoil = [](hopper::QueryGradientParams& p) {
      ++const_cast<hopper::KeyPlace*>(p.places)->token;
    };
    auto wrong =
        run_backward(c, by.exact, {.seed = 1, .deterministic = true, .change_queries = spoil, .gpu = gpu});
    EXPECT_GT(gradient_ratio(c, wrong, by.dense, by.exact), 2);
  }
}

TYPED_TEST(HopperBackwardDetailTest, NeighboursLeaveABranchBitwiseAsItWas) {
  Neighbours<typename TypeParam::Element> c({.head_dim = TypeParam::kDim, .group = 2});
  const auto run = [](auto& given) {
    const EmulatedLauncher launcher{.seed = 4, .deterministic = true};
    auto exact = dense_attention<double, false>(given);
    AttentionValues all = run_backward(given, exact, launcher);
    all.out = run_forward(given, launcher).out;
    return all;
  };
  const AttentionValues before = run(c.before), after = run(c.after);
  EXPECT_TRUE(c.left_alone(before.out, after.out));
  EXPECT_TRUE(c.left_alone(before.grad_q, after.grad_q));
  EXPECT_TRUE(c.left_alone(before.grad_k[0], after.grad_k[0]));
  EXPECT_TRUE(c.left_alone(before.grad_v[0], after.grad_v[0]));
}

TYPED_TEST(HopperBackwardDetailTest, NegativeControlsAreNoticed) {
  auto c = case_of_all_classes<typename TypeParam::Element>(TypeParam::kDim);
  Reference by(c);
  const auto ratio = [&](const std::function<void(BackwardParams&)>& change) {
    return TestFixture::ratio(c, by, {.seed = 1, .change_backward = change, .gpu = small_gpu()});
  };
  std::vector<int32_t> ends(c.tokens, static_cast<int32_t>(c.tokens));  // as of a chain
  EXPECT_GT(ratio([&](BackwardParams& p) { p.problem.subtree_end = ends.data(); }), 2);
  EXPECT_GT(ratio([](BackwardParams& p) { ++const_cast<hopper::KeyPlace*>(p.places)->token; }), 2);
  EXPECT_GT(ratio([&](BackwardParams& p) { mark_as_full(p, c.tokens); }), 2);
  EXPECT_GT(ratio([](BackwardParams& p) { std::swap(p.keys.k, p.keys.v); }), 2);
  std::vector<float> lse(c.heads * c.tokens, 3.0F);
  EXPECT_GT(ratio([&](BackwardParams& p) { p.gradients.lse = lse.data(); }), 2);
  // The steps of a cut block's first part twice, and another's not at all.
  EXPECT_GT(ratio([](BackwardParams& p) {
              cuda::KeyPart* part = p.parts.order;
              while (part->part == 0) ++part;
              part->part = 0;
            }),
            2);
}

}  // namespace
}  // namespace espalier
