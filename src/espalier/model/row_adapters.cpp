// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/row_adapters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "espalier/base/check.h"

namespace espalier::accumulating {

RowAdapters::RowAdapters(const std::vector<AdapterMapsPtr>& node_maps,
                         std::vector<std::vector<int64_t>> begins)
    : begins_(std::move(begins)) {
  begins_.emplace_back(node_maps.size() + 1);
  std::iota(begins_.back().begin(), begins_.back().end(), int64_t{0});
  for (int64_t node = 0; node < std::ssize(node_maps); ++node) {
    if (node_maps[node] == nullptr) continue;
    if (!ranges_.empty() && ranges_.back().end == node && ranges_.back().maps == node_maps[node]) {
      ++ranges_.back().end;
    } else {
      ranges_.push_back({node_maps[node], node, node + 1});
    }
  }
}

std::vector<AdaptedRows> RowAdapters::of(const at::Tensor& weight, int64_t num_rows) const {
  std::vector<AdaptedRows> rows;
  if (num_rows == 0) return rows;
  for (const auto& [maps, first, last] : ranges_) {
    const auto found = maps->find(weight.const_data_ptr());
    if (found == maps->end()) continue;  // experts, for example, which see some of the rows
    const auto begin =
        std::ranges::find(begins_, num_rows, [](const std::vector<int64_t>& each) { return each.back(); });
    ESPALIER_ASSERT(begin != begins_.end());
    const int64_t count = (*begin)[last] - (*begin)[first];
    if (count > 0) rows.push_back({(*begin)[first], count, found->second});
  }
  return rows;
}

}  // namespace espalier::accumulating
