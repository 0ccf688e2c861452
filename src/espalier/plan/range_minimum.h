// SPDX-License-Identifier: Apache-2.0
// Minima of ranges of an array: a segment tree, with linear memory and logarithmic time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace espalier {

template <typename T>
class RangeMinimum {
 public:
  explicit RangeMinimum(const std::vector<T>& values = {}) : size_(values.size()), tree_(2 * values.size()) {
    std::copy(values.begin(), values.end(), tree_.begin() + static_cast<std::ptrdiff_t>(size_));
    for (size_t k = size_; k-- > 1;) tree_[k] = std::min(tree_[2 * k], tree_[2 * k + 1]);
  }

  /// The minimum over [first, last), which must not be empty.
  T operator()(size_t first, size_t last) const {
    T least = tree_[first + size_];
    for (first += size_, last += size_; first < last; first /= 2, last /= 2) {
      if (first % 2 == 1) least = std::min(least, tree_[first++]);
      if (last % 2 == 1) least = std::min(least, tree_[--last]);
    }
    return least;
  }

 private:
  size_t size_;
  std::vector<T> tree_;  // the values at [size, 2 size), the parent of k at k / 2
};

}  // namespace espalier
