// SPDX-License-Identifier: Apache-2.0
// Tensors to and from the fused kernels, with a stand-in on the CPU that sees what kernels see: pointers,
// strides and arrays. It computes in float64, pair by pair.
#include "espalier/ops/attention/fused.h"
#include "espalier/ops/attention/tree_attention.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <map>

#include "espalier/ops/attention/cuda.h"
#include "espalier/ops/guarded_output.h"
#include "tests/ops/attention/attention_problem.h"
#include "tests/ops/attention/reference.h"

namespace espalier {
namespace {

using testing::AttentionProblem;
using testing::relative_error;
using testing::Results;
using testing::small_attention_problem;

c10::BFloat16& element(const cuda::TokenHeadsData& tensor, int64_t token, int64_t head, int64_t d) {
  return static_cast<c10::BFloat16*>(
      tensor.data)[token * tensor.token_stride + head * tensor.head_stride + d];
}

/// Calls visit(source, key, score) for every key that query j of head h sees.
template <class Visit>
void for_keys_of(const cuda::AttentionProblem& problem, int64_t j, int64_t h, const Visit& visit) {
  const auto see = [&](int64_t source, int64_t key) {
    double score = 0;
    for (int64_t d = 0; d < problem.head_dim; ++d) {
      score += static_cast<double>(element(problem.q, j, h, d)) *
               static_cast<double>(element(problem.sources[source].k, key, h / problem.group(), d));
    }
    visit(source, key, problem.softmax_scale * score);
  };
  for (int64_t i = 0; i <= j; ++i) {
    if (j < problem.subtree_end[i]) see(0, i);
  }
  for (int32_t r = 0; r < problem.num_rectangles; ++r) {
    const ContextRectangle& rectangle = problem.rectangles[r];
    if (j < rectangle.query_begin || j >= rectangle.query_end) continue;
    for (int64_t key = rectangle.key_begin; key < rectangle.key_end; ++key) see(1 + rectangle.segment, key);
  }
}

// What memory a call had.
constexpr cuda::AttentionMemory kForwardMemory{128, 256}, kBackwardMemory{64, 512};
bool deterministic = false;
// Of calls, how many found schedules, which must hold what a call with the same forest has written.
int filled_schedules = 0;

cuda::AttentionMemory forward_memory(const cuda::AttentionProblem&) {
  return kForwardMemory;
}
cuda::AttentionMemory backward_memory(const cuda::AttentionProblem&) {
  return kBackwardMemory;
}

void use_schedules(const cuda::AttentionProblem& problem, const cuda::AttentionMemory& memory) {
  uint64_t digest = 1;
  const auto add = [&](int64_t number) { digest = digest * 1000003 + static_cast<uint64_t>(number); };
  for (int32_t i = 0; i < problem.num_tokens; ++i) add(problem.subtree_end[i]);
  for (int32_t i = 0; i < problem.num_rectangles; ++i) add(problem.rectangles[i].key_end);
  const std::vector<uint64_t> content(memory.schedules / sizeof(digest), digest);
  if (problem.scheduled) {
    ++filled_schedules;
    EXPECT_EQ(std::memcmp(problem.schedules, content.data(), memory.schedules), 0);
  } else {
    std::memcpy(problem.schedules, content.data(), memory.schedules);
  }
}

void attend(const cuda::AttentionProblem& problem, const cuda::AttentionOutputs& outputs, void* scratch,
            void*) {
  std::memset(scratch, 0xff, kForwardMemory.scratch);
  use_schedules(problem, kForwardMemory);
  ASSERT_EQ(std::memcmp(problem.host_rectangles, problem.rectangles,
                        problem.num_rectangles * sizeof(ContextRectangle)),
            0);
  for (int64_t j = 0; j < problem.num_tokens; ++j) {
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      double sum = 0;
      for_keys_of(problem, j, h, [&](int64_t, int64_t, double score) { sum += std::exp(score); });
      outputs.lse[h * problem.num_tokens + j] = static_cast<float>(std::log(sum));
      for (int64_t d = 0; d < problem.head_dim; ++d) {
        double out = 0;
        for_keys_of(problem, j, h, [&](int64_t source, int64_t key, double score) {
          out += std::exp(score) / sum *
                 static_cast<double>(element(problem.sources[source].v, key, h / problem.group(), d));
        });
        element(outputs.out, j, h, d) = static_cast<float>(out);
      }
    }
  }
}

void attend_backward(const cuda::AttentionProblem& problem, const cuda::AttentionGradients& gradients,
                     void* scratch, void*) {
  std::memset(scratch, 0xff, kBackwardMemory.scratch);
  use_schedules(problem, kBackwardMemory);
  deterministic = problem.deterministic;
  const int64_t dim = problem.head_dim;
  std::map<std::array<int64_t, 3>, std::vector<double>> grad_k, grad_v;  // by source, key and key head
  for (int64_t j = 0; j < problem.num_tokens; ++j) {
    for (int64_t h = 0; h < problem.num_heads; ++h) {
      const int64_t key_head = h / problem.group();
      double delta = 0;
      for (int64_t d = 0; d < dim; ++d) {
        delta += static_cast<double>(element(gradients.grad_out, j, h, d)) *
                 static_cast<double>(element(gradients.out, j, h, d));
      }
      std::vector<double> grad_q(dim);
      for_keys_of(problem, j, h, [&](int64_t source, int64_t key, double score) {
        const double p = std::exp(score - gradients.lse[h * problem.num_tokens + j]);
        double dp = -delta;
        for (int64_t d = 0; d < dim; ++d) {
          dp += static_cast<double>(element(gradients.grad_out, j, h, d)) *
                static_cast<double>(element(problem.sources[source].v, key, key_head, d));
        }
        std::vector<double>& dk = grad_k[{source, key, key_head}];
        std::vector<double>& dv = grad_v[{source, key, key_head}];
        dk.resize(dim);
        dv.resize(dim);
        for (int64_t d = 0; d < dim; ++d) {
          dv[d] += p * static_cast<double>(element(gradients.grad_out, j, h, d));
          dk[d] += problem.softmax_scale * p * dp * static_cast<double>(element(problem.q, j, h, d));
          grad_q[d] += problem.softmax_scale * p * dp *
                       static_cast<double>(element(problem.sources[source].k, key, key_head, d));
        }
      });
      for (int64_t d = 0; d < dim; ++d) element(gradients.grad_q, j, h, d) = static_cast<float>(grad_q[d]);
    }
  }
  const auto store = [&](const auto& all, cuda::TokenHeadsData cuda::KeyGradients::* which) {
    for (const auto& [place, gradient] : all) {
      for (int64_t d = 0; d < dim; ++d) {
        element(gradients.grad_sources[place[0]].*which, place[1], place[2], d) =
            static_cast<float>(gradient[d]);
      }
    }
  };
  store(grad_k, &cuda::KeyGradients::grad_k);
  store(grad_v, &cuda::KeyGradients::grad_v);
}

bool capturing = false;

constexpr fused::Kernels kStandIn{&forward_memory, &backward_memory, &attend, &attend_backward,
                                  [](void*) { return capturing; }};

/// Inputs as rows of something larger and not aligned to 16 bytes, every other time.
at::Tensor laid_out(const at::Tensor& tensor, int64_t number) {
  if (number % 3 == 0) return tensor;
  const at::Tensor larger =
      at::full({tensor.size(0), tensor.size(1), tensor.size(2) + 8}, NAN, tensor.options());
  const int64_t begin = number % 3 == 1 ? 8 : 3;
  return larger.slice(2, begin, begin + tensor.size(2)).copy_(tensor);
}

Results run(const AttentionProblem& problem) {
  int64_t number = 0;
  const auto arrange = [&](const detail::TreeAttentionArguments& given) {
    detail::TreeAttentionArguments arguments = given;
    for (at::Tensor* tensor : {&arguments.q, &arguments.k, &arguments.v}) {
      *tensor = laid_out(*tensor, number++);
    }
    for (auto* list : {&arguments.context.k, &arguments.context.v}) {
      for (at::Tensor& tensor : *list) tensor = laid_out(tensor, number++);
    }
    return arguments;
  };
  return testing::attention_results(
      [&](const auto& arguments) { return fused::tree_attention(kStandIn, arrange(arguments)); },
      [&](const auto& arguments, const auto&... rest) {
        return fused::tree_attention_backward(kStandIn, arrange(arguments), rest...);
      },
      problem, at::kBFloat16);
}

/// The output and the gradients of q, of all keys and of all values, whatever segments there are.
Results joined(const Results& results) {
  const auto context = results.begin() + 4, middle = context + (results.end() - context) / 2;
  std::vector<at::Tensor> k{results[2]}, v{results[3]};
  k.insert(k.end(), context, middle);
  v.insert(v.end(), middle, results.end());
  return {results[0], results[1], at::cat(k), at::cat(v)};
}

TEST(TreeAttentionFused, GivesKernelsWhatTheOperatorWasGiven) {
  testing::PooledErrors errors[6];  // of problems of a few tokens each; by head shape
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    // Values as wide as keys, narrower and wider.
    constexpr int64_t kWidths[][2] = {{16, 16}, {16, 8}, {8, 16}};
    const auto& [head_dim, value_dim] = kWidths[seed / 2 % 3];
    const testing::HeadShape shape{seed % 2 == 0 ? 4 : 3, seed % 2 == 0 ? 2 : 1, head_dim, value_dim};
    const AttentionProblem problem = testing::rounded(small_attention_problem(seed, shape), at::kBFloat16);
    const Results ours = run(problem);
    const Results exact = testing::attention_results(&reference::tree_attention, problem);
    const Results plain = testing::attention_results(&reference::tree_attention, problem, at::kBFloat16);
    ASSERT_EQ(ours.size(), exact.size());
    for (const at::Tensor& result : ours) EXPECT_EQ(result.scalar_type(), at::kBFloat16);
    errors[seed % 6].add(joined(ours), joined(plain), joined(exact));
  }
  for (const auto& pool : errors) EXPECT_TRUE(pool.at_most_twice_the_plain());
}

TEST(TreeAttentionFused, NegativeControlIsNoticed) {
  AttentionProblem problem;
  for (uint64_t seed = 4; problem.blocks.empty() || problem.blocks[2] - problem.blocks[1] < 2; ++seed) {
    problem = testing::rounded(small_attention_problem(seed, {4, 2, 16}), at::kBFloat16);
  }
  const Results exact = testing::attention_results(&reference::tree_attention, problem);
  problem.blocks[2] -= 1;  // one key less is seen
  double worst = 0;
  const Results ours = run(problem);
  for (size_t i = 0; i < exact.size(); ++i) worst = std::max(worst, relative_error(ours[i], exact[i]));
  EXPECT_GT(worst, 0.05);
}

// What a kernel that computes nothing was given.
cuda::TokenHeadsData given_k, given_grad_out;

TEST(TreeAttentionFused, CopiesRowsThatAreRepeated) {
  // The copy engine does not promise to take strides of zero.
  fused::Kernels kernels = kStandIn;
  kernels.attend = [](const cuda::AttentionProblem& problem, const auto&, void*, void*) {
    given_k = problem.sources[0].k;
  };
  kernels.attend_backward = [](const auto&, const cuda::AttentionGradients& gradients, void*, void*) {
    given_grad_out = gradients.grad_out;
  };
  const AttentionProblem problem = small_attention_problem(4, {4, 2, 16});
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : problem.inputs) inputs.push_back(input.to(at::kBFloat16));
  detail::TreeAttentionArguments arguments = testing::arguments_of(problem, inputs);
  ASSERT_GT(arguments.q.size(0), 1);
  arguments.k = arguments.k.slice(1, 0, 1).expand_as(arguments.k);
  const auto [out, lse] = fused::tree_attention(kernels, arguments);
  EXPECT_EQ(given_k.head_stride, 16);
  EXPECT_EQ(given_k.token_stride, 2 * 16);
  fused::tree_attention_backward(kernels, arguments, out.slice(0, 0, 1).expand_as(out), out, lse);
  EXPECT_EQ(given_grad_out.head_stride, 16);
  EXPECT_EQ(given_grad_out.token_stride, 4 * 16);
}

TEST(TreeAttentionFused, IsDeterministicWhereThatIsAskedFor) {
  const AttentionProblem problem = small_attention_problem(1, {4, 2, 16});
  const bool before = at::globalContext().deterministicAlgorithms();
  for (const bool asked : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(asked, /*warn_only=*/false);
    run(problem);
    EXPECT_EQ(deterministic, asked);
  }
  at::globalContext().setDeterministicAlgorithms(before, /*warn_only=*/false);
}

/// Forward of a problem with the given tokens.
void run_forward(const AttentionProblem& problem, const at::Tensor& subtree_end) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : problem.inputs) inputs.push_back(input.to(at::kBFloat16));
  detail::TreeAttentionArguments arguments = testing::arguments_of(problem, inputs);
  arguments.tokens.subtree_end = subtree_end;
  const auto [out, lse] = fused::tree_attention(kStandIn, arguments);
  fused::tree_attention_backward(kStandIn, arguments, out, out, lse);
}

TEST(TreeAttentionFused, SchedulesServeAllLayersOfAForest) {
  AttentionProblem problem = small_attention_problem(4, {4, 2, 16});
  for (uint64_t seed = 5; problem.blocks.empty() || problem.blocks[2] - problem.blocks[1] < 2; ++seed) {
    problem = small_attention_problem(seed, {4, 2, 16});
  }
  AttentionProblem other = problem, shorter = problem;
  for (at::Tensor& input : other.inputs) input = input.slice(2, 0, 8);
  shorter.blocks[2] -= 1;  // one key less is seen
  at::Tensor ends = at::tensor(problem.ends, at::kInt);
  const auto found = [&](const AttentionProblem& given, const at::Tensor& subtree_end) {
    filled_schedules = 0;
    run_forward(given, subtree_end);
    return filled_schedules;
  };
  EXPECT_EQ(found(problem, ends), 0);
  EXPECT_EQ(found(problem, ends), 2) << "of forward and of backward";
  EXPECT_EQ(found(other, ends), 0) << "of another head dimension";
  EXPECT_EQ(found(problem, ends), 2);
  EXPECT_EQ(found(problem, ends.clone()), 0) << "of another tensor";
  ends.copy_(ends.clone());
  EXPECT_EQ(found(problem, ends), 0) << "after it was written to";
  EXPECT_EQ(found(problem, ends), 2);
  EXPECT_EQ(found(shorter, ends), 0) << "of another context";
  capturing = true;
  EXPECT_EQ(found(problem, ends), 0) << "while a graph is captured";
  capturing = false;
  {
    const OutputGuards guards;
    EXPECT_EQ(found(problem, ends), 0) << "between guards";
    EXPECT_EQ(guards.broken(), 0);
  }
  const bool before = at::globalContext().deterministicAlgorithms();
  at::globalContext().setDeterministicAlgorithms(!before, /*warn_only=*/false);
  EXPECT_EQ(found(problem, ends), 0) << "of another mode";
  at::globalContext().setDeterministicAlgorithms(before, /*warn_only=*/false);
  const c10::InferenceMode inference;
  const at::Tensor inferred = at::tensor(problem.ends, at::kInt);
  EXPECT_EQ(found(problem, inferred) + found(problem, inferred), 0) << "in inference mode";
}

TEST(TreeAttentionFused, SchedulesOfAForestThatIsGoneServeNoOther) {
  const AttentionProblem problem = small_attention_problem(5, {4, 2, 16});
  for (int i = 0; i < 50; ++i) {  // a new tensor may lie where an old one was
    filled_schedules = 0;
    run_forward(problem, at::tensor(problem.ends, at::kInt));
    EXPECT_EQ(filled_schedules, 0);
  }
}

TEST(TreeAttentionFused, ServesNothingWithoutADevice) {
  EXPECT_FALSE(fused::serves(at::kFloat, 64));
  EXPECT_FALSE(fused::serves(at::kBFloat16, 60));
}

TEST(TreeAttentionFused, RefusesScalesThatAreNotPositiveAndSoftcaps) {
  AttentionProblem problem = small_attention_problem(1, {4, 2, 16});
  problem.scale = 0;
  EXPECT_THROW(run(problem), c10::Error);
  problem.scale = 1;
  EXPECT_NO_THROW(run(problem));
  problem.softcap = 30;
  EXPECT_THROW(run(problem), c10::Error);
}

}  // namespace
}  // namespace espalier
