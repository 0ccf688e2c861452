// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/pooled_errors.h"

#include <fmt/format.h>

#include "espalier/ops/tensor_errors.h"

namespace espalier::qualify {

void PooledErrors::add(const std::string& name, const at::Tensor& ours, const at::Tensor& plain,
                       const at::Tensor& exact, double floor) {
  SquaredErrors errors = squared_errors(ours, dtype_ == at::kDouble ? exact : plain, exact);
  if (ours.scalar_type() != dtype_) errors.ours = std::numeric_limits<double>::infinity();
  errors_ += errors;
  floor_ += floor * floor * errors.exact;
  const double mean = errors.ours / static_cast<double>(std::max<int64_t>(errors.num_values, 1));
  if (mean > worst_) {
    worst_ = mean;
    worst_name_ = name;
  }
}

std::string PooledErrors::fault() const {
  if (!std::isfinite(errors_.ours)) {
    return fmt::format("values that are not finite or of another shape or dtype, on {}", worst_name_);
  }
  if (dtype_ == at::kDouble) {
    constexpr double kMaxFloat64Error = 1e-12;
    const double error = std::sqrt(errors_.ours / (errors_.exact > 0 ? errors_.exact : 1));
    if (error <= kMaxFloat64Error) return "";
    return fmt::format("expected an error of at most {:g}, received {:.3g}, worst on {}", kMaxFloat64Error,
                       error, worst_name_);
  }
  const double floor = std::sqrt(floor_ / static_cast<double>(std::max<int64_t>(errors_.num_values, 1)));
  const std::string fault = error_fault(errors_, {unit_roundoff(dtype_), floor});
  return fault.empty() ? "" : fmt::format("{}, worst on {}", fault, worst_name_);
}

}  // namespace espalier::qualify
