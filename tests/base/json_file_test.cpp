// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/json_file.h"

#include <gtest/gtest.h>

#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using Json = nlohmann::json;

TEST(JsonFile, InfiniteNumbersAreObjects) {
  const testing::ScratchFolder folder;
  write_text(folder / "config.json",
             R"({"a": [0.0, Infinity, -Infinity], "b": NaN, "Infinity": "NaN \\\" Infinity", "c": 1e3})");
  const Json infinity = {{"__float__", "Infinity"}}, minus = {{"__float__", "-Infinity"}};
  const Json expected = {{"a", {0.0, infinity, minus}},
                         {"b", {{"__float__", "NaN"}}},
                         {"Infinity", "NaN \\\" Infinity"},
                         {"c", 1000.0}};
  EXPECT_EQ(read_json_file<Json>(folder / "config.json"), expected);
}

TEST(JsonFile, OtherWordsAreRefused) {
  const testing::ScratchFolder folder;
  for (const std::string text :
       {"{\"a\": Infinit}", "{\"a\": infinity}", "{\"a\": +Infinity}", "{\"a\": \"NaN}"}) {
    write_text(folder / "config.json", text);
    const std::string message =
        testing::message_of<InputError>([&] { read_json_file<Json>(folder / "config.json"); });
    EXPECT_NE(message.find("config.json: expected JSON"), std::string::npos) << text << message;
  }
}

}  // namespace
}  // namespace espalier
