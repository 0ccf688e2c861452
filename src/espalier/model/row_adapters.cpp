// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/row_adapters.h"

#include <ATen/ATen.h>

#include <utility>

#include "espalier/base/check.h"
#include "espalier/ops/gemm/matrix_product.h"

namespace espalier::accumulating {

RowAdapters::RowAdapters(const std::vector<AdapterMapsPtr>& of_nodes, std::vector<int64_t> begin)
    : begin_(std::move(begin)) {
  for (int64_t node = 0; node < std::ssize(of_nodes); ++node) {
    if (of_nodes[node] == nullptr) continue;
    if (!ranges_.empty() && ranges_.back().end == node && ranges_.back().maps == of_nodes[node]) {
      ++ranges_.back().end;
    } else {
      ranges_.push_back({of_nodes[node], node, node + 1});
    }
  }
}

void RowAdapters::add_to(const at::Tensor& sum, const at::Tensor& x, const at::Tensor& weight) const {
  const bool has_all = !begin_.empty() && x.size(0) == begin_.back();
  for (const auto& [maps, first, last] : ranges_) {
    const auto found = maps->find(weight.const_data_ptr());
    if (found == maps->end()) continue;  // experts, for example, which see some of the rows
    ESPALIER_ASSERT(has_all || begin_.empty() || x.size(0) == std::ssize(begin_) - 1);
    const auto& [a, b, scale] = found->second;
    const int64_t begin = has_all ? begin_[first] : first, count = (has_all ? begin_[last] : last) - begin;
    const at::Tensor inner = detail::affine(x.narrow(0, begin, count).to(a.scalar_type()), a, {}).mul_(scale);
    detail::add_product(sum.narrow(0, begin, count), inner, b.t());
  }
}

}  // namespace espalier::accumulating
