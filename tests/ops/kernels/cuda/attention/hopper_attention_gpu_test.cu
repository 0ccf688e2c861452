// SPDX-License-Identifier: Apache-2.0
// Attention for Hopper against that of mma.sync on a GPU, result by result.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>

#include "espalier/ops/kernels/cuda/attention/tree_attention.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/kernels/cuda/attention/gpu_array.cuh"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

using cuda::AttentionImplementation;
using cuda::AttentionProblem;
using Bits = std::vector<uint16_t>;  // of BFloat16

Bits random_bits(std::mt19937_64& random, size_t size) {
  std::normal_distribution<float> normal;
  Bits bits;
  for (size_t i = 0; i < size; ++i) {
    bits.push_back(static_cast<uint16_t>((std::bit_cast<uint32_t>(normal(random)) + 0x8000) >> 16));
  }
  return bits;
}

double value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
double value(float number) {
  return number;
}

template <class T>
double distance(const std::vector<T>& a, const std::vector<T>& b) {
  double squares = 0, all = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += (value(a[i]) - value(b[i])) * (value(a[i]) - value(b[i]));
    all += value(b[i]) * value(b[i]);
  }
  return std::sqrt(squares / all);
}

/// A problem in the GPU's memory: a forest and two segments of context.
class GpuProblem {
 public:
  GpuProblem(uint64_t seed, int head_dim, int key_heads, int group, bool deterministic)
      : random_(test_seed(seed)),
        ends_(forest(random_)),
        tokens_(static_cast<int>(ends_.size())),
        heads_(key_heads * group),
        key_heads_(key_heads),
        dim_(head_dim),
        rectangles_{{0, 3, 203, 0, tokens_}, {1, 0, 70, tokens_ / 4, tokens_ / 2}},
        gpu_ends_(ends_),
        gpu_rectangles_(rectangles_),
        q_(random_bits(random_, rows(tokens_, heads_))),
        grad_out_(random_bits(random_, rows(tokens_, heads_))) {
    for (const int keys : {tokens_, 203, 70}) {
      for (auto* list : {&k_, &v_})
        list->push_back(std::make_unique<Array<uint16_t>>(random_bits(random_, rows(keys, key_heads_))));
      sources_.push_back({data(*k_.back(), key_heads_), data(*v_.back(), key_heads_)});
    }
    gpu_sources_ = std::make_unique<Array<cuda::KeySource>>(sources_);
    problem_ = {cuda::AttentionKernels::kHopper,
                cuda::ElementKind::kBFloat16,
                tokens_,
                heads_,
                key_heads_,
                dim_,
                1 / std::sqrt(static_cast<float>(dim_)),
                gpu_ends_.data(),
                data(q_, heads_),
                gpu_sources_->data(),
                sources_.data(),
                rectangles_.data(),
                gpu_rectangles_.data(),
                static_cast<int32_t>(rectangles_.size()),
                deterministic};
  }

  struct Results {
    Bits out, grad_q;
    std::vector<float> lse;
    std::vector<Bits> grad_keys;  // k and v of each source
  };

  Results run(const AttentionImplementation& kernels) {
    const Array<uint16_t> out(Bits(rows(tokens_, heads_), 0x7fff)),
        grad_q(Bits(rows(tokens_, heads_), 0x7fff));
    const Array<float> lse(std::vector<float>(size_t(tokens_) * heads_, NAN));
    const auto [scratch, schedules] = memory(kernels.forward_memory(problem_));
    kernels.attend(problem_, {data(out, heads_), lse.data()}, scratch->data(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "attend");
    std::vector<std::unique_ptr<Array<uint16_t>>> gradients;
    std::vector<cuda::KeyGradients> pointers;
    for (const int keys : {tokens_, 203, 70}) {
      for (int i = 0; i < 2; ++i)
        gradients.push_back(std::make_unique<Array<uint16_t>>(Bits(rows(keys, key_heads_), 0)));
      pointers.push_back({data(*gradients.end()[-2], key_heads_), data(*gradients.end()[-1], key_heads_)});
    }
    const Array<cuda::KeyGradients> gpu_pointers(pointers);
    const auto [more, more_schedules] = memory(kernels.backward_memory(problem_));
    kernels.attend_backward(
        problem_,
        {data(grad_out_, heads_), data(out, heads_), lse.data(), data(grad_q, heads_), gpu_pointers.data()},
        more->data(), nullptr);
    cuda::check(cudaDeviceSynchronize(), "attend_backward");
    Results results{out.values(), grad_q.values(), lse.values(), {}};
    for (const auto& gradient : gradients) results.grad_keys.push_back(gradient->values());
    return results;
  }

 private:
  using Bytes = std::unique_ptr<Array<std::byte>>;
  /// Scratch, and schedules that the problem has from now on.
  std::pair<Bytes, Bytes> memory(const cuda::AttentionMemory& needed) {
    const auto bytes = [](int64_t size) {
      return std::make_unique<Array<std::byte>>(std::vector<std::byte>(size));
    };
    Bytes schedules = bytes(needed.schedules);
    problem_.schedules = schedules->data();
    return {bytes(needed.scratch), std::move(schedules)};
  }

  static std::vector<int32_t> forest(std::mt19937_64& random) {
    std::vector<int32_t> ends;
    while (ends.size() < 500) ends = random_subtree_end(random, ForestShape::kMixed, 12, 200);
    return ends;
  }
  size_t rows(int tokens, int heads) const { return size_t(tokens) * heads * dim_; }
  cuda::TokenHeadsData data(const Array<uint16_t>& array, int heads) const {
    return {array.data(), int64_t{heads} * dim_, dim_};
  }

  std::mt19937_64 random_;
  std::vector<int32_t> ends_;
  int tokens_, heads_, key_heads_, dim_;
  std::vector<ContextRectangle> rectangles_;
  Array<int32_t> gpu_ends_;
  Array<ContextRectangle> gpu_rectangles_;
  Array<uint16_t> q_, grad_out_;
  std::vector<std::unique_ptr<Array<uint16_t>>> k_, v_;
  std::vector<cuda::KeySource> sources_;
  std::unique_ptr<Array<cuda::KeySource>> gpu_sources_;
  AttentionProblem problem_;
};

// Two roundings to BFloat16 of the same number differ by 2^-8 at most, and by less on average.
void expect_agreement(bool deterministic) {
  if (!has_hopper_gpu()) GTEST_SKIP() << "no Hopper GPU is visible";
  constexpr double kRoundings = 1.0 / 256;
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 2, 8, 6}) {
      SCOPED_TRACE("head_dim " + std::to_string(dim) + ", group " + std::to_string(group));
      GpuProblem problem(dim + group, dim, 2, group, deterministic);
      const AttentionImplementation& other = cuda::ampere_attention();
      const auto got = problem.run(cuda::hopper_attention());
      const auto expected = problem.run(other);
      EXPECT_LT(distance(got.out, expected.out), kRoundings) << "out";
      EXPECT_LT(distance(got.lse, expected.lse), 1e-5) << "lse";
      EXPECT_LT(distance(got.grad_q, expected.grad_q), kRoundings) << "grad_q";
      const char* names[] = {"grad_k",
                             "grad_v",
                             "grad_k of context 0",
                             "grad_v of context 0",
                             "grad_k of context 1",
                             "grad_v of context 1"};
      for (size_t i = 0; i < got.grad_keys.size(); ++i)
        EXPECT_LT(distance(got.grad_keys[i], expected.grad_keys[i]), kRoundings) << names[i];
    }
  }
}

TEST(HopperAttentionCuda, AgreesWithMmaSync) {
  expect_agreement(/*deterministic=*/false);
}

TEST(HopperAttentionCuda, AgreesWithMmaSyncWhenDeterministic) {
  expect_agreement(/*deterministic=*/true);
}

}  // namespace
}  // namespace espalier::testing
