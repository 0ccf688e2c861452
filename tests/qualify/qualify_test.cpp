// SPDX-License-Identifier: Apache-2.0
// The qualifier drives families that are right, wrong, crash and hang: this program run again.
#include "espalier/qualify/qualify.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

// What a family of that name does when it is checked.
void behave(const std::string& family, const std::string& file) {
  if (family == "crashing") ::raise(SIGSEGV);
  while (family == "hanging") ::poll(nullptr, 0, 1000);
  if (family == "giving up") ::_exit(75);
  if (family == "silent") return;
  if (family == "garbling") return write_text(file, "{\"checks\": ");
  if (family == "absent") return qualify::write_finding({.checks = 0}, file);
  qualify::write_finding({.checks = 3, .fault = family == "wrong" ? "out: \"off\" \xff" : ""}, file);
}

// Runs in the child alone.
TEST(QualifyChild, DISABLED_Behaves) {
  const char *family = std::getenv("ESPALIER_TEST_FAMILY"), *file = std::getenv("ESPALIER_TEST_FINDING");
  ASSERT_NE(family, nullptr);
  ASSERT_NE(file, nullptr);
  behave(family, file);
}

struct Runs {
  ScratchFolder folder;
  std::vector<std::string> checked, notes;
  nlohmann::ordered_json key{{"device", "GPU of a test"}, {"build", 1}};

  std::vector<qualify::Verdict> operator()(const std::vector<std::string>& families, bool again = false) {
    qualify::Qualification qualification;
    qualification.key = key;
    qualification.folder = folder / "cache";
    qualification.again = again;
    qualification.limit = std::chrono::seconds(families.back() == "hanging" ? 1 : 300);
    qualification.command = [&](const std::string& family, const std::filesystem::path& finding) {
      checked.push_back(family);
      // All tests of the child, whatever part of them this process runs.
      return std::vector<std::string>{"/usr/bin/env",
                                      "--unset=GTEST_TOTAL_SHARDS",
                                      "--unset=GTEST_SHARD_INDEX",
                                      "ESPALIER_TEST_FAMILY=" + family,
                                      "ESPALIER_TEST_FINDING=" + finding.string(),
                                      std::filesystem::read_symlink("/proc/self/exe").string(),
                                      "--gtest_also_run_disabled_tests",
                                      "--gtest_filter=QualifyChild.DISABLED_Behaves"};
    };
    qualification.note = [&](const std::string& text) { notes.push_back(text); };
    return qualify::verdicts_on(families, qualification);
  }
};

TEST(Qualify, FamiliesThatAreWrongOrCrashAreNamed) {
  Runs run;
  const std::vector<qualify::Verdict> verdicts =
      run({"right", "wrong", "crashing", "silent", "garbling", "absent"});
  ASSERT_EQ(verdicts.size(), 6U);
  EXPECT_TRUE(verdicts[0].served && verdicts[0].fault.empty()) << verdicts[0].fault;
  EXPECT_TRUE(verdicts[1].fault.starts_with("out: \"off\"")) << verdicts[1].fault;
  EXPECT_EQ(verdicts[2].fault, "its check was killed by signal 11 (Segmentation fault)");
  EXPECT_EQ(verdicts[3].fault, "its check ended without a finding");
  EXPECT_EQ(verdicts[4].fault, "its check ended without a finding");
  EXPECT_FALSE(verdicts[5].served);
  EXPECT_EQ(verdicts[5].fault, "");
  for (const size_t i : {1, 2, 3, 4}) EXPECT_TRUE(verdicts[i].served) << i;
  EXPECT_EQ(run.notes.size(), 1U);
}

TEST(Qualify, AHangIsAVerdictToo) {
  Runs run;
  EXPECT_EQ(run({"hanging"})[0].fault, "its check did not end within 1 s");
}

TEST(Qualify, VerdictsAreKeptUntilTheKeyChangesOrTheFileIsDamaged) {
  Runs run;
  const std::vector<std::string> families{"wrong", "right"};
  const auto expect_checks = [&](size_t count, bool again = false) {
    run.checked.clear();
    const std::vector<qualify::Verdict> verdicts = run(families, again);
    EXPECT_EQ(run.checked.size(), count);
    EXPECT_FALSE(verdicts[0].fault.empty());
    EXPECT_TRUE(verdicts[1].fault.empty());
  };
  expect_checks(2);
  expect_checks(0);
  expect_checks(2, /*again=*/true);
  run.key["build"] = 2;
  expect_checks(2);
  run.key["build"] = 1;
  expect_checks(0);
  const auto file = qualify::verdict_file(run.key, run.folder / "cache");
  const std::string whole = read_text(file);
  for (const std::string& damaged :
       {std::string(), std::string("[]"), whole.substr(0, whole.size() / 2), std::string(R"({"key": 1})"),
        std::string(
            R"({"key": {"device":"GPU of a test","build":1}, "verdicts": {"wrong": 1, "right": {}}})")}) {
    write_text(file, damaged);
    expect_checks(2);
    expect_checks(0);
  }
}

// The ranks of a machine meet a GPU together, and one of them checks it.
TEST(Qualify, AProcessWaitsForTheVerdictsOfAnother) {
  Runs run;
  run({"right"});
  const std::string file = qualify::verdict_file(run.key, run.folder / "cache").string();
  const std::string verdicts = read_text(file);
  std::filesystem::remove(file);
  const int other = ::open((file + ".lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(other, 0);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  run.checked.clear();
  auto waiting = std::async(std::launch::async, [&] { return run({"right"}); });
  EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  write_text(file, verdicts);
  ::close(other);
  EXPECT_EQ(waiting.get()[0].fault, "");
  EXPECT_TRUE(run.checked.empty());
}

TEST(Qualify, AVerdictOnWhatCouldNotBeCheckedIsNotKept) {
  Runs run;
  const std::vector<std::string> families{"right", "giving up"};
  for (int time = 0; time < 2; ++time) {
    run.checked.clear();
    const std::vector<qualify::Verdict> verdicts = run(families);
    EXPECT_EQ(run.checked, families);
    EXPECT_TRUE(verdicts[0].fault.empty() && verdicts[0].lasting);
    EXPECT_EQ(verdicts[1].fault, "its check exited with status 75");
    EXPECT_FALSE(verdicts[1].lasting);
  }
}

TEST(Qualify, AFolderThatCannotBeWrittenIsSaid) {
  Runs run;
  write_text(run.folder / "cache", "a file");
  EXPECT_TRUE(run({"right"})[0].fault.empty());
  ASSERT_EQ(run.notes.size(), 2U);
  EXPECT_TRUE(run.notes[1].starts_with("the verdicts cannot be saved: ")) << run.notes[1];
}

}  // namespace
}  // namespace espalier::testing
