// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/largest_differencing.h"

#include <algorithm>
#include <queue>
#include <utility>

namespace espalier {
namespace {

struct Set {
  double sum = 0;
  std::vector<int64_t> indices;
};

// The sets that are not empty, the largest sum first.
struct Division {
  std::vector<Set> sets;
  double difference;  // of the largest and the smallest sum, empty sets included
  int64_t first;      // index, by which ties are decided

  bool operator<(const Division& other) const {
    return difference != other.difference ? difference < other.difference : first > other.first;
  }
};

Division division_of(std::vector<Set> sets, size_t num_sets, int64_t first) {
  std::stable_sort(sets.begin(), sets.end(), [](const Set& a, const Set& b) { return a.sum > b.sum; });
  const double smallest = sets.size() < num_sets ? 0 : sets.back().sum;
  const double difference = sets.front().sum - smallest;
  return {std::move(sets), difference, first};
}

Division join(Division a, Division b, size_t num_sets) {
  std::vector<Set> sets = std::move(a.sets);
  sets.resize(num_sets);
  for (size_t i = 0; i < b.sets.size(); ++i) {
    Set& set = sets[num_sets - 1 - i];
    set.sum += b.sets[i].sum;
    set.indices.insert(set.indices.end(), b.sets[i].indices.begin(), b.sets[i].indices.end());
  }
  std::erase_if(sets, [](const Set& set) { return set.indices.empty(); });
  return division_of(std::move(sets), num_sets, std::min(a.first, b.first));
}

}  // namespace

std::vector<std::vector<int64_t>> largest_differencing(std::span<const double> numbers, int64_t num_sets) {
  std::priority_queue<Division> open;
  const auto sets = static_cast<size_t>(num_sets);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    open.push(division_of({Set{numbers[i], {index}}}, sets, index));
  }
  const auto take = [&] {
    Division division = open.top();
    open.pop();
    return division;
  };
  while (open.size() > 1) {
    Division largest = take();
    Division next = take();
    open.push(join(std::move(largest), std::move(next), sets));
  }
  std::vector<std::vector<int64_t>> result(sets);
  if (open.empty()) return result;
  const Division division = take();
  for (size_t i = 0; i < division.sets.size(); ++i) {
    result[i] = division.sets[i].indices;
    std::sort(result[i].begin(), result[i].end());
  }
  return result;
}

}  // namespace espalier
