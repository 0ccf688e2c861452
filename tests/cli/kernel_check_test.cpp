// SPDX-License-Identifier: Apache-2.0
// What follows from verdicts on kernels: what is used, and what is said.
#include "espalier/cli/kernel_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "espalier/ops/attention/proven.h"
#include "tests/environment_variable.h"

namespace espalier::testing {
namespace {

using cli::proven_attention;
using cli::ProvenAttention;

Verdict passed(const std::string& family) {
  return {.family = family, .served = true};
}

Verdict failed(const std::string& family, const std::string& fault) {
  return {.family = family, .served = true, .fault = fault};
}

TEST(KernelCheck, WhatPassedIsUsedAndNothingIsSaid) {
  const ProvenAttention proven = proven_attention(
      {{.family = "hopper"}, passed("ampere"), passed("varlen"), passed("masked")}, "A100", 0);
  EXPECT_EQ(proven.kinds,
            (std::vector{AttentionKind::kAmpere, AttentionKind::kVarlen, AttentionKind::kMasked}));
  EXPECT_EQ(proven.warning, "");
}

TEST(KernelCheck, WhatFailedIsNamedOnceWithTheCommandThatShowsIt) {
  const ProvenAttention proven =
      proven_attention({failed("hopper", "its check did not end within 120 s"), failed("ampere", "out: off"),
                        passed("varlen"), passed("masked")},
                       "NVIDIA H200", 1);
  EXPECT_EQ(proven.kinds, (std::vector{AttentionKind::kVarlen, AttentionKind::kMasked}));
  EXPECT_EQ(
      proven.warning,
      "warning: attention `hopper` is not used on NVIDIA H200: its check did not end within 120 s (shown by "
      "`espalier device --check hopper --device cuda:1`); attention `ampere` is not used on NVIDIA H200: "
      "out: "
      "off (shown by `espalier device --check ampere --device cuda:1`)");
  const ProvenAttention none = proven_attention({failed("masked", "off")}, "GPU", 0);
  EXPECT_TRUE(none.kinds.empty());
  EXPECT_TRUE(none.warning.ends_with("; none is right, and `masked` is used all the same"));
}

// Without a GPU hopper and ampere serve nothing, so that what comes behind them shows the order.
TEST(KernelCheck, AttentionIsChosenAmongWhatIsProven) {
  const ForcedVariable unset("ESPALIER_ATTENTION", nullptr);
  const AttentionInputKind inputs{at::kBFloat16, 64};
  const auto chosen = [&](std::optional<std::vector<AttentionKind>> proven) {
    const auto before = set_proven_attention(std::move(proven));
    const AttentionKind kind = attention_kind(inputs);
    set_proven_attention(before);
    return kind;
  };
  EXPECT_EQ(chosen(std::vector{AttentionKind::kVarlen, AttentionKind::kMasked}), AttentionKind::kVarlen);
  EXPECT_EQ(chosen(std::vector{AttentionKind::kMasked}), AttentionKind::kMasked);
  EXPECT_EQ(chosen(std::vector<AttentionKind>{}), AttentionKind::kMasked);
  const ForcedVariable named("ESPALIER_ATTENTION", "varlen");
  EXPECT_EQ(chosen(std::vector<AttentionKind>{}), AttentionKind::kVarlen);  // named all the same
  EXPECT_EQ(attention_kind_named("hopper"), AttentionKind::kHopper);
  EXPECT_EQ(attention_kind_named("cpu"), std::nullopt);
}

}  // namespace
}  // namespace espalier::testing
