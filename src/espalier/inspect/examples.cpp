// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/examples.h"

#include <algorithm>
#include <utility>

namespace espalier {
namespace {

constexpr int64_t kMostKept = 64;

/// Whether both examples have the same two texts, in either order.
bool same_texts(const SharingExample& a, const SharingExample& b) {
  return (a.left == b.left && a.right == b.right) || (a.left == b.right && a.right == b.left);
}

bool same_place(const SharingExample& a, const SharingExample& b) {
  return a.position == b.position && a.before == b.before;
}

bool looks_the_same(const SharingExample& a, const SharingExample& b) {
  return same_texts(a, b) && a.before == b.before;
}

bool has_text(const SharingExample& example, const std::vector<int32_t>& text) {
  return example.left == text || example.right == text;
}

bool smaller(const SharingExample& a, const SharingExample& b) {
  return a.common < b.common;
}

}  // namespace

void ExamplePool::add(SharingExample example) {
  if (shown_ <= 0) return;
  for (SharingExample& other : kept_) {
    if (!looks_the_same(other, example)) continue;
    if (smaller(other, example)) other = std::move(example);
    return;
  }
  // The example to replace: the smallest, if there are already `most`.
  const auto smallest_of_too_many = [&](int64_t most, auto counts) {
    int64_t count = 0;
    auto smallest = kept_.end();
    for (auto other = kept_.begin(); other != kept_.end(); ++other) {
      if (!counts(*other, example)) continue;
      ++count;
      if (smallest == kept_.end() || smaller(*other, *smallest)) smallest = other;
    }
    return count < most ? kept_.end() : smallest;
  };
  auto out = smallest_of_too_many(shown_, same_texts);
  if (out == kept_.end()) out = smallest_of_too_many(shown_, same_place);
  if (out == kept_.end())
    out = smallest_of_too_many(kMostKept, [](const auto&, const auto&) { return true; });
  if (out == kept_.end()) {
    kept_.push_back(std::move(example));
  } else if (smaller(*out, example)) {
    *out = std::move(example);
  }
}

std::vector<SharingExample> ExamplePool::chosen() const {
  std::vector<SharingExample> rest = kept_, found;
  const auto largest_first = [](const SharingExample& a, const SharingExample& b) { return smaller(b, a); };
  std::stable_sort(rest.begin(), rest.end(), largest_first);
  const auto take = [&](auto is_new) {
    for (auto at = rest.begin(); at != rest.end() && std::ssize(found) < shown_;) {
      const bool wanted =
          std::all_of(found.begin(), found.end(), [&](const auto& earlier) { return is_new(*at, earlier); });
      if (wanted) found.push_back(std::move(*at));
      at = wanted ? rest.erase(at) : at + 1;
    }
  };
  take([](const SharingExample& a, const SharingExample& b) {
    return !same_place(a, b) && !has_text(b, a.left) && !has_text(b, a.right);
  });
  take([](const SharingExample& a, const SharingExample& b) {
    return !same_place(a, b) && !same_texts(a, b);
  });
  take([](const SharingExample& a, const SharingExample& b) { return !same_texts(a, b); });
  take([](const SharingExample&, const SharingExample&) { return true; });
  std::stable_sort(found.begin(), found.end(), largest_first);
  return found;
}

}  // namespace espalier
