// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/pooled_errors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace espalier::qualify {
namespace {

constexpr double kMaxFloat64Error = 1e-12;

double sum_of_squares(const at::Tensor& tensor) {
  return tensor.square().sum().item<double>();
}

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.detach().to(at::TensorOptions(at::kCPU).dtype(at::kDouble));
}

}  // namespace

double unit_roundoff_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kFloat32Roundoff;
    case at::kHalf:
      return kFloat16Roundoff;
    case at::kBFloat16:
      return kBFloat16Roundoff;
    default:
      TORCH_CHECK(false, "expected float32, bfloat16 or float16, received ", dtype);
  }
}

void PooledErrors::add(const std::string& name, const at::Tensor& ours, const at::Tensor& plain,
                       const at::Tensor& exact, double floor) {
  const at::Tensor target = wide(exact);
  const bool alike = ours.sizes() == exact.sizes() && ours.scalar_type() == dtype_;
  double error = alike ? sum_of_squares(wide(ours) - target) : std::numeric_limits<double>::infinity();
  if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
  const double size = sum_of_squares(target);
  errors_ += {.ours = error,
              .plain = dtype_ == at::kDouble ? 0 : sum_of_squares(wide(plain) - target),
              .exact = size,
              .num_values = target.numel()};
  floor_ += floor * floor * size;
  const double mean = error / static_cast<double>(std::max<int64_t>(target.numel(), 1));
  if (mean > worst_) {
    worst_ = mean;
    worst_name_ = name;
  }
}

std::string PooledErrors::fault() const {
  const double size = errors_.exact > 0 ? std::sqrt(errors_.exact) : 1;
  const double ours = std::sqrt(errors_.ours) / size, plain = std::sqrt(errors_.plain) / size;
  if (!std::isfinite(ours)) {
    return fmt::format("values that are not finite or of another shape or dtype, on {}", worst_name_);
  }
  if (dtype_ == at::kDouble) {
    if (ours <= kMaxFloat64Error) return "";
    return fmt::format("expected an error of at most {:g}, received {:.3g}, worst on {}", kMaxFloat64Error,
                       ours, worst_name_);
  }
  const auto num_values = static_cast<double>(errors_.num_values);
  if (errors_.num_values < kMinPooledValues) {
    return fmt::format("expected at least {} values to judge an error by, received {}", kMinPooledValues,
                       errors_.num_values);
  }
  const double ratio = error_ratio(errors_, {unit_roundoff_of(dtype_), std::sqrt(floor_ / num_values)});
  if (ratio <= kMaxErrorRatio) return "";
  return fmt::format(
      "expected an error of at most {:g} times the plain form's, received {:.3g} times: {:.3g} beside "
      "{:.3g}, worst on {}",
      kMaxErrorRatio, ratio, ours, plain, worst_name_);
}

}  // namespace espalier::qualify
