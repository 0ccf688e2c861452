// SPDX-License-Identifier: Apache-2.0
// Checks of operators call by call: the LM head, matrix products.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "espalier/qualify/qualify.h"

namespace espalier::qualify {

struct OperatorInput {
  /// Its dtype in the check: the checked dtype, the accumulator dtype, or unchanged.
  enum class Kind { kElement, kSum, kAsIs };
  at::Tensor value{};  // on the CPU; float64 values that are exact in that dtype
  Kind kind = Kind::kElement;
};

struct OperatorResult {
  std::string name{};
  /// Relative error that any correct implementation may have; 0: only rounding of the result.
  double floor = 0;
};

/// One call of an operator with its backward.
struct OperatorProblem {
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  std::string operation{};  // "edge_logprobs": errors are pooled over the problems of one operation
  std::string shape{};      // "63 rows, 190 edges"
  std::vector<OperatorInput> inputs{};
  Function ours{}, plain{};  // return the results in order; ours runs on the device in the calling thread
  std::vector<OperatorResult> results{};
  bool apart = false;  // whether inputs of kind kElement are rows of larger matrices
};

struct OperatorFamily {
  std::string name{};
  std::vector<at::ScalarType> dtypes{};
  /// Calls visit for every problem.
  std::function<void(at::ScalarType dtype, const std::function<void(const OperatorProblem&)>& visit)>
      for_each_problem{};
  bool repeatable = true;  // whether results must be bitwise reproducible
};

/// Runs the family's problems, with output guards (ops/guarded_output.h), twice if `repeatable`. Compares
/// each kind of result by pooled_errors.h; the plain form is computed on the CPU, in float64 for exact values
/// and in the dtype. Stops at the first dtype with a fault.
Finding check_operators(const OperatorFamily& family, at::Device device);

/// The expected relative error of a sequential float32 sum of this many terms with random rounding errors:
/// sqrt(terms) / 2 unit roundoffs (Higham and Mary, "A new approach to probabilistic rounding error
/// analysis", 2019).
double error_of_sum(int64_t terms);

/// Like error_of_sum, for bfloat16 products by tensor cores, which truncate instead of rounding, once per 8
/// or more terms (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
double error_of_tensor_core_sum(int64_t terms);

}  // namespace espalier::qualify
