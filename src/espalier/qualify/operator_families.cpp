// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/operator_families.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "espalier/ops/edge_logprobs/blocks.h"
#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "espalier/ops/gemm/matrix_product.h"
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

using Distribute = EdgeDistribution (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        const at::Tensor&, const LogitTransform&);

struct DistributionOptions {
  const char* name;
  LogitTransform transform;  // without tensors
  bool bias = false, edge_temperature = false;
};

std::vector<DistributionOptions> distribution_options() {
  return {{.name = "no options", .transform = {}},
          {.name = "temperature", .transform = {.temperature = 0.75}},
          {.name = "softcap", .transform = {.softcap = 3}},
          {.name = "scale", .transform = {.logit_scale = 0.5}},
          {.name = "bias", .transform = {}, .bias = true},
          {.name = "temperatures of edges", .transform = {}, .edge_temperature = true},
          {.name = "all options",
           .transform = {.temperature = 0.75, .logit_scale = 0.5, .softcap = 3},
           .bias = true,
           .edge_temperature = true}};
}

// Inputs: hidden, weight, bias, gradients of both results, rows and targets of edges, temperatures.
OperatorProblem::Function distribution_function(Distribute distribute, const DistributionOptions& options) {
  return [distribute, options](const Tensors& in) {
    const auto run = [&](const Tensors& leaves) {
      LogitTransform transform = options.transform;
      if (options.bias) transform.bias = leaves[2];
      if (options.edge_temperature) transform.edge_temperature = in[7];
      const EdgeDistribution result = distribute(leaves[0], leaves[1], in[5], in[6], transform);
      return Tensors{result.logprobs, result.entropy};
    };
    Tensors leaves{in[0], in[1]};
    if (options.bias) leaves.push_back(in[2]);
    return with_autograd(run, leaves, {in[3], in[4]});
  };
}

// One edge per row: the plain form would sum edges of a row before the products.
OperatorProblem distribution_problem(const DistributionOptions& options, ProblemNumbers numbers) {
  constexpr int64_t kEdges = 260, kHidden = 16, kVocabulary = 700;
  OperatorProblem problem{
      .operation = fmt::format("edge_distribution with {}", options.name),
      .shape = fmt::format("{} edges, hidden size {}, vocabulary {}", kEdges, kHidden, kVocabulary)};
  problem.inputs = {numbers.elements({kEdges, kHidden}),
                    numbers.elements({kVocabulary, kHidden}),
                    numbers.elements({kVocabulary}),
                    numbers.sums({kEdges}),
                    numbers.sums({kEdges}),
                    {at::arange(kEdges), OperatorInput::Kind::kAsIs},
                    {numbers.indices(kEdges, kVocabulary), OperatorInput::Kind::kAsIs},
                    numbers.sums_from(0.5, {kEdges})};
  problem.ours = distribution_function(edge_distribution, options);
  problem.plain = distribution_function(reference::edge_distribution, options);
  const double floor = error_of_sum(kVocabulary);
  problem.results = {{"log-probabilities", floor},
                     {"entropies", floor},
                     {"gradient of hidden", floor},
                     {"gradient of weight", floor},
                     {"gradient of bias", floor}};
  return problem;
}

struct ProductSizes {
  int64_t m, k, n;
};

// Includes few results with many terms, for which libraries use split-k.
constexpr ProductSizes kProductSizes[] = {{1, 1, 1},        {1, 63, 65},      {65, 1023, 63},
                                          {1023, 65, 1},    {64, 256, 128},   {128, 8192, 256},
                                          {64, 16'384, 64}, {16, 32'768, 16}, {1, 16'384, 300}};
constexpr int64_t kManyTerms = 8192;

// Inputs: a [K, M], b [K, N], bias [N] and an initial sum [M, N]. Computes a^T b, with bias, and added to the
// sum.
Tensors multiplied(const Tensors& in) {
  const at::Tensor a = in[0].t(), &b = in[1];
  const at::Tensor sum = in[3].clone();
  detail::add_product(sum, a, b);
  return {detail::unrounded_product(a, b), detail::affine(a, b.t(), in[2]), sum};
}

/// `rounded`: bfloat16 products are rounded before they are added or converted to float32.
Tensors multiplied_plainly(const Tensors& in, bool rounded) {
  const at::Tensor a = in[0].t(), &b = in[1];
  const at::ScalarType sums = in[3].scalar_type();
  const at::Tensor product = rounded ? a.mm(b).to(sums) : a.to(sums).mm(b.to(sums));
  return {product, (product + in[2].to(sums)).to(a.scalar_type()), in[3] + product};
}

/// LibTorch's bfloat16 products, an option on the CPU, round results.
bool rounds_products(at::ScalarType dtype, c10::DeviceType kind) {
  return kind == c10::kCPU && detail::rounds_products(at::empty({0}, dtype));
}

OperatorProblem product_problem(const ProductSizes& sizes, ProblemNumbers numbers) {
  const auto [m, k, n] = sizes;
  OperatorProblem problem{.operation = k < kManyTerms ? "short products" : "long products",
                          .shape = fmt::format("{} x {} results of {} terms", m, n, k)};
  problem.inputs = {numbers.elements({k, m}), numbers.elements({k, n}), numbers.elements({n}),
                    numbers.sums({m, n})};
  problem.ours = multiplied;
  return problem;
}

}  // namespace

OperatorFamily head_family() {
  return {
      .name = "head", .dtypes = {at::kDouble, at::kFloat, at::kBFloat16}, .for_each_problem = visit_heads};
}

OperatorFamily distribution_family() {
  return {.name = "distribution",
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .for_each_problem =
              [](at::ScalarType dtype, const Visit& visit) {
                uint64_t seed = 200;
                for (const DistributionOptions& options : distribution_options()) {
                  visit(distribution_problem(options, ProblemNumbers(++seed, dtype)));
                }
              },
          .repeatable = false};
}

OperatorFamily product_family(c10::DeviceType kind) {
  return {.name = "products",
          .dtypes = {at::kDouble, at::kFloat, at::kBFloat16},
          .for_each_problem =
              [kind](at::ScalarType dtype, const Visit& visit) {
                uint64_t seed = 300;
                const bool rounded = rounds_products(dtype, kind);
                for (const ProductSizes& sizes : kProductSizes) {
                  OperatorProblem problem = product_problem(sizes, ProblemNumbers(++seed, dtype));
                  const double floor =
                      dtype == at::kBFloat16 ? error_of_tensor_core_sum(sizes.k) : error_of_sum(sizes.k);
                  problem.plain = [rounded](const Tensors& in) { return multiplied_plainly(in, rounded); };
                  problem.results = {
                      {"product", floor}, {"product with a bias", floor}, {"sum of products", floor}};
                  visit(problem);
                }
              },
          .repeatable = false};
}

}  // namespace espalier::qualify
