// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/stop_ids.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

using Ids = std::vector<int32_t>;

TEST(StopIds, ComeFromTheGenerationConfigThenFromTheConfig) {
  const ScratchFolder folder;
  const auto write = [&](const char* name, const char* text) { write_text(folder.path() / name, text); };
  write("config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(read_stop_ids(folder.path()), (Ids{7}));
  write("generation_config.json", R"({"eos_token_id": [9, 2, 9]})");
  EXPECT_EQ(read_stop_ids(folder.path()), (Ids{2, 9}));
  write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(read_stop_ids(folder.path()), (Ids{7}));
  write("generation_config.json", R"({})");
  write("config.json", R"({"text_config": {"eos_token_id": [3]}})");
  EXPECT_EQ(read_stop_ids(folder.path()), (Ids{3}));
  write("config.json", R"({"text_config": null})");
  EXPECT_TRUE(read_stop_ids(folder.path()).empty());
}

TEST(StopIds, OtherValuesAreNamed) {
  const ScratchFolder folder;
  write_text(folder.path() / "config.json", "{}");
  for (const char* value : {"-1", "1.5", "\"</s>\"", "[1, null]", "{}", "4294967296", "true"}) {
    write_text(folder.path() / "generation_config.json", fmt::format(R"({{"eos_token_id": {}}})", value));
    const std::string message = message_of<InputError>([&] { read_stop_ids(folder.path()); });
    EXPECT_NE(message.find("generation_config.json: eos_token_id: expected a token id"), std::string::npos)
        << message;
  }
  write_text(folder.path() / "generation_config.json", "[]");
  EXPECT_THROW(read_stop_ids(folder.path()), InputError);
}

}  // namespace
}  // namespace espalier::testing
