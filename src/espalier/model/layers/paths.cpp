// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/layers/paths.h"

#include <ATen/ATen.h>

#include <vector>

namespace espalier {

Paths::Paths(const NodeStructure& nodes) : prev(at::tensor(nodes.prev, at::kInt)) {
  std::vector<int64_t> last;
  for (const int64_t node : nodes.cuts) last.push_back(nodes.begin[node + 1] - 1);
  ends = at::tensor(last, at::kLong);
}

}  // namespace espalier
