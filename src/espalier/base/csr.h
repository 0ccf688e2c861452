// SPDX-License-Identifier: Apache-2.0
// Ragged arrays in compressed sparse row form.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// Rows of different lengths in two flat arrays. Row r is values[offsets[r], offsets[r + 1]).
template <typename T>
struct Csr {
  std::vector<int64_t> offsets{0};  // [num_rows + 1], ascending, offsets[0] == 0
  std::vector<T> values;            // [offsets.back()]

  int64_t num_rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t row_size(int64_t r) const { return offsets[r + 1] - offsets[r]; }
  std::span<const T> row(int64_t r) const {
    return {values.data() + offsets[r], static_cast<size_t>(row_size(r))};
  }
  std::span<T> row(int64_t r) { return {values.data() + offsets[r], static_cast<size_t>(row_size(r))}; }

  /// Ends the current row: what was pushed to `values` since the last call belongs to it.
  void end_row() { offsets.push_back(static_cast<int64_t>(values.size())); }
  void push_row(std::span<const T> row) {
    values.insert(values.end(), row.begin(), row.end());
    end_row();
  }
};

}  // namespace espalier
