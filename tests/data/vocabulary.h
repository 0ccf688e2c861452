// SPDX-License-Identifier: Apache-2.0
// Vocabularies of given tokens.
#pragma once

#include <string>
#include <vector>

#include "espalier/data/vocabulary.h"

namespace espalier::testing {

inline Vocabulary vocabulary_of(const std::vector<std::string>& tokens) {
  std::vector<int64_t> offsets{0};
  std::string bytes;
  for (const std::string& token : tokens) offsets.push_back(std::ssize(bytes += token));
  return {offsets, bytes};
}

}  // namespace espalier::testing
