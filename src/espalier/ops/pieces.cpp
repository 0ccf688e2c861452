#include "espalier/ops/pieces.h"

#include "espalier/base/check.h"

namespace espalier {

std::vector<std::vector<Piece>> pieces_by_level(std::span<const int32_t> subtree_end) {
  const auto num_tokens = static_cast<int64_t>(subtree_end.size());
  std::vector<std::vector<Piece>> levels;
  std::vector<int64_t> open_ends;  // of the stretches above the present token, outermost first
  int64_t begin = 0;
  while (begin < num_tokens) {
    const int64_t subtree = subtree_end[begin];
    while (!open_ends.empty() && open_ends.back() <= begin) open_ends.pop_back();
    const int64_t limit = open_ends.empty() ? num_tokens : open_ends.back();
    ESPALIER_CHECK(
        begin < subtree && subtree <= limit,
        "subtree_end[{}]: expected a value in [{}, {}] (a subtree lies inside its parent's), received {}",
        begin, begin + 1, limit, subtree);
    int64_t end = begin + 1;
    while (end < subtree && subtree_end[end] == subtree) ++end;

    if (levels.empty()) levels.emplace_back();
    levels[0].push_back({begin, end, begin, end, true});
    if (end < subtree) {
      open_ends.push_back(subtree);
      const size_t level = open_ends.size();
      if (levels.size() <= level) levels.resize(level + 1);
      levels[level].push_back({end, subtree, begin, end, false});
    }
    begin = end;
  }
  return levels;
}

}  // namespace espalier
