// SPDX-License-Identifier: Apache-2.0
// What the judge of kernels needs beside the operators: guards around outputs, and which kernels are taken.
#include "espalier/ops/judge.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "espalier/ops/guarded_output.h"
#include "espalier/ops/kernel_choice.h"
#include "tests/environment_variable.h"

namespace espalier::testing {
namespace {

c10::Stack call(const char* name, c10::Stack arguments) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("espalier_judge::") + name).c_str(), "");
  op.callBoxed(&arguments);
  return arguments;
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

TEST(Judge, CountsOutputsThatAreOverrunWhileItGuards) {
  const auto write = [](int64_t last) {
    const at::Tensor output = output_like({4}, at::kFloat);
    if (output.storage_offset() > 0) output.mutable_data_ptr<float>()[last] = 0;
  };
  call("guard_outputs", {true});
  write(3);
  EXPECT_EQ(call("guard_outputs", {true}).front().toInt(), 0);
  write(4);
  write(-1);
  EXPECT_EQ(call("guard_outputs", {false}).front().toInt(), 2);
  write(4);
  EXPECT_EQ(call("guard_outputs", {false}).front().toInt(), 0);
}

TEST(Judge, SetsWhatOperatorsOutsideOfEnginesTake) {
  const ForcedVariable attention("ESPALIER_ATTENTION", nullptr), head("ESPALIER_HEAD", nullptr);
  const CudaKernels before = cuda_kernels();
  call("take_kernels", {c10::List<std::string>({"ampere"}), false});
  const CudaKernels set = cuda_kernels();
  set_default_cuda_kernels(before);
  EXPECT_EQ(set.attention, std::vector{AttentionKind::kAmpere});
  EXPECT_FALSE(set.head);
  EXPECT_THROW(call("take_kernels", {c10::List<std::string>({"cpu"}), true}), c10::Error);
  EXPECT_EQ(cuda_kernels().attention, before.attention);
}

TEST(Judge, KnowsTheBuildByADigest) {
  EXPECT_EQ(kernel_build().size(), 40U);
  EXPECT_EQ(call("build", {}).front().toStringRef(), kernel_build());
}

}  // namespace
}  // namespace espalier::testing
