// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/qualify/operator_families.h"
#include "espalier/qualify/problem_numbers.h"

namespace espalier::qualify {
namespace {

using Tensors = std::vector<at::Tensor>;
using Visit = std::function<void(const OperatorProblem&)>;

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
