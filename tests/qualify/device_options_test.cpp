// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include <algorithm>

#include "espalier/base/file.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/flags/toml_config.h"
#include "espalier/runtime/cuda_software.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

struct Command {
  CLI::App app{"", "espalier"};
  CLI::App* train = app.add_subcommand("train", "");
  cli::DeviceFlags flags;

  Command() {
    flags.add(train, /*trains=*/true);
    cli::add_config(train);
  }
  void parse(std::vector<std::string> args) {
    args = cli::expand_config(app, args);
    std::reverse(args.begin(), args.end());
    app.parse(args);
  }
};

TEST(DeviceFlags, AreTheCpuUnlessTheySayOtherwise) {
  Command command;
  command.parse({"train"});
  EXPECT_EQ(command.flags.open(), at::Device(at::kCPU));
  EXPECT_EQ(cli::resolved_flags(*command.train).dump(), R"({"device":"cpu","deterministic":false})");
}

TEST(DeviceFlags, AutoIsTheFirstGpuThatCanBeUsedOrTheCpu) {
  Command command;
  command.parse({"train", "--device", "auto"});
  EXPECT_EQ(cli::resolved_flags(*command.train)["device"], "auto");
  if (cuda_driver().found) GTEST_SKIP() << "there may be a GPU";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(command.flags.open(), at::Device(at::kCPU));
  EXPECT_TRUE(::testing::internal::GetCapturedStderr().starts_with("espalier: --device auto: cpu ("));
}

TEST(DeviceFlags, AreKeysOfTheConfigFileToo) {
  const ScratchFolder folder;
  write_text(folder / "c.toml", "device = \"cuda:1\"\ndeterministic = true\n");
  Command command;
  command.parse({"train", "--config", folder / "c.toml"});
  EXPECT_EQ(command.flags.device, "cuda:1");
  EXPECT_TRUE(command.flags.deterministic);
}

TEST(DeviceFlags, OtherWordsAreWrongUsage) {
  for (const char* word : {"tpu", "cuda:", "cuda:x", "gpu", "Auto", ""}) {
    Command command;
    EXPECT_THROW(command.parse({"train", "--device", word}), CLI::ValidationError) << word;
  }
}

}  // namespace
}  // namespace espalier::testing
