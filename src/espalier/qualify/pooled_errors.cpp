// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/pooled_errors.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace espalier {
namespace {

constexpr double kMaxErrorRatio = 2, kMaxFloat64Error = 1e-12;
// The ratio of fewer errors is a matter of luck.
constexpr int64_t kLeastValues = 256;

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
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      TORCH_CHECK(false, "expected float32, bfloat16 or float16, received ", dtype);
  }
}

void PooledErrors::add(const std::string& name, const at::Tensor& ours, const at::Tensor& plain,
                       const at::Tensor& exact) {
  const at::Tensor target = wide(exact);
  const bool alike = ours.sizes() == exact.sizes() && ours.scalar_type() == dtype_;
  double error = alike ? sum_of_squares(wide(ours) - target) : std::numeric_limits<double>::infinity();
  if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
  ours_ += error;
  if (dtype_ != at::kDouble) plain_ += sum_of_squares(wide(plain) - target);
  exact_ += sum_of_squares(target);
  num_values_ += target.numel();
  const double mean = error / static_cast<double>(std::max<int64_t>(target.numel(), 1));
  if (mean > worst_) {
    worst_ = mean;
    worst_name_ = name;
  }
}

std::string PooledErrors::fault() const {
  const double size = exact_ > 0 ? std::sqrt(exact_) : 1;
  const double ours = std::sqrt(ours_) / size, plain = std::sqrt(plain_) / size;
  if (!std::isfinite(ours)) {
    return fmt::format("values that are not finite or of another shape or dtype, on the forest `{}`",
                       worst_name_);
  }
  if (dtype_ == at::kDouble) {
    if (ours <= kMaxFloat64Error) return "";
    return fmt::format("expected an error of at most {:g}, received {:.3g}, worst on the forest `{}`",
                       kMaxFloat64Error, ours, worst_name_);
  }
  if (num_values_ < kLeastValues) {
    return fmt::format("expected at least {} values to judge an error by, received {}", kLeastValues,
                       num_values_);
  }
  const double floor = unit_roundoff_of(dtype_) / 2;
  const double ratio = std::max(ours, floor) / std::max(plain, floor);
  if (ratio <= kMaxErrorRatio) return "";
  return fmt::format(
      "expected an error of at most {:g} times the plain form's, received {:.3g} times: {:.3g} beside "
      "{:.3g}, "
      "worst on the forest `{}`",
      kMaxErrorRatio, ratio, ours, plain, worst_name_);
}

}  // namespace espalier
