// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/vocabulary.h"

#include <algorithm>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/printable.h"

namespace espalier {

Vocabulary::Vocabulary(std::vector<int64_t> offsets, std::string bytes)
    : offsets_(std::move(offsets)), bytes_(std::move(bytes)) {
  ESPALIER_ASSERT(!offsets_.empty() && offsets_.front() == 0 && std::ranges::is_sorted(offsets_) &&
                  offsets_.back() == std::ssize(bytes_));
}

std::string_view Vocabulary::bytes(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
}

std::string Vocabulary::text(std::span<const int32_t> ids) const {
  std::string all;
  for (const int32_t id : ids) all += bytes(id);
  return valid_utf8(all);
}

std::string valid_utf8(std::string_view bytes) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
  std::string text;
  text.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size();) {
    const size_t size = character_size(bytes, i);
    text += size == 0 ? kReplacement : bytes.substr(i, size);
    i += std::max<size_t>(1, size);
  }
  return text;
}

}  // namespace espalier
