// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {

/// The middle value, or the mean of the two in the middle. NaN sorts after every number. `values` must not be
/// empty.
inline double median(std::vector<double> values) {
  ESPALIER_ASSERT(!values.empty());
  std::sort(values.begin(), values.end(),
            [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; });
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace espalier
