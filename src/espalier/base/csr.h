// SPDX-License-Identifier: Apache-2.0
// Ragged arrays in compressed sparse row form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
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

/// Row p: the i with label[i] == p, ascending. Labels below 0 are in no row. O(label.size() + num_rows).
inline Csr<int64_t> grouped(std::span<const int64_t> label, int64_t num_rows) {
  Csr<int64_t> rows;
  rows.offsets.assign(num_rows + 1, 0);
  for (const int64_t p : label) {
    if (p >= 0) ++rows.offsets[p + 1];
  }
  std::partial_sum(rows.offsets.begin(), rows.offsets.end(), rows.offsets.begin());
  rows.values.resize(rows.offsets.back());
  std::vector<int64_t> next(rows.offsets.begin(), rows.offsets.end() - 1);
  for (size_t i = 0; i < label.size(); ++i) {
    if (label[i] >= 0) rows.values[next[label[i]]++] = static_cast<int64_t>(i);
  }
  return rows;
}

}  // namespace espalier
