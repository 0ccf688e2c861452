// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "espalier/qualify/operator_families.h"
#include "espalier/qualify/problem_numbers.h"

namespace espalier::qualify {
namespace {

using Tensors = std::vector<at::Tensor>;
using Visit = std::function<void(const OperatorProblem&)>;

struct HeadSizes {
  int64_t rows, edges, hidden, vocabulary;
  LogitBlock block{};  // empty: the default of the operator
};

constexpr HeadSizes kWholeHeads[] = {
    {63, 190, 8, 65}, {63, 190, 24, 1023}, {65, 20, 64, 576}, {1023, 3000, 16, 2801}, {130, 260, 200, 2003}};
constexpr HeadSizes kCutHeads[] = {
    {301, 700, 32, 1300, {128, 512}}, {301, 700, 32, 1300, {301, 100}}, {301, 700, 32, 1300, {7, 1300}}};

at::Tensor zero_sums(const at::Tensor& like) {
  return at::zeros(like.sizes(), like.options().dtype(detail::accumulator_dtype(like.scalar_type())));
}

// Inputs: hidden, weight, upstream gradient, rows and targets of edges.
Tensors by_operator(const Tensors& in) {
  const auto [logprobs, lse] = edge_logprobs_forward(in[0], in[1], in[3], in[4]);
  const at::Tensor grad_weight = zero_sums(in[1]);
  const at::Tensor grad_hidden = edge_logprobs_backward(in[2], in[0], in[1], in[3], in[4], lse, grad_weight);
  return {logprobs, grad_hidden, grad_weight.to(in[1].scalar_type())};
}

Tensors by_blocks(const Tensors& in, const LogitBlock& block) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto [logprobs, lse] = detail::edge_logprobs_by_blocks(in[0], in[1], in[3], in[4], block);
  const at::Tensor grad_hidden = zero_sums(in[0]), grad_weight = zero_sums(in[1]);
  detail::add_edge_logprobs_gradients({in[2], {in[0], in[1], in[3], in[4]}, lse}, grad_hidden, grad_weight,
                                      block);
  return {logprobs, grad_hidden.to(in[0].scalar_type()), grad_weight.to(in[1].scalar_type())};
}

Tensors plain_logprobs(const Tensors& in) {
  return with_autograd(
      [&](const Tensors& leaves) {
        return Tensors{reference::edge_logprobs(leaves[0], leaves[1], in[3], in[4])};
      },
      {in[0], in[1]}, {in[2]});
}

OperatorProblem head_problem(const HeadSizes& sizes, ProblemNumbers& numbers) {
  const at::Tensor row = std::get<0>(numbers.indices(sizes.edges, sizes.rows).sort());
  OperatorProblem problem{.operation = "edge_logprobs",
                          .shape = fmt::format("{} rows, {} edges, hidden size {}, vocabulary {}", sizes.rows,
                                               sizes.edges, sizes.hidden, sizes.vocabulary)};
  problem.inputs = {numbers.elements({sizes.rows, sizes.hidden}),
                    numbers.elements({sizes.vocabulary, sizes.hidden}),
                    numbers.sums({sizes.edges}),
                    {row, OperatorInput::Kind::kAsIs},
                    {numbers.indices(sizes.edges, sizes.vocabulary), OperatorInput::Kind::kAsIs}};
  problem.ours = by_operator;
  problem.plain = plain_logprobs;
  const double floor = error_of_sum(std::max({sizes.rows, sizes.hidden, sizes.vocabulary}));
  problem.results = {
      {"log-probabilities", floor}, {"gradient of hidden", floor}, {"gradient of weight", floor}};
  if (sizes.block.num_rows > 0) {
    problem.operation += " by blocks";
    problem.shape += fmt::format(", blocks of {} x {}", sizes.block.num_rows, sizes.block.num_columns);
    problem.ours = [block = sizes.block](const Tensors& in) { return by_blocks(in, block); };
  }
  return problem;
}

// Logits near +-10,000 that are exact in float32, so that only errors of softmax remain.
void make_extreme(OperatorProblem& problem, at::ScalarType dtype) {
  problem.operation = "edge_logprobs of large logits";
  problem.results[0].floor = 0;
  at::Tensor &hidden = problem.inputs[0].value, &weight = problem.inputs[1].value;
  for (at::Tensor* values : {&hidden, &weight}) values->mul_(8).round_().div_(8);
  hidden.select(1, 0).sign_().mul_(100);
  weight.select(1, 0).fill_(100);
  for (at::Tensor* values : {&hidden, &weight}) *values = values->to(dtype).to(at::kDouble);
}

void visit_heads(at::ScalarType dtype, const Visit& visit) {
  uint64_t seed = 100;
  for (const HeadSizes& sizes : kWholeHeads) {
    ProblemNumbers numbers(++seed, dtype);
    visit(head_problem(sizes, numbers));
  }
  for (const HeadSizes& sizes : kCutHeads) {
    ProblemNumbers numbers(++seed, dtype);
    visit(head_problem(sizes, numbers));
  }
  ProblemNumbers numbers(++seed, dtype);
  OperatorProblem one_row = head_problem({300, 400, 8, 1300}, numbers);
  one_row.shape += ", all edges of one row";
  one_row.inputs[3].value.fill_(4);
  visit(one_row);
  OperatorProblem apart = head_problem({130, 260, 24, 1023}, numbers);
  apart.shape += ", apart in memory";
  apart.apart = true;
  visit(apart);
  if (dtype == at::kDouble) return;  // rounding of such logits causes gradient errors above 1e-12
  OperatorProblem extreme = head_problem({270, 800, 5, 1023}, numbers);
  make_extreme(extreme, dtype);
  visit(extreme);
}

}  // namespace

OperatorFamily head_family() {
  return {
      .name = "head", .dtypes = {at::kDouble, at::kFloat, at::kBFloat16}, .for_each_problem = visit_heads};
}

}  // namespace espalier::qualify
