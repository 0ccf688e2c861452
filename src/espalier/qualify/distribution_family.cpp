// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "espalier/ops/edge_logprobs/edge_distribution.h"
#include "espalier/qualify/operator_families.h"
#include "espalier/qualify/problem_numbers.h"

namespace espalier::qualify {
namespace {

using Tensors = std::vector<at::Tensor>;
using Visit = std::function<void(const OperatorProblem&)>;
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

}  // namespace

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

}  // namespace espalier::qualify
