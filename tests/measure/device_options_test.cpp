// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/device_options.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/messages.h"
#include "espalier/runtime/cuda_software.h"

namespace espalier::testing {
namespace {

struct Command {
  DeviceOptions options;
  OptionList list;

  Command() { options.add(&list, /*trains=*/true); }
};

TEST(DeviceOptions, AreTheCpuUnlessTheySayOtherwise) {
  Command command;
  EXPECT_EQ(command.options.open().device, at::Device(at::kCPU));
  EXPECT_EQ(command.list.at("device").kept(), "cpu");
  EXPECT_EQ(command.list.at("deterministic").kept(), false);
}

TEST(DeviceOptions, AutoIsTheFirstGpuThatCanBeUsedOrTheCpu) {
  Command command;
  command.list.set({{"device", "auto"}});
  EXPECT_EQ(command.list.at("device").kept(), "auto");
  if (cuda_driver().found) GTEST_SKIP() << "there may be a GPU";
  std::string said;
  listen({.line = [&](const std::string& text) { said += text; }});
  EXPECT_EQ(command.options.open().device, at::Device(at::kCPU));
  listen({});
  EXPECT_TRUE(said.starts_with("espalier: --device auto: cpu (")) << said;
}

TEST(DeviceOptions, OtherWordsAreRefused) {
  for (const char* word : {"tpu", "cuda:", "cuda:x", "gpu", "Auto", ""}) {
    Command command;
    EXPECT_THROW(command.list.set({{"device", word}}), InputError) << word;
  }
}

}  // namespace
}  // namespace espalier::testing
