// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/attention_family.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>

#include "espalier/base/interrupt.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/qualify/awkward_forests.h"
#include "espalier/qualify/pooled_errors.h"

namespace espalier::qualify {
namespace {

using detail::TreeAttentionArguments;
// out, then the gradients of q, k, v, and concatenated, of context keys and values.
using Results = std::vector<at::Tensor>;
constexpr const char* kResultNames[] = {"out",
                                        "gradient of q",
                                        "gradient of k",
                                        "gradient of v",
                                        "gradient of context keys",
                                        "gradient of context values"};

struct Problem {
  AwkwardForest forest;
  TreeAttentionArguments arguments;  // values exact in the dtype
  at::Tensor grad_out;
};

class Deterministic {
 public:
  explicit Deterministic(bool on) : before_(at::globalContext().deterministicAlgorithms()) {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
  }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(before_, /*warn_only=*/false); }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  bool before_;
};

at::Tensor repeated(const at::Tensor& tensor, int64_t period) {
  if (period == 0) return tensor;
  return tensor.index_select(0, at::arange(tensor.size(0), at::kLong).remainder(period));
}

// On the CPU in float64, with group sizes of query heads that vary by seed.
Problem make_problem(const AwkwardForest& forest, at::ScalarType dtype, int64_t head_dim, uint64_t seed) {
  const int64_t num_heads = 4, num_key_heads = seed % 2 == 0 ? 2 : 4;
  const at::Generator generator = at::detail::createCPUGenerator(seed + 1);
  const auto normal = [&](int64_t length, int64_t heads) {
    return at::randn({length, heads, head_dim}, generator, at::TensorOptions(at::kDouble));
  };
  const auto held = [&](const at::Tensor& tensor) { return tensor.to(dtype).to(at::kDouble); };
  Problem problem{.forest = forest, .arguments = {}, .grad_out = {}};
  TreeAttentionArguments& arguments = problem.arguments;
  const int64_t tokens = forest.num_tokens();
  arguments.q = held(normal(tokens, num_heads) * forest.sharpness);
  arguments.k = held(repeated(normal(tokens, num_key_heads), forest.period));
  arguments.v = held(repeated(normal(tokens, num_key_heads), forest.period));
  arguments.tokens.subtree_end = at::tensor(forest.subtree_end, at::kInt);
  arguments.options.softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  for (const int64_t size : forest.segment_sizes) {
    arguments.context.k.push_back(held(normal(size, num_key_heads)));
    arguments.context.v.push_back(held(normal(size, num_key_heads)));
  }
  arguments.context.blocks = at::tensor(forest.context_blocks, at::kLong).view({-1, 5});
  problem.grad_out = held(normal(tokens, num_heads));
  return problem;
}

Problem moved(const Problem& problem, at::ScalarType dtype, at::Device device) {
  const at::TensorOptions options = at::TensorOptions(device).dtype(dtype);
  Problem result = problem;
  TreeAttentionArguments& arguments = result.arguments;
  for (at::Tensor* tensor : {&arguments.q, &arguments.k, &arguments.v, &result.grad_out}) {
    *tensor = tensor->to(options);
  }
  arguments.tokens.subtree_end = arguments.tokens.subtree_end.to(device);
  for (at::Tensor& segment : arguments.context.k) segment = segment.to(options);
  for (at::Tensor& segment : arguments.context.v) segment = segment.to(options);
  return result;
}

Results joined(const at::Tensor& out, const detail::TreeAttentionGradients& gradients) {
  const auto& [q, k, v, context_k, context_v] = gradients;
  Results results{out, q, k, v};
  for (const auto* context : {&context_k, &context_v}) {
    if (!context->empty()) results.push_back(at::cat(*context));
  }
  return results;
}

Results exact_results(const Problem& problem) {
  const auto [out, lse] = masked_chunks::tree_attention(problem.arguments);
  return joined(out, masked_chunks::tree_attention_backward(problem.arguments, problem.grad_out, lse));
}

Results family_results(const AttentionFamily& family, const Problem& problem) {
  const auto [out, lse] = family.forward(problem.arguments);
  return joined(out, family.backward(problem.arguments, problem.grad_out, out, lse));
}

Results plain_results(const Problem& problem) {
  TreeAttentionArguments arguments = problem.arguments;
  const auto leaf = [](at::Tensor& tensor) {
    tensor = tensor.detach().requires_grad_();
    return tensor;
  };
  std::vector<at::Tensor> leaves{leaf(arguments.q), leaf(arguments.k), leaf(arguments.v)};
  for (at::Tensor& segment : arguments.context.k) leaves.push_back(leaf(segment));
  for (at::Tensor& segment : arguments.context.v) leaves.push_back(leaf(segment));
  const at::Tensor out = reference::tree_attention(arguments.q, arguments.k, arguments.v, arguments.tokens,
                                                   arguments.options, arguments.context);
  const std::vector<at::Tensor> gradients = torch::autograd::grad({out}, leaves, {problem.grad_out});
  const auto segments = static_cast<std::ptrdiff_t>(arguments.context.k.size());
  const auto context_k = gradients.begin() + 3, context_v = context_k + segments;
  return joined(
      out.detach(),
      {gradients[0], gradients[1], gradients[2], {context_k, context_v}, {context_v, gradients.end()}});
}

// Checks one dtype and head dimension.
class Check {
 public:
  Check(const AttentionFamily& family, at::ScalarType dtype, int64_t head_dim, at::Device device)
      : family_(family), dtype_(dtype), head_dim_(head_dim), device_(device) {}

  /// The fault; empty: none.
  std::string fault() {
    const std::vector<AwkwardForest> forests = awkward_forests();
    for (size_t i = 0; i < forests.size(); ++i) {
      check_interrupt();
      if (std::string wrong = run(forests[i], i); !wrong.empty()) return wrong;
    }
    for (const auto& [index, errors] : errors_) {
      if (std::string wrong = errors.fault(); !wrong.empty()) {
        return fmt::format("{}: {}", kResultNames[index], wrong);
      }
    }
    return "";
  }
  int64_t checks() const { return checks_; }

 private:
  std::string run(const AwkwardForest& forest, uint64_t seed) {
    const Problem exact_problem = make_problem(forest, dtype_, head_dim_, seed);
    const Problem problem = moved(exact_problem, dtype_, device_);
    const Results exact = exact_results(exact_problem);
    const Results plain = dtype_ == at::kDouble ? exact : plain_results(problem);
    for (const bool deterministic : {false, true}) {
      const Deterministic mode(deterministic);
      bool within = false;
      const Results ours = guarded_results(problem, &within);
      if (!within) return fmt::format("writes beyond its outputs, on the forest `{}`", forest.name);
      if (std::string wrong = compare(forest, ours, plain, exact); !wrong.empty()) return wrong;
      const Results again = family_results(family_, problem);
      // Gradients need not be reproducible without deterministic algorithms.
      const size_t promised = deterministic ? ours.size() : 1;
      for (size_t i = 0; i < promised; ++i) {
        if (same_bits(ours[i], again[i])) continue;
        return fmt::format("{}: other bits in another run, on the forest `{}`{}", kResultNames[i],
                           forest.name, deterministic ? " with deterministic algorithms" : "");
      }
    }
    return "";
  }

  Results guarded_results(const Problem& problem, bool* within) const {
    const OutputGuards guards;
    Results results = family_results(family_, problem);
    *within = guards.broken() == 0;
    return results;
  }

  std::string compare(const AwkwardForest& forest, const Results& ours, const Results& plain,
                      const Results& exact) {
    if (ours.size() != exact.size()) return fmt::format("lacks gradients, on the forest `{}`", forest.name);
    for (size_t i = 0; i < exact.size(); ++i) {
      errors_.try_emplace(i, dtype_).first->second.add(fmt::format("the forest `{}`", forest.name), ours[i],
                                                       plain[i], exact[i]);
      ++checks_;
    }
    return "";
  }

  const AttentionFamily& family_;
  at::ScalarType dtype_;
  int64_t head_dim_;
  at::Device device_;
  std::map<size_t, PooledErrors> errors_{};  // by kind of result
  int64_t checks_ = 0;
};

}  // namespace

Finding check_attention(const AttentionFamily& family, at::Device device) {
  Finding finding;
  for (const at::ScalarType dtype : family.dtypes) {
    for (const int64_t head_dim : family.head_dims) {
      if (!family.serves(dtype, head_dim)) continue;
      Check check(family, dtype, head_dim, device);
      const std::string fault = check.fault();
      finding.checks += check.checks();
      if (fault.empty()) continue;
      finding.fault = fmt::format("{}, head dimension {}: {}", c10::toString(dtype), head_dim, fault);
      return finding;
    }
  }
  return finding;
}

}  // namespace espalier::qualify
