// SPDX-License-Identifier: Apache-2.0
// The check of attention passes implementations that are right, and finds what is wrong with others.
#include "espalier/qualify/attention_family.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <sstream>

#include "espalier/base/check.h"
#include "espalier/ops/attention/arguments.h"
#include "espalier/ops/attention/masked.h"
#include "espalier/ops/guarded_output.h"
#include "espalier/qualify/awkward_forests.h"
#include "espalier/qualify/families.h"
#include "espalier/qualify/pooled_errors.h"
#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

using espalier::detail::TreeAttentionArguments;
using espalier::detail::TreeAttentionGradients;
using espalier::detail::TreeAttentionResults;

TreeAttentionResults attend(const TreeAttentionArguments& arguments) {
  return masked_chunks::tree_attention(arguments);
}

TreeAttentionGradients differentiate(const TreeAttentionArguments& arguments, const at::Tensor& grad_out,
                                     const at::Tensor&, const at::Tensor& lse) {
  return masked_chunks::tree_attention_backward(arguments, grad_out, lse);
}

qualify::AttentionFamily right_family(std::vector<at::ScalarType> dtypes = {at::kBFloat16}) {
  return {.name = "fake",
          .dtypes = std::move(dtypes),
          .head_dims = {8},
          .serves = [](at::ScalarType, int64_t) { return true; },
          .forward = attend,
          .backward = differentiate};
}

std::string fault_of(const qualify::AttentionFamily& family) {
  return qualify::check_attention(family, at::kCPU).fault;
}

bool is_in_preorder(const std::vector<int32_t>& subtree_end) {
  for (int32_t i = 0; i < std::ssize(subtree_end); ++i) {
    if (subtree_end[i] <= i || subtree_end[i] > std::ssize(subtree_end)) return false;
    for (int32_t j = i; j < subtree_end[i]; ++j) {
      if (subtree_end[j] > subtree_end[i]) return false;
    }
  }
  return true;
}

TEST(AwkwardForests, AreForestsInPreorderWithContextThatFits) {
  const std::vector<qualify::AwkwardForest> forests = qualify::awkward_forests();
  EXPECT_GE(forests.size(), 12U);
  int64_t tokens = 0;
  for (const qualify::AwkwardForest& forest : forests) {
    SCOPED_TRACE(forest.name);
    EXPECT_TRUE(is_in_preorder(forest.subtree_end));
    AttentionContext context{.blocks = at::tensor(forest.context_blocks, at::kLong).view({-1, 5})};
    for (const int64_t size : forest.segment_sizes) context.k.push_back(at::empty({size, 1, 1}));
    EXPECT_NO_THROW(detail::context_rectangles(context, forest.num_tokens()));
    EXPECT_LE(forest.num_tokens(), 2000);
    tokens += forest.num_tokens();
  }
  EXPECT_EQ(forests.front().num_tokens(), 1);
  EXPECT_GE(tokens, 2000);
}

TEST(AwkwardForests, AreThoseOfPython) {
  std::ostringstream text;
  for (const qualify::AwkwardForest& forest : qualify::awkward_forests()) {
    text << forest.name << ':';
    for (const int32_t end : forest.subtree_end) text << ' ' << end;
    text << " |";
    for (const int64_t size : forest.segment_sizes) text << ' ' << size;
    text << " |";
    for (const int64_t number : forest.context_blocks) text << ' ' << number;
    text << '\n';
  }
  uint64_t digest = 0xCBF29CE484222325;  // FNV-1a
  for (const char c : text.str()) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  EXPECT_EQ(digest, 0x411BADF513315FA6U) << "tests/python/test_kernel_checks.py has the same digest";
}

TEST(AttentionFamily, WhatIsRightPasses) {
  const qualify::Finding finding =
      qualify::check_attention(right_family({at::kDouble, at::kFloat, at::kBFloat16}), at::kCPU);
  EXPECT_EQ(finding.fault, "");
  EXPECT_GE(finding.checks, 3 * 2 * 4 * 12);
}

TEST(AttentionFamily, TheCpusOwnPasses) {
  EXPECT_EQ(qualify::kernel_families(at::kCPU),
            (std::vector<std::string>{"cpu", "head", "distribution", "products"}));
  EXPECT_EQ(qualify::kernel_families(at::kCUDA),
            (std::vector<std::string>{"library", "ampere", "masked", "head", "distribution", "products"}));
  const qualify::Finding finding = qualify::check_family("cpu", at::kCPU);
  EXPECT_EQ(finding.fault, "");
  EXPECT_GT(finding.checks, 0);
  EXPECT_EQ(message_of<InputError>([] { qualify::check_family("ampere", at::kCPU); }),
            "expected a family of kernels of cpu: cpu, head, distribution, products; received ampere");
}

TEST(AttentionFamily, WhatTheDeviceDoesNotServeIsNotChecked) {
  qualify::AttentionFamily family = right_family();
  family.serves = [](at::ScalarType, int64_t) { return false; };
  const qualify::Finding finding = qualify::check_attention(family, at::kCPU);
  EXPECT_EQ(finding.checks, 0);
  EXPECT_EQ(finding.fault, "");
}

// Each wrong in one way that a kernel can be wrong in.
TEST(AttentionFamily, AWrongOutputIsFound) {
  qualify::AttentionFamily family = right_family();
  family.forward = [](const TreeAttentionArguments& arguments) {
    auto [out, lse] = attend(arguments);
    out.select(0, out.size(0) - 1).mul_(1.5);  // one row of each forest
    return TreeAttentionResults(out, lse);
  };
  const std::string fault = fault_of(family);
  EXPECT_TRUE(fault.starts_with("BFloat16, head dimension 8: out: expected an error of at most 2 times"))
      << fault;
}

TEST(AttentionFamily, ASmallErrorOfOneGradientIsFound) {
  qualify::AttentionFamily family = right_family({at::kFloat});
  family.backward = [](const TreeAttentionArguments& arguments, const at::Tensor& grad_out,
                       const at::Tensor& out, const at::Tensor& lse) {
    TreeAttentionGradients gradients = differentiate(arguments, grad_out, out, lse);
    std::get<1>(gradients).mul_(1 + 1e-5);
    return gradients;
  };
  EXPECT_TRUE(fault_of(family).starts_with("Float, head dimension 8: gradient of k: expected"))
      << fault_of(family);
}

TEST(AttentionFamily, ForgottenContextIsFound) {
  qualify::AttentionFamily family = right_family();
  family.forward = [](TreeAttentionArguments arguments) {
    arguments.context.blocks = arguments.context.blocks.slice(0, 0, 0);
    return attend(arguments);
  };
  EXPECT_NE(fault_of(family).find("worst on the forest `context of a "), std::string::npos)
      << fault_of(family);
}

TEST(AttentionFamily, ValuesThatAreNotFiniteAreFound) {
  qualify::AttentionFamily family = right_family();
  family.backward = [](const TreeAttentionArguments& arguments, const at::Tensor& grad_out,
                       const at::Tensor& out, const at::Tensor& lse) {
    TreeAttentionGradients gradients = differentiate(arguments, grad_out, out, lse);
    if (grad_out.size(0) == 300) std::get<2>(gradients).view(-1)[0] = std::nan("");
    return gradients;
  };
  EXPECT_EQ(
      fault_of(family),
      "BFloat16, head dimension 8: gradient of v: values that are not finite or of another shape or dtype, "
      "on the forest `chain`");
}

TEST(AttentionFamily, OtherBitsInAnotherRunAreFoundWhereEqualOnesArePromised) {
  qualify::AttentionFamily family = right_family({at::kFloat});
  int64_t runs = 0;
  const auto jitter = [&runs](const at::Tensor& tensor) {
    tensor.view(-1)[0] += 1e-7 * static_cast<double>(runs++ % 2);
  };
  family.backward = [&](const TreeAttentionArguments& arguments, const at::Tensor& grad_out,
                        const at::Tensor& out, const at::Tensor& lse) {
    TreeAttentionGradients gradients = differentiate(arguments, grad_out, out, lse);
    if (!at::globalContext().deterministicAlgorithms()) jitter(std::get<0>(gradients));
    return gradients;
  };
  EXPECT_EQ(fault_of(family), "");  // not promised
  family.backward = [&](const TreeAttentionArguments& arguments, const at::Tensor& grad_out,
                        const at::Tensor& out, const at::Tensor& lse) {
    TreeAttentionGradients gradients = differentiate(arguments, grad_out, out, lse);
    jitter(std::get<2>(gradients));
    return gradients;
  };
  EXPECT_EQ(
      fault_of(family),
      "Float, head dimension 8: gradient of v: other bits in another run, on the forest `one token` with "
      "deterministic algorithms");
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
}

TEST(AttentionFamily, AWriteBeyondAnOutputIsFound) {
  qualify::AttentionFamily family = right_family();
  int64_t beyond = 0;
  family.forward = [&](const TreeAttentionArguments& arguments) {
    const auto [out, lse] = attend(arguments);
    const at::Tensor written = output_like(out.sizes(), out.options());
    written.copy_(out);
    auto* end = written.mutable_data_ptr<c10::BFloat16>() + written.numel();
    if (written.size(0) == 300) end[beyond - 1] = 1;  // with 0 the last value itself
    return TreeAttentionResults(out, lse);
  };
  EXPECT_EQ(fault_of(family).find("beyond"), std::string::npos);
  beyond = 1;
  // The second run, which has no guards, is not reached.
  EXPECT_EQ(fault_of(family), "BFloat16, head dimension 8: writes beyond its outputs, on the forest `chain`");
}

TEST(OutputGuards, SeeBothEndsAndLeaveOtherOutputsAlone) {
  EXPECT_EQ(output_like({3}, at::kFloat).storage_offset(), 0);
  const OutputGuards guards;
  const at::Tensor whole = output_like({2, 3}, at::kDouble, /*zeroed=*/true);
  EXPECT_TRUE(whole.is_contiguous() && whole.eq(0).all().item<bool>());
  whole.fill_(7);
  EXPECT_EQ(guards.broken(), 0);
  output_like({4}, at::kFloat).mutable_data_ptr<float>()[4] = 0;
  EXPECT_EQ(guards.broken(), 1);
  output_like({4}, at::kFloat).mutable_data_ptr<float>()[-1] = 0;
  EXPECT_EQ(guards.broken(), 2);
  EXPECT_EQ(guards.size(), 3);
  EXPECT_EQ(output_like({0, 5}, at::kFloat).numel(), 0);
}

TEST(PooledErrorsOfKernels, JudgeByTheRatioAboveTheFloor) {
  const at::Tensor exact = at::linspace(1, 2, 300, at::kDouble);
  const at::Tensor rounded = exact.to(at::kFloat);
  const auto fault = [&](double ours, double plain, const at::Tensor& target, double floor = 0) {
    qualify::PooledErrors errors(at::kFloat);
    errors.add("a", (target + ours).to(at::kFloat), (target + plain).to(at::kFloat), target, floor);
    return errors.fault();
  };
  EXPECT_EQ(fault(1e-5, 1e-5, exact), "");
  EXPECT_EQ(fault(1.9e-5, 1e-5, exact), "");
  EXPECT_NE(fault(2.2e-5, 1e-5, exact), "");
  EXPECT_NE(fault(1e-5, 0, exact), "");
  EXPECT_EQ(fault(1e-5, 0, exact, 5e-6), "");  // relative to values of about 1.5
  EXPECT_NE(fault(1e-5, 0, exact, 2e-6), "");
  EXPECT_EQ(fault(0, 0, rounded.to(at::kDouble)), "");
  EXPECT_NE(fault(0, 0, exact.slice(0, 0, 10)), "");  // too few values
  EXPECT_NE(fault(std::nan(""), 0, exact), "");
  EXPECT_NE(fault(0, std::nan(""), exact), "");
}

}  // namespace
}  // namespace espalier::testing
