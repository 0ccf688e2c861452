// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/csr.h"

#include <gtest/gtest.h>

#include "espalier/base/rng.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

/// The first fault, or "": every index with a label is in the row of its label, once and in order.
std::string fault(const std::vector<int64_t>& label, int64_t num_rows, const Csr<int64_t>& rows) {
  if (rows.num_rows() != num_rows) return "rows";
  std::vector<std::vector<int64_t>> expected(num_rows);
  for (size_t i = 0; i < label.size(); ++i) {
    if (label[i] >= 0) expected[label[i]].push_back(static_cast<int64_t>(i));
  }
  for (int64_t p = 0; p < num_rows; ++p) {
    if (expected[p] != std::vector<int64_t>(rows.row(p).begin(), rows.row(p).end())) return "a row";
  }
  return "";
}

TEST(Csr, GroupsByLabel) {
  for (uint64_t seed = 0; seed < testing::seeds(200); ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(testing::test_seed(seed), 71);
    const int64_t num_rows = rng.between(1, 9);
    std::vector<int64_t> label(rng.between(0, 30));
    for (int64_t& value : label) value = rng.between(-1, num_rows - 1);
    Csr<int64_t> rows = grouped(label, num_rows);
    ASSERT_EQ(fault(label, num_rows, rows), "");
    if (rows.values.size() < 2) continue;
    std::swap(rows.values.front(), rows.values.back());  // negative control
    ASSERT_EQ(fault(label, num_rows, rows), "a row");
  }
  EXPECT_EQ(grouped({}, 0).num_rows(), 0);
}

}  // namespace
}  // namespace espalier
