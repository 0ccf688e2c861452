// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/temporaries.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::ScratchFolder;

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

// The tag of a process of this host that has ended.
std::string ended_tag() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string tag = process_tag();
    [[maybe_unused]] const ssize_t written = ::write(ends[1], tag.data(), tag.size());
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  char text[512];
  const ssize_t count = ::read(ends[0], text, sizeof text);
  ::close(ends[0]);
  ::close(ends[1]);
  return {text, static_cast<size_t>(count)};
}

TEST(Temporaries, TagsTellWhetherTheProcessLives) {
  const std::string mine = process_tag(), ended = ended_tag();
  EXPECT_FALSE(names_ended_process(mine));
  EXPECT_TRUE(names_ended_process(ended)) << ended;
  EXPECT_FALSE(names_ended_process("elsewhere-" + ended));
  EXPECT_FALSE(names_ended_process(ended + "x"));
  for (const char* text : {"", "-", "-1", "host-", "host-1-", "host-1-0"})
    EXPECT_FALSE(names_ended_process(text));
}

TEST(Temporaries, OnlyThoseOfEndedProcessesAreSwept) {
  const ScratchFolder folder;
  const std::string ended = ended_tag();
  const std::set<std::string> kept = {
      temporary_name(3),           ".espalier-elsewhere-1-999999-0.tmp", ".espalier-.tmp",
      ".espalier-" + ended + "-0", ".other-" + ended + "-0.tmp",         "rows.jsonl"};
  for (const std::string& name : kept) write_text(folder / name, "x");
  write_text(folder / (".espalier-" + ended + "-0.tmp"), "x");
  write_text(folder / (".espalier-" + ended + "-12.tmp"), "x");
  EXPECT_EQ(names_in(folder.path()).size(), kept.size() + 2);
  sweep_temporaries(folder.path());
  EXPECT_EQ(names_in(folder.path()), kept);
  sweep_temporaries(folder / "missing");
}

TEST(Temporaries, ASignalHandlerRemovesThem) {
  const ScratchFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGTERM, [](int) {
      remove_registered_temporaries();
      ::_exit(7);
    });
    AtomicFile file(folder / "a"), other(folder / "b");
    file.write("text");
    other.commit();
    ::raise(SIGTERM);
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  EXPECT_EQ(names_in(folder.path()), std::set<std::string>{"b"});
}

TEST(Temporaries, AKilledProcessIsCleanedUpAfterByTheNextWriter) {
  const ScratchFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(folder / "a");
    ::raise(SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(names_in(folder.path()).size(), 1u);
  write_text(folder / "b", "x");
  EXPECT_EQ(names_in(folder.path()), std::set<std::string>{"b"});
}

TEST(Temporaries, MoreThanCanBeKeptInMindAreWrittenAllTheSame) {
  const ScratchFolder folder;
  {
    std::vector<std::unique_ptr<AtomicFile>> files;
    for (int i = 0; i < 100; ++i) files.push_back(std::make_unique<AtomicFile>(folder / std::to_string(i)));
    files[99]->commit();
  }
  EXPECT_EQ(names_in(folder.path()), std::set<std::string>{"99"});
}

}  // namespace
}  // namespace espalier
