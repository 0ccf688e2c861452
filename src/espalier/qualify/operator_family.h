// SPDX-License-Identifier: Apache-2.0
// Operators that are checked call by call: elementwise parts, the LM head, products of matrices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "espalier/qualify/qualify.h"

namespace espalier::qualify {

struct OperatorInput {
  /// What it is converted to: the dtype that is checked, that of its sums (float64 for float64, otherwise
  /// float32), or nothing.
  enum class Kind { kElement, kSum, kAsIs };
  at::Tensor value{};  // on the CPU; numbers in float64, which that dtype holds exactly
  Kind kind = Kind::kElement;
};

struct OperatorResult {
  std::string name{};
  /// An error, relative to the exact result, that every right way of computing it may have. 0: only that of
  /// rounding the result.
  double floor = 0;
};

/// How inputs of kind kElement lie in memory.
enum class Layout {
  kPlain,      // contiguous, and aligned as allocators do
  kUnaligned,  // contiguous, from the second element of an allocation on
  kApart,      // rows of a wider matrix; of a vector every second element
};

/// One call of an operator, forward and backward.
struct OperatorProblem {
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  std::string operation{};  // "rms_norm": errors are pooled over the problems of one operation
  std::string shape{};      // "65 rows of 63"
  std::vector<OperatorInput> inputs{};
  Function ours{}, plain{};  // of results in their order; ours on the device, by the calling thread
  std::vector<OperatorResult> results{};
  Layout layout = Layout::kPlain;
};

struct OperatorFamily {
  std::string name{};
  std::vector<at::ScalarType> dtypes{};
  /// Calls visit for every problem, one after another.
  std::function<void(at::ScalarType dtype, const std::function<void(const OperatorProblem&)>& visit)>
      for_each_problem{};
  bool repeatable = true;  // whether results of equal bits in every run are promised
};

/// Runs the family's problems, with guards around what it writes (ops/guarded_output.h) and, where that is
/// promised, twice for equal bits. Judges each kind of result by pooled_errors.h: the plain form is computed
/// on the CPU, in float64 for the exact values and in the dtype. Stops at the first dtype with a fault.
Finding check_operators(const OperatorFamily& family, at::Device device);

/// The relative error that a sum of so many terms may have when it is added up one after another in float32,
/// where roundings fall at random: sqrt(terms) / 2 unit roundoffs (Higham and Mary, "A new approach to
/// probabilistic rounding error analysis", 2019).
double error_of_sum(int64_t terms);

/// Of a value in float32 that exp, a reciprocal or the root of one is in: those of a GPU are right to one or
/// two units in the last place (CUDA C++ Programming Guide, "Mathematical Functions").
constexpr double kErrorOfFunctions = 0x1p-24;

/// As error_of_sum, of products in bfloat16 by tensor cores, which cut off instead of rounding, once for so
/// many terms as they multiply at a time, 8 or more (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior
/// of NVIDIA tensor cores", 2021).
double error_of_tensor_core_sum(int64_t terms);

}  // namespace espalier::qualify
