// SPDX-License-Identifier: Apache-2.0
// The CPU's attention kernels by several threads, which take turns by atomics: bitwise identical as by one
// thread, and the right ones. The thread sanitizer runs these tests too (make tsan).
#include "espalier/ops/kernels/cpu/attention/tree_attention.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/ops/kernels/cpu/run_in_threads.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::instruction_sets_of_this_machine;
using testing::make_scratch;
using testing::run_in_threads;
using testing::test_seed;

// Small tiles and blocks, so that many tiles wait for each other.
constexpr BlockSizes kSizes{8, 8};
constexpr int64_t kHeads = 4, kKeyHeads = 2, kHeadDim = 16;
constexpr double kScale = 0.25;

template <class Scalar>
void multiply_plainly(const MatrixProduct<Scalar>& p) {
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      Scalar sum = p.add ? p.c[i * p.ldc + j] : Scalar(0);
      for (int64_t l = 0; l < p.k; ++l) {
        sum += (p.transpose_a ? p.a[l * p.lda + i] : p.a[i * p.lda + l]) * p.b[l * p.ldb + j];
      }
      p.c[i * p.ldc + j] = sum;
    }
  }
}

template <class Element>
Element element_of(double x) {
  if constexpr (std::is_same_v<Element, BFloat16>) {
    return {static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16)};
  } else {
    return static_cast<Element>(x);
  }
}

/// Tensors [tokens, heads, kHeadDim] without gaps.
template <class Element>
TokenHeads<Element> view(std::vector<std::remove_const_t<Element>>& data, int64_t heads) {
  return {data.data(), heads * kHeadDim, kHeadDim};
}

template <class Element>
struct Problem {
  std::vector<int32_t> ends;
  std::vector<ContextRectangle> context;
  Schedule schedule;
  std::vector<Element> q, grad_out;
  std::vector<std::vector<Element>> k, v;  // of the forest, then of two context segments

  explicit Problem(uint64_t seed) {
    std::mt19937_64 random(test_seed(seed));
    const auto shape = static_cast<testing::ForestShape>(seed % testing::kNumForestShapes);
    ends = testing::random_subtree_end(random, shape, 30, shape == testing::ForestShape::kChain ? 60 : 8);
    const auto tokens = static_cast<int32_t>(ends.size());
    context = {{0, 2, 12, 0, tokens}, {1, 0, 9, tokens / 2, tokens}};
    schedule = make_schedule(ends, context, kSizes);
    const auto numbers = [&](int64_t rows, int64_t heads) {
      std::vector<Element> made(rows * heads * kHeadDim);
      for (Element& x : made) x = element_of<Element>(std::normal_distribution<double>()(random));
      return made;
    };
    q = numbers(tokens, kHeads);
    grad_out = numbers(tokens, kHeads);
    for (const int64_t rows : {tokens, 12, 9}) {
      k.push_back(numbers(rows, kKeyHeads));
      v.push_back(numbers(rows, kKeyHeads));
    }
  }
  int64_t tokens() const { return static_cast<int64_t>(ends.size()); }

  bool sees(int64_t query, size_t segment, int64_t key) const {
    if (segment == 0) return testing::visible(ends, query, key);
    const ContextRectangle& r = context[segment - 1];
    return r.key_begin <= key && key < r.key_end && r.query_begin <= query && query < r.query_end;
  }
};

template <class Element>
struct Results {
  using Scalar = AccumulatorOf<Element>;
  std::vector<Element> out, grad_q;
  std::vector<Scalar> lse;
  std::vector<std::vector<Scalar>> grad_k, grad_v;

  std::string bits() const {
    std::string all;
    const auto append = [&](const auto& v) {
      all.append(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(v[0]));
    };
    append(out), append(lse), append(grad_q);
    for (const auto& each : grad_k) append(each);
    for (const auto& each : grad_v) append(each);
    return all;
  }
};

template <class Element>
std::vector<TokenHeads<Element>> views(std::vector<std::vector<std::remove_const_t<Element>>>& tensors) {
  std::vector<TokenHeads<Element>> all;
  for (auto& tensor : tensors) all.push_back(view<Element>(tensor, kKeyHeads));
  return all;
}

/// Forward and backward pass.
template <class Element>
Results<Element> attend_in_threads(Problem<Element>& problem, TileProducts products, InstructionSet isa,
                                   int threads) {
  using Scalar = AccumulatorOf<Element>;
  Results<Element> results;
  results.out.resize(problem.q.size());
  results.grad_q.resize(problem.q.size());
  results.lse.resize(problem.tokens() * kHeads);
  for (const auto& keys : problem.k) {
    results.grad_k.emplace_back(keys.size());
    results.grad_v.emplace_back(keys.size());
  }
  const AttentionShape shape{problem.tokens(), kHeads, kKeyHeads, kHeadDim, kHeadDim};
  const auto k = views<const Element>(problem.k), v = views<const Element>(problem.v);
  const AttentionInputs<Element> inputs{shape,
                                        kScale,
                                        problem.ends.data(),
                                        &problem.schedule,
                                        view<const Element>(problem.q, kHeads),
                                        k,
                                        v,
                                        products,
                                        &multiply_plainly<Scalar>,
                                        isa};
  std::atomic<int64_t> next_task{0};
  run_in_threads(threads, [&](int) {
    const auto scratch = make_scratch<Scalar>(forward_scratch(shape, kSizes, products));
    attend(inputs, {view<Element>(results.out, kHeads), results.lse.data()}, scratch.get(), next_task);
  });
  std::vector<std::atomic<int32_t>> turns(kKeyHeads * problem.schedule.key_blocks.size());
  const auto grad_k = views<Scalar>(results.grad_k), grad_v = views<Scalar>(results.grad_v);
  const AttentionGradients<Element> gradients{view<const Element>(problem.grad_out, kHeads),
                                              view<const Element>(results.out, kHeads),
                                              results.lse.data(),
                                              view<Element>(results.grad_q, kHeads),
                                              grad_k,
                                              grad_v,
                                              turns.data()};
  next_task = 0;
  run_in_threads(threads, [&](int) {
    const auto scratch = make_scratch<Scalar>(backward_scratch(shape, kSizes, products));
    attend_backward(inputs, gradients, scratch.get(), next_task);
  });
  return results;
}

template <class Element>
void expect_equal_bits(TileProducts products) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    for (uint64_t seed = 0; seed < 2 * testing::kNumForestShapes; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(instruction_set_name(isa)));
      Problem<Element> problem(seed);
      const std::string alone = attend_in_threads(problem, products, isa, 1).bits();
      EXPECT_TRUE(attend_in_threads(problem, products, isa, 4).bits() == alone);
    }
  }
}

TEST(TreeAttentionThreads, DoublesAreTheSameBits) {
  expect_equal_bits<double>(TileProducts::kBlas);
}

TEST(TreeAttentionThreads, FloatsAreTheSameBits) {
  expect_equal_bits<float>(TileProducts::kBlas);
  expect_equal_bits<float>(TileProducts::kPanels);
}

TEST(TreeAttentionThreads, BFloat16IsTheSameBits) {
  expect_equal_bits<BFloat16>(TileProducts::kPanels);
  expect_equal_bits<BFloat16>(TileProducts::kPairPanels);
}

// Every pair of a query and a key by itself (docs/math.md).
Results<double> dense_attention(const Problem<double>& problem) {
  Results<double> results;
  results.out.resize(problem.q.size());
  results.grad_q.resize(problem.q.size());
  for (const auto& keys : problem.k) {
    results.grad_k.emplace_back(keys.size());
    results.grad_v.emplace_back(keys.size());
  }
  struct Pair {
    size_t segment;
    int64_t key_row;  // of its first element
    double p;
  };
  const auto dot = [](const double* a, const double* b) {
    double sum = 0;
    for (int64_t i = 0; i < kHeadDim; ++i) sum += a[i] * b[i];
    return sum;
  };
  const auto add = [](double factor, const double* from, double* to) {
    for (int64_t i = 0; i < kHeadDim; ++i) to[i] += factor * from[i];
  };
  for (int64_t row = 0; row < problem.tokens() * kHeads; ++row) {
    const int64_t query = row / kHeads, key_head = row % kHeads / (kHeads / kKeyHeads);
    const double* q = problem.q.data() + row * kHeadDim;
    const double* grad_out = problem.grad_out.data() + row * kHeadDim;
    double* out = results.out.data() + row * kHeadDim;
    std::vector<Pair> pairs;
    double sum = 0;
    for (size_t s = 0; s < problem.k.size(); ++s) {
      const auto keys = static_cast<int64_t>(problem.k[s].size()) / (kKeyHeads * kHeadDim);
      for (int64_t key = 0; key < keys; ++key) {
        if (!problem.sees(query, s, key)) continue;
        const int64_t key_row = (key * kKeyHeads + key_head) * kHeadDim;
        pairs.push_back({s, key_row, std::exp(kScale * dot(q, problem.k[s].data() + key_row))});
        sum += pairs.back().p;
      }
    }
    results.lse.push_back(std::log(sum));
    for (Pair& pair : pairs) add(pair.p /= sum, problem.v[pair.segment].data() + pair.key_row, out);
    const double delta = dot(grad_out, out);
    for (const Pair& pair : pairs) {
      const double* k = problem.k[pair.segment].data() + pair.key_row;
      const double ds = pair.p * (dot(grad_out, problem.v[pair.segment].data() + pair.key_row) - delta);
      add(kScale * ds, k, results.grad_q.data() + row * kHeadDim);
      add(kScale * ds, q, results.grad_k[pair.segment].data() + pair.key_row);
      add(pair.p, grad_out, results.grad_v[pair.segment].data() + pair.key_row);
    }
  }
  return results;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    largest = difference <= largest ? largest : difference;  // also where it is NaN
  }
  return largest;
}

TEST(TreeAttentionThreads, DoublesAreThoseOfDenseAttention) {
  for (const InstructionSet isa : instruction_sets_of_this_machine()) {
    for (uint64_t seed = 100; seed < 100 + 2 * testing::kNumForestShapes; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::string(instruction_set_name(isa)));
      Problem<double> problem(seed);
      const Results<double> dense = dense_attention(problem);
      const Results<double> tiles = attend_in_threads(problem, TileProducts::kBlas, isa, 4);
      constexpr double kTolerance = 1e-12;
      EXPECT_LT(largest_difference(tiles.out, dense.out), kTolerance);
      EXPECT_LT(largest_difference(tiles.lse, dense.lse), kTolerance);
      EXPECT_LT(largest_difference(tiles.grad_q, dense.grad_q), kTolerance);
      for (size_t s = 0; s < dense.grad_k.size(); ++s) {
        EXPECT_LT(largest_difference(tiles.grad_k[s], dense.grad_k[s]), kTolerance);
        EXPECT_LT(largest_difference(tiles.grad_v[s], dense.grad_v[s]), kTolerance);
      }
    }
  }
}

}  // namespace
}  // namespace espalier
