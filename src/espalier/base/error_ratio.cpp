// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/error_ratio.h"

#include <fmt/format.h>

namespace espalier {

std::string error_fault(const SquaredErrors& errors, const ErrorFloor& floor) {
  if (errors.num_values < kMinPooledValues) {
    return fmt::format("expected at least {} values to judge an error by, received {}", kMinPooledValues,
                       errors.num_values);
  }
  const double ratio = error_ratio(errors, floor);
  if (ratio <= kMaxErrorRatio) return "";
  const double size = errors.exact > 0 ? std::sqrt(errors.exact) : 1;
  return fmt::format(
      "expected an error of at most {:g} times the plain form's, received {:.3g} times: {:.3g} beside {:.3g}",
      kMaxErrorRatio, ratio, std::sqrt(errors.ours) / size, std::sqrt(errors.plain) / size);
}

}  // namespace espalier
