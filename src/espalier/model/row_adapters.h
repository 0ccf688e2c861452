// SPDX-License-Identifier: Apache-2.0
// Passes whose rows have different adapters of one model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "espalier/model/gradient_accumulation.h"
#include "espalier/ops/scoped_value.h"

namespace espalier::accumulating {

/// The matrices of an adapter, by the data of the weights to whose projections they are added.
struct AdapterMaps : std::unordered_map<const void*, LowRank> {};
using AdapterMapsPtr = std::shared_ptr<const AdapterMaps>;  // null: no adapter

/// What is added to the projections of the rows [begin, begin + count) of x.
struct AdaptedRows {
  int64_t begin, count;
  LowRank adapter;
};

/// While it lives (RowAdapterScope), projections of an adapted weight add to each row of x [T, in] what the
/// adapter of the row adds. The product with the weight is one of all rows (multi-LoRA batching: Punica, Chen
/// et al. 2023; S-LoRA, Sheng et al. 2023).
class RowAdapters {
 public:
  static constexpr detail::Scope kScope = detail::Scope::kRowAdapters;

  /// `node_maps` [N]: the adapter of each node. x has the rows [begin[n], begin[n + 1]) of node n, for one of
  /// the `begins` [N + 1], or one row for each node.
  RowAdapters(const std::vector<AdapterMapsPtr>& node_maps, std::vector<std::vector<int64_t>> begins);

  /// The rows of an x of `num_rows` rows for which there is an adapter of the weight, ascending.
  std::vector<AdaptedRows> of(const at::Tensor& weight, int64_t num_rows) const;

 private:
  struct Range {
    AdapterMapsPtr maps;
    int64_t begin, end;  // nodes
  };
  std::vector<Range> ranges_;
  std::vector<std::vector<int64_t>> begins_;
};

using RowAdapterScope = detail::ScopedValue<RowAdapters>;

}  // namespace espalier::accumulating
