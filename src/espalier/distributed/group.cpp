// SPDX-License-Identifier: Apache-2.0
#include "espalier/distributed/group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace espalier {
namespace {

class Alone : public Group {
 public:
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  std::vector<std::string> gather(const std::string& bytes) const override { return {bytes}; }
  void add_up(const std::vector<at::Tensor>&) const override {}
};

}  // namespace

std::vector<double> Group::from_first(const std::vector<double>& values) const {
  return add_up(is_first() ? values : std::vector<double>(values.size()));
}

std::vector<double> Group::reduce(const std::vector<double>& values,
                                  const std::vector<RankReduction>& ways) const {
  const std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  const std::vector<std::string> all = gather(bytes);
  std::vector<double> result(values.size()), others(values.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    ESPALIER_ASSERT(all[rank].size() == bytes.size() && ways.size() == values.size());
    std::memcpy(others.data(), all[rank].data(), bytes.size());
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = rank == 0                        ? others[i]
                  : ways[i] == RankReduction::kSum ? result[i] + others[i]
                  : ways[i] == RankReduction::kMin ? std::min(result[i], others[i])
                                                   : std::max(result[i], others[i]);
    }
  }
  return result;
}

std::vector<double> Group::add_up(const std::vector<double>& values) const {
  return reduce(values, std::vector<RankReduction>(values.size(), RankReduction::kSum));
}

bool Group::any(bool condition) const {
  return add_up(std::vector<double>{condition ? 1.0 : 0.0}).front() > 0;
}

void Group::check_equal(const std::string& what, const std::string& text) const {
  std::map<std::string, std::vector<size_t>> ranks_by_text;
  const std::vector<std::string> texts = gather(text);
  for (size_t rank = 0; rank < texts.size(); ++rank) ranks_by_text[texts[rank]].push_back(rank);
  if (ranks_by_text.size() == 1) return;
  std::vector<std::string> found;
  for (const auto& [value, ranks] : ranks_by_text) {
    found.push_back(fmt::format("{} on rank {}", value, fmt::join(ranks, ", ")));
  }
  throw RankError(
      fmt::format("{}: expected the same on all ranks, received {}", what, fmt::join(found, "; ")));
}

const Group& alone() {
  static const Alone group;
  return group;
}

}  // namespace espalier
