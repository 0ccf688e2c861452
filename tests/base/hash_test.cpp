// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/hash.h"

#include <gtest/gtest.h>

#include <string_view>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::ScratchFolder;

std::string hash_of(std::string_view text) {
  Hasher hasher;
  hasher.add(std::as_bytes(std::span(text)));
  return hasher.digits();
}

TEST(Hasher, HasThePublishedValueOfNothing) {
  EXPECT_EQ(hash_of(""), "99aa06d3014798d86001c324468d497f");  // xxhsum -H2 of an empty file
}

TEST(Hasher, DoesNotDependOnHowBytesAreCut) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(i * 7 % 251);
  const std::string whole = hash_of(text);
  for (const size_t piece : {1, 3, 64, 1023, 4999}) {
    Hasher hasher;
    for (size_t begin = 0; begin < text.size(); begin += piece)
      hasher.add(std::as_bytes(std::span(std::string_view(text).substr(begin, piece))));
    EXPECT_EQ(hasher.digits(), whole) << piece;
  }
}

TEST(Hasher, EveryBitMatters) {
  const std::string text(300, 'x');
  const std::string whole = hash_of(text);
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(hash_of(flipped), whole) << bit;
  }
  EXPECT_NE(hash_of(text + '\0'), whole);
}

TEST(HashFile, IsThatOfTheContent) {
  const ScratchFolder folder;
  const std::string text(3'000'000, 'y');
  write_text(folder / "a", text);
  EXPECT_EQ(hash_file(folder / "a"), hash_of(text));
  EXPECT_THROW(hash_file(folder / "missing"), InputError);
  EXPECT_THROW(hash_file(folder.path()), InputError);
}

}  // namespace
}  // namespace espalier
