// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/gemm_rates.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/median.h"
#include "espalier/ops/gemm/matrix_product.h"

namespace espalier {
namespace {

using Clock = std::chrono::steady_clock;

/// Operands of one linear map and its gradients, in one dtype.
struct Operands {
  at::Tensor x, weight, grad;
  at::Tensor sum;  // of the weight's gradients, float32

  Operands(const LinearShape& shape, at::ScalarType dtype)
      : x(at::randn({shape.rows, shape.in}).to(dtype)),
        weight(at::randn({shape.out, shape.in}).to(dtype)),
        grad(at::randn({shape.rows, shape.out}).to(dtype)),
        sum(at::zeros({shape.out, shape.in})) {}

  void multiply(LinearPart part) const {
    if (part == LinearPart::kForward) {
      detail::affine(x, weight, {});
    } else if (part == LinearPart::kGradientOfInput) {
      detail::affine(grad, weight.t(), {});
    } else {
      detail::add_product(sum, grad.t(), x);
    }
  }
};

double seconds_of(const Operands& operands, LinearPart part, const ProductChoice& choice) {
  const KernelScope scope(with_products(choice));
  const auto begin = Clock::now();
  operands.multiply(part);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

std::vector<LinearShape> linear_shapes(const ModelSpec& spec, int64_t rows) {
  constexpr int64_t kMostColumns = 16'384;
  const int64_t hidden = spec.hidden_size;
  std::vector<LinearShape> shapes;
  if (const SsmSpec* ssm = spec.ssm()) {
    shapes.push_back({"state space's inputs", rows, hidden, ssm->projection_size()});
    shapes.push_back({"state space's output", rows, ssm->inner_size(), hidden});
  }
  if (const AttentionSpec* attention = spec.attention()) {
    const int64_t query = attention->num_attention_heads * attention->head_dim;
    const int64_t key = attention->num_key_value_heads * attention->head_dim;
    shapes.push_back({"queries", rows, hidden, query});
    if (key != query) shapes.push_back({"keys, values", rows, hidden, key});
    if (query != hidden) shapes.push_back({"attention's output", rows, query, hidden});
  }
  if (spec.dense_mlp() != nullptr || spec.moe() != nullptr) {
    const int64_t inner =
        spec.dense_mlp() != nullptr ? spec.dense_mlp()->intermediate_size : spec.moe()->moe_intermediate_size;
    shapes.push_back({"gate, up", rows, hidden, inner});
    shapes.push_back({"down", rows, inner, hidden});
  }
  shapes.push_back({"head", rows, hidden, std::min(spec.vocab_size, kMostColumns)});
  return shapes;
}

std::string_view to_string(LinearPart part) {
  switch (part) {
    case LinearPart::kForward:
      return "forward";
    case LinearPart::kGradientOfInput:
      return "gradient of input";
    case LinearPart::kGradientOfWeight:
      return "gradient of weight";
  }
  throw InternalError("unknown part of a linear map");
}

std::string ProductWay::name() const {
  const std::string of_float32 = choice.float32 == Float32Products::kPanels ? "panels" : "library";
  if (dtype == at::kFloat) return "float32 " + of_float32;
  switch (choice.bfloat16) {
    case Bfloat16Products::kUpcast:
      return "bfloat16 upcast (" + of_float32 + ")";
    case Bfloat16Products::kNative:
      return "bfloat16 native";
    case Bfloat16Products::kLibrary:
      return "bfloat16 library";
  }
  throw InternalError("unknown products of bfloat16");
}

std::vector<ProductWay> product_ways() {
  using enum Bfloat16Products;
  const InstructionSet level = instruction_set();
  std::vector<Float32Products> float32{Float32Products::kLibrary};
  if (level >= InstructionSet::kAvx512) float32.push_back(Float32Products::kPanels);
  std::vector<ProductWay> ways;
  for (const Float32Products products : float32) ways.push_back({at::kFloat, {products, kUpcast}});
  for (const Float32Products products : float32) ways.push_back({at::kBFloat16, {products, kUpcast}});
  ways.push_back({at::kBFloat16, {Float32Products::kLibrary, kLibrary}});
  if (level >= InstructionSet::kAvx512Bf16)
    ways.push_back({at::kBFloat16, {Float32Products::kLibrary, kNative}});
  return ways;
}

double GemmRates::flops_per_second(size_t way) const {
  return 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.in * shape.out) /
         median(seconds[way]);
}

double GemmRates::ratio(size_t way, size_t to) const {
  std::vector<double> ratios;
  for (size_t round = 0; round < seconds[way].size(); ++round) {
    ratios.push_back(seconds[way][round] / seconds[to][round]);
  }
  return median(std::move(ratios));
}

std::vector<GemmRates> measure_gemm_rates(const std::vector<LinearShape>& shapes,
                                          const std::vector<ProductWay>& ways, int64_t rounds) {
  const at::NoGradGuard no_grad;
  std::vector<GemmRates> all;
  for (const LinearShape& shape : shapes) {
    const Operands float32(shape, at::kFloat), bfloat16(shape, at::kBFloat16);
    for (const LinearPart part : kLinearParts) {
      std::vector<std::vector<double>> seconds(ways.size());
      for (int64_t round = 0; round <= rounds; ++round) {  // the first one fills caches
        for (size_t way = 0; way < ways.size(); ++way) {
          const Operands& operands = ways[way].dtype == at::kFloat ? float32 : bfloat16;
          const double spent = seconds_of(operands, part, ways[way].choice);
          if (round > 0) seconds[way].push_back(spent);
        }
      }
      all.push_back({shape, part, std::move(seconds)});
    }
  }
  return all;
}

}  // namespace espalier
