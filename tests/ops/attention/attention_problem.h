// SPDX-License-Identifier: Apache-2.0
// Random problems for tree attention: a forest, context segments, inputs, and a gradient of the output.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <random>
#include <vector>

#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/operator.h"
#include "tests/ops/attention/random_subtrees.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/comparison.h"
#include "tests/test_seed.h"

namespace espalier::testing {

struct HeadShape {
  int64_t num_heads = 4, num_key_heads = 2, head_dim = 8, value_dim = 0;  // 0: head_dim
};

struct AttentionProblem {
  std::vector<int32_t> ends;
  std::vector<int64_t> segment_sizes;
  std::vector<int64_t> blocks;
  // q, k, v, then k of each segment, then v of each, then with has_sinks the sinks; float64 on the CPU
  std::vector<at::Tensor> inputs;
  at::Tensor grad_out;
  double scale = 0.35, softcap = 0;
  int64_t sliding_window = 0;
  bool has_sinks = false;
  std::vector<int32_t> positions;        // of the tokens, with a window
  std::vector<int64_t> block_positions;  // of the first key of each block
};

inline at::Tensor blocks_tensor(const std::vector<int64_t>& blocks) {
  return at::tensor(blocks, at::kLong).view({-1, 5});
}

/// Appends context for queries [row_begin, row_end): some keys for all of them, then parts of the range.
inline void draw_blocks(std::mt19937_64& random, int64_t row_begin, int64_t row_end, int depth,
                        std::vector<int64_t>& sizes, std::vector<int64_t>& blocks) {
  const auto between = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int64_t count = between(0, 2); count > 0; --count) {
    const int64_t segment = between(0, static_cast<int64_t>(sizes.size()) - 1);
    const int64_t begin = sizes[segment] + between(0, 2);  // keys between blocks are seen by nobody
    const int64_t end = begin + between(1, 9);
    sizes[segment] = end;
    blocks.insert(blocks.end(), {segment, begin, end, row_begin, row_end});
  }
  for (int64_t begin = row_begin; depth > 0 && begin < row_end;) {
    const int64_t end = between(begin + 1, row_end);
    if (between(0, 2) > 0) draw_blocks(random, begin, end, depth - 1, sizes, blocks);
    begin = end;
  }
}

inline void draw_inputs(uint64_t seed, const HeadShape& shape, AttentionProblem& problem) {
  const auto tokens = static_cast<int64_t>(problem.ends.size());
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  const int64_t value_dim = shape.value_dim > 0 ? shape.value_dim : shape.head_dim;
  const auto normal = [&](int64_t length, int64_t heads, int64_t dim) {
    return at::randn({length, heads, dim}, generator, at::TensorOptions(at::kDouble));
  };
  problem.inputs = {normal(tokens, shape.num_heads, shape.head_dim),
                    normal(tokens, shape.num_key_heads, shape.head_dim),
                    normal(tokens, shape.num_key_heads, value_dim)};
  for (const int64_t dim : {shape.head_dim, value_dim}) {
    for (const int64_t size : problem.segment_sizes)
      problem.inputs.push_back(normal(size, shape.num_key_heads, dim));
  }
  problem.grad_out = normal(tokens, shape.num_heads, value_dim);
}

/// A small random forest (its shape goes by the seed) with up to three segments of context.
inline AttentionProblem small_attention_problem(uint64_t seed, const HeadShape& shape = {}) {
  std::mt19937_64 random(test_seed(seed));
  AttentionProblem problem;
  problem.ends = random_subtree_end(random, static_cast<ForestShape>(seed % kNumForestShapes), 10, 6);
  problem.segment_sizes.assign(1 + seed % 3, 1);
  draw_blocks(random, 0, static_cast<int64_t>(problem.ends.size()), 2, problem.segment_sizes, problem.blocks);
  draw_inputs(seed, shape, problem);
  return problem;
}

/// Trees of one shape, at least num_tokens tokens: the ratio of two rounding errors needs some numbers to
/// settle. With context, some keys are seen by all.
inline AttentionProblem large_attention_problem(uint64_t seed, ForestShape forest, size_t num_tokens,
                                                int max_node_tokens, bool context, const HeadShape& shape) {
  std::mt19937_64 random(test_seed(seed));
  AttentionProblem problem;
  while (problem.ends.size() < num_tokens) {
    const auto offset = static_cast<int32_t>(problem.ends.size());
    for (const int32_t end : random_subtree_end(random, forest, 20, max_node_tokens)) {
      problem.ends.push_back(end + offset);
    }
  }
  if (context) {
    const auto tokens = static_cast<int64_t>(problem.ends.size());
    problem.segment_sizes = {150, 90};
    problem.blocks = {0, 0, 100, 0, tokens, 0, 110, 150, 20, tokens / 2, 1, 0, 90, tokens / 2, tokens};
    draw_blocks(random, 0, 20, 2, problem.segment_sizes, problem.blocks);
  }
  draw_inputs(seed, shape, problem);
  problem.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  return problem;
}

/// The problem with a sliding window, and with positions: a token stands after all keys that it sees, and a
/// block of context after those blocks that its queries see and that come before it or have more queries.
inline AttentionProblem windowed(AttentionProblem problem, int64_t window) {
  struct Block {
    int64_t keys, row_begin, row_end;
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < problem.blocks.size(); i += 5) {
    const int64_t* number = problem.blocks.data() + i;
    blocks.push_back({number[2] - number[1], number[3], number[4]});
  }
  const auto rows = [](const Block& block) { return block.row_end - block.row_begin; };
  problem.sliding_window = window;
  problem.block_positions.assign(blocks.size(), 0);
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (size_t other = 0; other < blocks.size(); ++other) {
      const bool holds =
          blocks[other].row_begin <= blocks[b].row_begin && blocks[b].row_end <= blocks[other].row_end;
      const bool before = rows(blocks[other]) > rows(blocks[b]) || other < b;
      if (holds && before) problem.block_positions[b] += blocks[other].keys;
    }
  }
  const auto tokens = static_cast<int64_t>(problem.ends.size());
  problem.positions.assign(tokens, 0);
  for (int64_t j = 0; j < tokens; ++j) {
    int32_t& position = problem.positions[j];
    for (const Block& block : blocks) {
      if (block.row_begin <= j && j < block.row_end) position += static_cast<int32_t>(block.keys);
    }
    for (int64_t i = 0; i < j; ++i) {
      if (visible(problem.ends, j, i)) position = std::max(position, problem.positions[i] + 1);
    }
  }
  return problem;
}

/// The problem with a sink for each query head, about as large as the scores.
inline AttentionProblem with_sinks(AttentionProblem problem, uint64_t seed) {
  const auto generator = at::detail::createCPUGenerator(test_seed(seed));
  problem.inputs.push_back(at::randn({problem.inputs[0].size(1)}, generator, at::TensorOptions(at::kDouble)));
  problem.has_sinks = true;
  return problem;
}

/// The problem with numbers that dtype holds exactly.
inline AttentionProblem rounded(AttentionProblem problem, at::ScalarType dtype) {
  problem.inputs = cast(cast(problem.inputs, dtype), at::kDouble);
  problem.grad_out = problem.grad_out.to(dtype).to(at::kDouble);
  return problem;
}

inline espalier::detail::TreeAttentionArguments arguments_of(const AttentionProblem& problem,
                                                             const std::vector<at::Tensor>& inputs) {
  const auto segments = static_cast<int64_t>(problem.segment_sizes.size());
  const auto segment = inputs.begin() + 3, middle = segment + segments;
  const at::Device device = inputs[0].device();
  espalier::detail::TreeAttentionArguments arguments{
      inputs[0],
      inputs[1],
      inputs[2],
      {at::tensor(problem.ends, at::kInt).to(device)},
      {problem.scale, problem.sliding_window, problem.has_sinks ? inputs.back() : at::Tensor(),
       problem.softcap},
      {{segment, middle}, {middle, middle + segments}, blocks_tensor(problem.blocks)}};
  if (problem.sliding_window > 0) {
    arguments.tokens.position = at::tensor(problem.positions, at::kInt).to(device);
    arguments.context.positions = at::tensor(problem.block_positions, at::kLong);
  }
  return arguments;
}

/// The output and the gradients of a differentiable attention, with the problem's numbers as `options` say.
template <class Attention>
Results attention_results(const Attention& attention, const AttentionProblem& problem,
                          const at::TensorOptions& options = at::kDouble) {
  const auto attend = [&](const std::vector<at::Tensor>& inputs) {
    const auto [q, k, v, tokens, options, context] = arguments_of(problem, inputs);
    return attention(q, k, v, tokens, options, context);
  };
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : problem.inputs) inputs.push_back(input.to(options));
  return with_gradients(attend, inputs, problem.grad_out.to(options));
}

/// The same of one that is not differentiable, but for the gradient of sinks: forward(arguments) and
/// backward(arguments, grad_out, out, lse).
template <class Forward, class Backward>
Results attention_results(const Forward& forward, const Backward& backward, const AttentionProblem& problem,
                          const at::TensorOptions& options = at::kDouble) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : problem.inputs) inputs.push_back(input.to(options));
  const auto arguments = arguments_of(problem, inputs);
  const auto [out, lse] = forward(arguments);
  auto [grad_q, grad_k, grad_v, grad_context_k, grad_context_v] =
      backward(arguments, problem.grad_out.to(options), out, lse);
  Results results{out, grad_q, grad_k, grad_v};
  results.insert(results.end(), grad_context_k.begin(), grad_context_k.end());
  results.insert(results.end(), grad_context_v.begin(), grad_context_v.end());
  return results;
}

inline Results run_reference(const AttentionProblem& problem,
                             const at::TensorOptions& options = at::kDouble) {
  return attention_results(&reference::tree_attention, problem, options);
}

/// The implementation made of ATen's operators, in chunks of so many bytes of scores.
inline Results run_masked(const AttentionProblem& problem, int64_t score_bytes = masked_chunks::kScoreBytes,
                          const at::TensorOptions& options = at::kDouble) {
  return attention_results(
      [&](const auto& arguments) { return masked_chunks::tree_attention(arguments, score_bytes); },
      [&](const auto& arguments, const at::Tensor& grad_out, const at::Tensor&, const at::Tensor& lse) {
        return masked_chunks::tree_attention_backward(arguments, grad_out, lse, score_bytes);
      },
      problem, options);
}

/// Without the gradient of sinks, which implementations below the operator do not compute.
inline Results without_sinks(const AttentionProblem& problem, Results results) {
  if (problem.has_sinks) results.pop_back();
  return results;
}

/// The operator, with all that it returns.
inline espalier::detail::TreeAttentionResults call_operator(
    const espalier::detail::TreeAttentionArguments& arguments) {
  return espalier::detail::call<"tree_attention", espalier::detail::TreeAttentionResults>(arguments);
}

inline at::Tensor lse_in_float64(const AttentionProblem& problem) {
  return std::get<1>(call_operator(arguments_of(problem, problem.inputs)));
}

}  // namespace espalier::testing
