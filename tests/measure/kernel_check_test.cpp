// SPDX-License-Identifier: Apache-2.0
// What follows from verdicts on kernels: what is used, and what is said.
#include "espalier/measure/kernel_check.h"

#include <gtest/gtest.h>

#include "espalier/ops/attention/cuda.h"
#include "tests/environment_variable.h"

namespace espalier::testing {
namespace {

qualify::Verdict passed(const std::string& family) {
  return {.family = family, .served = true};
}

qualify::Verdict failed(const std::string& family, const std::string& fault) {
  return {.family = family, .served = true, .fault = fault};
}

TEST(KernelCheck, WhatPassedIsUsedAndNothingIsSaid) {
  const ProvenKernels proven =
      proven_kernels({{.family = "library"}, passed("ampere"), passed("masked")}, "A100", 0);
  EXPECT_EQ(proven.kernels.attention, (std::vector{AttentionKind::kAmpere, AttentionKind::kMasked}));
  EXPECT_EQ(proven.warning, "");
}

TEST(KernelCheck, WhatFailedIsNamedOnceWithTheCommandThatShowsIt) {
  const ProvenKernels proven = proven_kernels({failed("library", "its check did not end within 120 s"),
                                               failed("ampere", "out: off"), passed("masked")},
                                              "NVIDIA H200", 1);
  EXPECT_EQ(proven.kernels.attention, (std::vector{AttentionKind::kMasked}));
  EXPECT_EQ(
      proven.warning,
      "warning: attention `library` is not used on NVIDIA H200: its check did not end within 120 s (shown by "
      "`espalier device --check library --device cuda:1`); attention `ampere` is not used on NVIDIA H200: "
      "out: "
      "off (shown by `espalier device --check ampere --device cuda:1`)");
  const ProvenKernels none = proven_kernels({failed("masked", "off")}, "GPU", 0);
  EXPECT_TRUE(none.kernels.attention.empty());
  EXPECT_TRUE(none.warning.ends_with("; no attention is right, and `masked` is used all the same"));
}

TEST(KernelCheck, WhatHasASecondFormFallsBackToItAndTheRestIsNotTrusted) {
  const ProvenKernels all =
      proven_kernels({passed("head"), passed("distribution"), passed("products")}, "GPU", 0);
  EXPECT_TRUE(all.kernels.head && all.kernels.attention.empty());
  EXPECT_EQ(all.warning, "");
  const ProvenKernels some =
      proven_kernels({passed("masked"), failed("head", "NaN"), failed("products", "TF32")}, "GPU", 2);
  EXPECT_FALSE(some.kernels.head);
  EXPECT_EQ(
      some.warning,
      "warning: kernels of `head` are not used on GPU, operators of LibTorch are: NaN (shown by `espalier "
      "device --check head --device cuda:2`); `products` cannot be trusted on GPU, and nothing stands in for "
      "it: TF32 (shown by `espalier device --check "
      "products --device cuda:2`)");
}

TEST(KernelCheck, WhatCouldNotBeCheckedStaysAsItIsWithoutACheck) {
  std::vector<qualify::Verdict> verdicts;
  for (const char* family : {"library", "ampere", "masked", "head", "products"}) {
    verdicts.push_back(failed(family, "its check exited with status 1"));
    verdicts.back().lasting = false;
  }
  const ProvenKernels proven = proven_kernels(verdicts, "GPU", 0);
  EXPECT_EQ(proven.kernels.attention,
            (std::vector{AttentionKind::kLibrary, AttentionKind::kAmpere, AttentionKind::kMasked}));
  EXPECT_TRUE(proven.kernels.head);
  EXPECT_NE(
      proven.warning.find("`library`, `ampere`, `masked`, `head`, `products` could not be checked on GPU: "
                          "its check exited with status 1 (shown by `espalier device --check library "),
      std::string::npos)
      << proven.warning;
}

TEST(KernelCheck, AttentionIsChosenAmongWhatIsProven) {
  const ForcedVariable unset("ESPALIER_ATTENTION", nullptr);
  const AttentionInputKind inputs{at::kBFloat16, 64};
  const auto chosen = [&](std::vector<AttentionKind> proven) {
    KernelChoice choice = kernel_choice();
    choice.cuda = with_environment({.attention = std::move(proven)});
    const KernelScope scope(choice);
    return attention_kind(inputs);
  };
  // Neither serves without a device, or without Python.
  EXPECT_EQ(chosen({AttentionKind::kLibrary, AttentionKind::kAmpere}), AttentionKind::kMasked);
  EXPECT_EQ(chosen({AttentionKind::kMasked}), AttentionKind::kMasked);
  EXPECT_EQ(chosen({}), AttentionKind::kMasked);
  EXPECT_EQ(attention_kind_named("library"), AttentionKind::kLibrary);
  EXPECT_EQ(attention_kind_named("cpu"), std::nullopt);
}

}  // namespace
}  // namespace espalier::testing
