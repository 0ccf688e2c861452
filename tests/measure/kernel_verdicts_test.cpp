// SPDX-License-Identifier: Apache-2.0
// Verdicts on kernels: how they are read, and what follows from them: what is used, and what is said.
#include "espalier/measure/kernel_verdicts.h"

#include <gtest/gtest.h>

#include "espalier/base/file.h"
#include "espalier/ops/attention/cuda.h"
#include "tests/base/scratch_folder.h"
#include "tests/environment_variable.h"

namespace espalier::testing {
namespace {

KernelVerdict passed(const std::string& family) {
  return {.family = family, .is_served = true};
}

KernelVerdict failed(const std::string& family, const std::string& fault) {
  return {.family = family, .is_served = true, .fault = fault};
}

// All that pass but these.
std::vector<KernelVerdict> with(std::vector<KernelVerdict> verdicts) {
  for (const char* family : {"library", "ampere", "masked", "head", "distribution", "products"}) {
    if (std::ranges::find(verdicts, family, &KernelVerdict::family) == verdicts.end()) {
      verdicts.push_back(passed(family));
    }
  }
  return verdicts;
}

TEST(KernelVerdicts, WhatPassedIsUsedAndNothingIsSaid) {
  const ProvenKernels proven = proven_kernels(with({{.family = "library"}}), "A100", 0);
  EXPECT_EQ(proven.kernels.attention, (std::vector{AttentionKind::kAmpere, AttentionKind::kMasked}));
  EXPECT_TRUE(proven.kernels.head);
  EXPECT_TRUE(proven.warning.empty() && proven.missing.empty());
}

TEST(KernelVerdicts, WithoutAnyPlainFormsAreUsed) {
  const ProvenKernels proven = proven_kernels({}, "A100", 0);
  EXPECT_TRUE(proven.kernels.attention.empty());
  EXPECT_FALSE(proven.kernels.head);
  EXPECT_EQ(proven.warning, "");
  EXPECT_EQ(proven.missing,
            (std::vector<std::string>{"library", "ampere", "masked", "head", "distribution", "products"}));
}

TEST(KernelVerdicts, WhatFailedIsNamedOnceWithTheCommandThatShowsIt) {
  const ProvenKernels proven = proven_kernels(
      with({failed("library", "its check did not end within 120 s"), failed("ampere", "out: off")}),
      "NVIDIA H200", 1);
  EXPECT_EQ(proven.kernels.attention, (std::vector{AttentionKind::kMasked}));
  EXPECT_EQ(
      proven.warning,
      "warning: attention `library` is not used on NVIDIA H200: its check did not end within 120 s (shown by "
      "`espalier device --check library --device cuda:1`); attention `ampere` is not used on NVIDIA H200: "
      "out: off (shown by `espalier device --check ampere --device cuda:1`)");
  const ProvenKernels none =
      proven_kernels(with({{.family = "library"}, {.family = "ampere"}, failed("masked", "off")}), "GPU", 0);
  EXPECT_TRUE(none.kernels.attention.empty());
  EXPECT_TRUE(none.warning.ends_with("; no attention is right, and `masked` is used all the same"));
}

TEST(KernelVerdicts, WhatHasASecondFormFallsBackToItAndTheRestIsNotTrusted) {
  const ProvenKernels some =
      proven_kernels(with({failed("head", "NaN"), failed("products", "TF32")}), "GPU", 2);
  EXPECT_FALSE(some.kernels.head);
  EXPECT_EQ(
      some.warning,
      "warning: kernels of `head` are not used on GPU, operators of LibTorch are: NaN (shown by `espalier "
      "device --check head --device cuda:2`); `products` cannot be trusted on GPU, and nothing stands in for "
      "it: TF32 (shown by `espalier device --check products --device cuda:2`)");
}

TEST(KernelVerdicts, WhatCouldNotBeCheckedIsNotUsed) {
  std::vector<KernelVerdict> verdicts{failed("ampere", "its check ended with status 1"), failed("head", "-")};
  for (KernelVerdict& verdict : verdicts) verdict.is_lasting = false;
  const ProvenKernels proven = proven_kernels(with(verdicts), "GPU", 0);
  EXPECT_EQ(proven.kernels.attention, (std::vector{AttentionKind::kLibrary, AttentionKind::kMasked}));
  EXPECT_FALSE(proven.kernels.head);
  EXPECT_EQ(
      proven.warning,
      "warning: `ampere`, `head` could not be checked on GPU, and plain forms are used: its check ended "
      "with status 1 (shown by `espalier device --check ampere --device cuda:0`)");
}

TEST(KernelVerdicts, AreReadFromTheFileOfTheirKey) {
  const ScratchFolder folder;
  const CudaDriver driver{.version = "580.1", .devices = {{.name = "GPU", .compute_capability = 90}}};
  const nlohmann::json key = verdict_key(driver, {.version = "13.0"}, 0);
  EXPECT_EQ(key["device"], "GPU");
  EXPECT_EQ(key["build"].get<std::string>().size(), 40U);
  const nlohmann::json right{{"checks", 3}, {"fault", ""}, {"is_lasting", true}, {"rates", nullptr}};
  nlohmann::json wrong = right, unserved = right;
  wrong["fault"] = "off";
  unserved["checks"] = 0;
  const nlohmann::json verdicts{
      {"ampere", right}, {"head", wrong}, {"library", unserved}, {"products", {{"checks", "many"}}}};
  EXPECT_TRUE(kept_verdicts(key, folder / "absent").empty());
  write_text(folder / "damaged.json", "{");
  write_text(folder / "list.json", "[]");
  write_text(folder / "a.json", nlohmann::json{{"key", key}, {"verdicts", verdicts}}.dump());
  const std::vector<KernelVerdict> kept = kept_verdicts(key, folder / "");
  ASSERT_EQ(kept.size(), 3U);
  EXPECT_TRUE(kept[0].family == "ampere" && kept[0].is_served && kept[0].fault.empty());
  EXPECT_TRUE(kept[1].family == "head" && kept[1].is_served && kept[1].fault == "off");
  EXPECT_TRUE(kept[2].family == "library" && !kept[2].is_served);
  nlohmann::json other = key;
  other["driver"] = "580.2";
  EXPECT_TRUE(kept_verdicts(other, folder / "").empty());
  EXPECT_TRUE(parse_verdicts("nothing").empty());
}

TEST(KernelVerdicts, AttentionIsChosenAmongWhatIsProven) {
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
