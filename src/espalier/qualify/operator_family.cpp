// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/operator_family.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "espalier/base/interrupt.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/qualify/pooled_errors.h"

namespace espalier::qualify {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor converted(const OperatorInput& input, at::ScalarType dtype) {
  switch (input.kind) {
    case OperatorInput::Kind::kElement:
      return input.value.to(dtype);
    case OperatorInput::Kind::kSum:
      return input.value.to(detail::accumulator_dtype(dtype));
    case OperatorInput::Kind::kAsIs:
      return input.value;
  }
  return input.value;
}

/// A copy whose rows are those of a wider tensor.
at::Tensor apart(const at::Tensor& tensor) {
  std::vector<int64_t> wider = tensor.sizes().vec();
  wider.back() += 3;
  return at::empty(wider, tensor.options()).slice(-1, 0, tensor.size(-1)).copy_(tensor);
}

Tensors results_of_plain_form(const OperatorProblem& problem, at::ScalarType dtype) {
  Tensors inputs;
  for (const OperatorInput& input : problem.inputs) inputs.push_back(converted(input, dtype));
  return problem.plain(inputs);
}

// Checks one dtype.
class OperatorCheck {
 public:
  OperatorCheck(const OperatorFamily& family, at::ScalarType dtype, at::Device device)
      : family_(family), dtype_(dtype), device_(device) {}

  /// The fault; empty: none.
  std::string fault() {
    std::string first;
    family_.for_each_problem(dtype_, [&](const OperatorProblem& problem) {
      if (!first.empty()) return;
      check_interrupt();
      if (const std::string wrong = run(problem); !wrong.empty()) {
        first = fmt::format("{}, {}: {}", problem.operation, problem.shape, wrong);
      }
    });
    if (!first.empty()) return first;
    for (const auto& [name, errors] : errors_) {
      if (const std::string wrong = errors.fault(); !wrong.empty()) return name + ": " + wrong;
    }
    return "";
  }
  int64_t checks() const { return checks_; }

 private:
  std::string run(const OperatorProblem& problem) {
    const Tensors exact = results_of_plain_form(problem, at::kDouble);
    const Tensors plain = dtype_ == at::kDouble ? exact : results_of_plain_form(problem, dtype_);
    Tensors inputs;
    for (const OperatorInput& input : problem.inputs) {
      const at::Tensor moved = converted(input, dtype_).to(device_);
      const bool placed = problem.apart && input.kind == OperatorInput::Kind::kElement;
      inputs.push_back(placed ? apart(moved) : moved);
    }
    bool within = false;
    const Tensors ours = guarded_results(problem, inputs, &within);
    if (!within) return "writes beyond its outputs";
    if (ours.size() != exact.size()) return "lacks results";
    for (size_t i = 0; i < exact.size(); ++i) {
      const auto& [name, floor] = problem.results.at(i);
      errors_.try_emplace(fmt::format("{}: {}", problem.operation, name), plain[i].scalar_type())
          .first->second.add(problem.shape, ours[i], plain[i], exact[i], floor);
      ++checks_;
    }
    if (!family_.repeatable) return "";
    const Tensors again = problem.ours(inputs);
    for (size_t i = 0; i < ours.size(); ++i) {
      if (!same_bits(ours[i], again.at(i))) return problem.results[i].name + " has other bits in another run";
    }
    return "";
  }

  static Tensors guarded_results(const OperatorProblem& problem, const Tensors& inputs, bool* within) {
    const OutputGuards guards;
    Tensors results = problem.ours(inputs);
    *within = guards.broken() == 0;
    return results;
  }

  const OperatorFamily& family_;
  at::ScalarType dtype_;
  at::Device device_;
  std::map<std::string, PooledErrors> errors_{};  // by operation and result
  int64_t checks_ = 0;
};

}  // namespace

double error_of_sum(int64_t terms) {
  return std::sqrt(static_cast<double>(terms)) * kFloat32Roundoff / 2;
}

double error_of_tensor_core_sum(int64_t terms) {
  constexpr double kTermsAtATime = 8;
  return std::max(error_of_sum(terms), static_cast<double>(terms) / kTermsAtATime * kFloat32Roundoff / 2);
}

Finding check_operators(const OperatorFamily& family, at::Device device) {
  Finding finding;
  for (const at::ScalarType dtype : family.dtypes) {
    OperatorCheck check(family, dtype, device);
    const std::string fault = check.fault();
    finding.checks += check.checks();
    if (fault.empty()) continue;
    finding.fault = fmt::format("{}, {}", c10::toString(dtype), fault);
    return finding;
  }
  return finding;
}

}  // namespace espalier::qualify
