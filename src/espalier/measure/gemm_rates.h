// SPDX-License-Identifier: Apache-2.0
// How fast this machine multiplies matrices, in every way that it can.
#pragma once

#include <ATen/core/ScalarType.h>

#include <string>
#include <string_view>
#include <vector>

#include "espalier/config/layer_spec.h"
#include "espalier/ops/kernels/cpu/products/product_choice.h"

namespace espalier {

/// A linear map of `rows` tokens: y [rows, out] = x [rows, in] weight^T.
struct LinearShape {
  std::string name;
  int64_t rows;
  int64_t in;
  int64_t out;
};

/// The different linear maps of a model's layers, and the LM head (at most 16,384 of its columns, as a
/// sample), on the given number of tokens.
std::vector<LinearShape> linear_shapes(const ModelSpec& spec, int64_t rows);

enum class LinearPart { kForward, kGradientOfInput, kGradientOfWeight };
inline constexpr LinearPart kLinearParts[] = {LinearPart::kForward, LinearPart::kGradientOfInput,
                                              LinearPart::kGradientOfWeight};
std::string_view to_string(LinearPart part);

/// A way to multiply matrices of a dtype.
struct ProductWay {
  at::ScalarType dtype;
  ProductChoice choice;

  /// "float32 library", "bfloat16 native", "bfloat16 upcast (float32 panels)", ...
  std::string name() const;
  bool operator==(const ProductWay&) const = default;
};

/// The ways that this machine has instructions for; LibTorch's always.
std::vector<ProductWay> product_ways();

/// What one part of a linear map took.
struct GemmRates {
  LinearShape shape;
  LinearPart part;
  std::vector<std::vector<double>> seconds;  // [way][round]

  /// Of the median round.
  double flops_per_second(size_t way) const;
  /// The median over the rounds of one way's seconds / another's.
  double ratio(size_t way, size_t to) const;
};

/// Measures products as training makes them (ops/gemm/matrix_product.h: operands in their own dtype,
/// gradients of weights added to sums in float32), all ways in turn, `rounds` times, so that what else the
/// machine does meets all of them. Restores the products' choice.
std::vector<GemmRates> measure_gemm_rates(const std::vector<LinearShape>& shapes,
                                          const std::vector<ProductWay>& ways, int64_t rounds);

}  // namespace espalier
