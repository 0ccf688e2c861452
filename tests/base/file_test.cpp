// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

int64_t num_entries(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

TEST(MappedFile, ShowsTheBytesOfAFile) {
  const ScratchFolder folder;
  write_text(folder / "a", std::string("x\0y", 3));
  EXPECT_EQ(text_of(MappedFile(folder / "a")), std::string("x\0y", 3));
  write_text(folder / "empty", "");
  EXPECT_TRUE(MappedFile(folder / "empty").bytes().empty());
}

TEST(MappedFile, RefusesWhatIsNotARegularFile) {
  const ScratchFolder folder;
  EXPECT_NE(message_of<InputError>([&] { MappedFile(folder.path()); }).find("received a folder"),
            std::string::npos);
  const std::string missing = message_of<InputError>([&] { MappedFile(folder / "missing"); });
  EXPECT_NE(missing.find("missing: No such file"), std::string::npos) << missing;
  EXPECT_THROW(MappedFile("/dev/null"), InputError);
}

TEST(AtomicFile, AppearsOnlyOnCommit) {
  const ScratchFolder folder;
  write_text(folder / "a", "old");
  {
    AtomicFile file(folder / "a");
    file.write("new");
    EXPECT_EQ(read_text(folder / "a"), "old");
  }
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_EQ(num_entries(folder.path()), 1);
  AtomicFile file(folder / "a");
  file.write("new ");
  file.write(std::as_bytes(std::span("er", 2)));
  file.commit();
  EXPECT_EQ(read_text(folder / "a"), "new er");
  EXPECT_EQ(num_entries(folder.path()), 1);
}

TEST(AtomicFile, RefusesFoldersAndMissingFolders) {
  const ScratchFolder folder;
  EXPECT_THROW(AtomicFile(folder.path()), InputError);
  EXPECT_THROW(AtomicFile(folder.path() / ""), InputError);
  EXPECT_THROW(AtomicFile(folder / "none/a"), InputError);
  EXPECT_THROW(AtomicFile("/dev/null"), InputError);
}

TEST(AtomicFile, ReplacesTheFileThatALinkNames) {
  const ScratchFolder folder;
  write_text(folder / "a", "old");
  std::filesystem::create_symlink("a", folder / "link");
  write_text(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "a"), "new");
}

TEST(AtomicFile, ReportsAFullDisk) {
  // A limit on the size of files replaces a full disk, because write() fails in the same way.
  const ScratchFolder folder;
  write_text(folder / "a", "old");
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of<InputError>([&] { write_text(folder / "a", std::string(100'000, 'x')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("cannot write"), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(read_text(folder / "a"), "old");
  EXPECT_EQ(num_entries(folder.path()), 1);
}

TEST(ReadText, ReadsFilesOfAnySizeAndPipes) {
  const ScratchFolder folder;
  EXPECT_THROW(read_text(folder.path()), InputError);
  EXPECT_THROW(read_text(folder / "missing"), InputError);
  for (const size_t size : {0, 1, 4095, 4096, 4097, 100'000}) {
    write_text(folder / "a", std::string(size, 'x'));
    EXPECT_EQ(read_text(folder / "a").size(), size);
  }
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], "piped", 5), 5);
  ::close(ends[1]);
  EXPECT_EQ(read_text("/proc/self/fd/" + std::to_string(ends[0])), "piped");
  ::close(ends[0]);
}

// The final name may be that of a mount point, which stays what it is.
TEST(PartialFolder, FillsAnEmptyFolderOrMakesANewOne) {
  const ScratchFolder folder;
  for (const char* name : {"empty", "new", "a/b/c"}) {
    SCOPED_TRACE(name);
    const std::filesystem::path final_path = folder / name;
    if (final_path.filename() == "empty") std::filesystem::create_directory(final_path);
    struct stat before{}, after{};
    const bool was_there = ::stat(final_path.c_str(), &before) == 0;
    for (const bool is_whole : {false, true}) {
      PartialFolder partial(final_path);
      std::filesystem::create_directory(partial.path());
      write_text(partial.path() / "one", "1");
      write_text(partial.path() / "two", "2");
      if (!is_whole) continue;
      partial.commit();
    }
    ASSERT_EQ(::stat(final_path.c_str(), &after), 0);
    EXPECT_TRUE(!was_there || before.st_ino == after.st_ino);
    EXPECT_EQ(num_entries(final_path), 2);
    EXPECT_EQ(read_text(final_path / "two"), "2");
  }
  EXPECT_EQ(num_entries(folder.path()), 3);
}

TEST(PartialFolder, LeavesNothingBehindAndRefusesFilesOfOthers) {
  const ScratchFolder folder;
  {
    PartialFolder partial(folder / "a/b/c");
    std::filesystem::create_directory(partial.path());
    write_text(partial.path() / "one", "1");
  }
  EXPECT_EQ(num_entries(folder.path()), 0);
  std::filesystem::create_directory(folder / "empty");
  PartialFolder partial(folder / "empty");
  std::filesystem::create_directory(partial.path());
  write_text(folder / "empty/others", "3");
  EXPECT_NE(message_of<InputError>([&] { partial.commit(); }).find("expected a new or empty folder"),
            std::string::npos);
}

TEST(SyncFolder, AcceptsFoldersAndReportsMissingOnes) {
  const ScratchFolder folder;
  write_text(folder / "a", "x");
  std::filesystem::create_directory(folder / "inner");
  std::filesystem::create_symlink("nowhere", folder / "dangling");
  EXPECT_NO_THROW(sync_folder(folder.path()));
  EXPECT_THROW(sync_folder(folder / "missing"), InputError);
}

}  // namespace
}  // namespace espalier
