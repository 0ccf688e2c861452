// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/bin_packing.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "espalier/base/interrupt.h"

namespace espalier {

std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::vector<int64_t>> bins;
  std::set<std::pair<int64_t, int64_t>> open;  // (free tokens, bin)
  for (const int64_t item : order) {
    check_interrupt();
    const auto fit = open.lower_bound({sizes[item], 0});
    std::pair<int64_t, int64_t> bin{capacity, static_cast<int64_t>(bins.size())};
    if (fit == open.end()) {
      bins.emplace_back();
    } else {
      bin = *fit;
      open.erase(fit);
    }
    bins[bin.second].push_back(item);
    if (bin.first > sizes[item]) open.emplace(bin.first - sizes[item], bin.second);
  }
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  return bins;
}

}  // namespace espalier
