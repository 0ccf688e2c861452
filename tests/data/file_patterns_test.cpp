// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/data/trajectory_helpers.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;
using testing::write_bytes;

class FilePatterns : public ::testing::Test {
 protected:
  FilePatterns() {
    for (const std::string name :
         {"b.jsonl", "a10.jsonl", "a2.jsonl", "B.jsonl", "x[1].jsonl", "x1.jsonl", "c.txt"})
      write_bytes(folder_ / name, "");
  }

  /// The names of the files that patterns inside of the folder stand for, with a blank after each.
  std::string names(const std::vector<std::string>& patterns) {
    std::vector<std::string> paths;
    for (const std::string& each : patterns) paths.push_back((folder_ / each).string());
    std::string text;
    for (const std::filesystem::path& path : expand_file_patterns(paths))
      text += path.filename().string() + " ";
    return text;
  }

  ScratchFolder folder_;
};

TEST_F(FilePatterns, StandForFilesInTheOrderOfTheirBytes) {
  EXPECT_EQ(names({"*.jsonl"}), "B.jsonl a10.jsonl a2.jsonl b.jsonl x1.jsonl x[1].jsonl ");
  EXPECT_EQ(names({"a?.jsonl"}), "a2.jsonl ");
  EXPECT_EQ(names({"[ab].jsonl"}), "b.jsonl ");
  EXPECT_EQ(names({"b.jsonl", "a*"}), "b.jsonl a10.jsonl a2.jsonl ");
  EXPECT_EQ(names({"b.jsonl", "b.jsonl"}), "b.jsonl b.jsonl ");
}

TEST_F(FilePatterns, NamesOfFilesAreNoPatterns) {
  EXPECT_EQ(names({"x[1].jsonl"}), "x[1].jsonl ");
  std::filesystem::remove(folder_ / "x[1].jsonl");
  EXPECT_EQ(names({"x[1].jsonl"}), "x1.jsonl ");
}

TEST_F(FilePatterns, WhatIsNotThereIsNamed) {
  EXPECT_EQ(message_of<InputError>([&] { names({"b.jsonl", "z*.jsonl"}); }),
            "expected files that match " + (folder_ / "z*.jsonl").string() + ", received none");
  EXPECT_EQ(message_of<InputError>([&] { names({"z.jsonl"}); }),
            "cannot open " + (folder_ / "z.jsonl").string() + ": No such file or directory");
  EXPECT_NE(message_of<InputError>([] { expand_file_patterns(std::vector<std::string>{""}); }), "");
}

TEST_F(FilePatterns, PipesAreFiles) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(names({"pipe"}), "pipe ");  // not opened: that would wait for a writer
}

}  // namespace
}  // namespace espalier
