// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/causal_conv1d/taps.h"

#include "espalier/ops/paths.h"

namespace espalier::detail {

int64_t ConvolutionRows::before(int64_t row) const {
  if (row == 0) return 0;
  if (row < first_token_) return (row - 1) % history_ == 0 ? 0 : row - 1;
  const int32_t token = prev_[row - first_token_];
  if (token >= 0) return token_row(token);
  const int64_t context = context_of(token);
  return context < 0 || history_ == 0 ? 0 : (context + 1) * history_;
}

ConvolutionList convolution_list(std::span<const int32_t> prev, int64_t num_tails, int64_t taps) {
  const ConvolutionRows rows(prev, num_tails, taps);
  ConvolutionList list;
  for (int64_t t = 0; t < static_cast<int64_t>(prev.size()); ++t) {
    if (t == 0 || prev[t] != t - 1) {
      list.row.resize(list.row.size() + taps - 1);
      const int64_t first = static_cast<int64_t>(list.row.size());
      int64_t row = rows.token_row(t);
      for (int64_t j = 1; j < taps; ++j) {
        row = rows.before(row);
        list.row[first - j] = row;
        if (row == 0) continue;
        list.history_place.push_back(first - j);
        list.history_row.push_back(row);
      }
    }
    list.own.push_back(static_cast<int64_t>(list.row.size()));
    list.row.push_back(rows.token_row(t));
  }
  return list;
}

std::vector<int64_t> tail_rows(std::span<const int32_t> prev, int64_t num_tails, int64_t taps,
                               std::span<const int64_t> ends) {
  const ConvolutionRows rows(prev, num_tails, taps);
  const int64_t history = taps - 1;
  std::vector<int64_t> result(ends.size() * history);
  for (size_t e = 0; e < ends.size(); ++e) {
    int64_t row = rows.token_row(ends[e]);
    for (int64_t j = history - 1; j >= 0; --j, row = rows.before(row)) result[e * history + j] = row;
  }
  return result;
}

}  // namespace espalier::detail
