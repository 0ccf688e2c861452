// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/row_checks.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace espalier {
namespace {

template <typename Check>
std::string fault_of(const Check& check) {
  try {
    check();
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

// Values are checked in blocks. The fault that is reported is the first one, wherever a block ends.
TEST(RowChecks, NameTheFirstFaultInAnyBlock) {
  for (const size_t index : {0, 1, 255, 256, 257, 511, 512, 700, 999}) {
    SCOPED_TRACE(index);
    std::vector<int32_t> ids(1000, 9);
    ids[index] = 10, ids[999] = 10;
    EXPECT_EQ(
        fault_of([&] { check_token_ids(ids, 10); }),
        fmt::format("field `input_ids`: expected ids in [0, 10) (vocab_size is 10), received 10 at index {}",
                    index));
    std::vector<double> values(1000, 1);
    values[index] = std::numeric_limits<double>::infinity(), values[999] = -1;
    if (index == 999) values[999] = std::numeric_limits<double>::infinity();
    EXPECT_EQ(
        fault_of([&] { check_loss_weights(std::span<const double>(values)); }),
        fmt::format("field `loss_weights`: expected finite numbers >= 0, received inf at index {}", index));
  }
}

TEST(RowChecks, CountTokensWithLossInBytesAndReals) {
  for (size_t size = 1; size < 1100; size += size < 40 ? 1 : 53) {
    for (size_t period = 1; period < 5; ++period) {
      std::vector<uint8_t> mask(size);
      std::vector<double> weights(size);
      int64_t expected = 0;
      for (size_t i = 0; i < size; i += period) {
        mask[i] = 1;
        weights[i] = 0.25;
        expected += i > 0;
      }
      EXPECT_EQ(count_loss_tokens(std::span<const uint8_t>(mask)), expected) << size;
      EXPECT_EQ(count_loss_tokens(std::span<const double>(weights)), expected) << size;
    }
  }
}

TEST(RowChecks, IdsEndAtTheVocabularyOrAt32Bits) {
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(fault_of([] { check_token_ids(std::vector<int32_t>{0, kLargest}, 0); }), "");
  EXPECT_EQ(fault_of([] { check_token_ids(std::vector<int32_t>{0, kLargest}, int64_t{1} << 40); }), "");
  EXPECT_NE(fault_of([] { check_token_ids(std::vector<int32_t>{0, kLargest}, kLargest); }), "");
  for (const int64_t vocab_size : {int64_t{0}, int64_t{10}, int64_t{1} << 40}) {
    EXPECT_NE(fault_of([&] { check_token_ids(std::vector<int32_t>{0, -1}, vocab_size); }), "");
  }
}

}  // namespace
}  // namespace espalier
