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
using AdapterMaps = std::unordered_map<const void*, LowRank>;
using AdapterMapsPtr = std::shared_ptr<const AdapterMaps>;  // null: no adapter

/// While it lives (RowAdapterScope), projections of an adapted weight add to each row of x [T, in] what the
/// adapter of the row adds. The product with the weight is one of all rows (multi-LoRA batching: Punica, Chen
/// et al. 2023; S-LoRA, Sheng et al. 2023). For passes without gradients.
class RowAdapters {
 public:
  static constexpr detail::Scope kScope = detail::Scope::kRowAdapters;

  /// `of_nodes`: the adapter of each node, or none at all. x has the tokens of the nodes, [begin[n], begin[n
  /// + 1]) of node n, or one row for each node; `begin` may be empty where that is always so.
  RowAdapters(const std::vector<AdapterMapsPtr>& of_nodes, std::vector<int64_t> begin);

  bool empty() const { return ranges_.empty(); }

  /// sum [T, out] += scale (x a^T) b^T, row by row; in the dtype of sums.
  void add_to(const at::Tensor& sum, const at::Tensor& x, const at::Tensor& weight) const;

 private:
  struct Range {
    AdapterMapsPtr maps;
    int64_t begin, end;  // nodes
  };
  std::vector<Range> ranges_;
  std::vector<int64_t> begin_;
};

using RowAdapterScope = detail::ScopedValue<RowAdapters>;

}  // namespace espalier::accumulating
