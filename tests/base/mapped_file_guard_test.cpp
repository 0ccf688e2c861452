// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/mapped_file_guard.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;

std::string fault() {
  return message_of<InputError>([] { check_mapped_files(); });
}

/// Reads every byte.
int64_t sum_of(std::span<const std::byte> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0},
                         [](int64_t sum, std::byte each) { return sum + static_cast<int64_t>(each); });
}

class MappedFileGuard : public ::testing::Test {
 protected:
  MappedFileGuard() {
    ::sigaction(SIGBUS, nullptr, &before_);
    guard_mapped_files();
    EXPECT_EQ(fault(), "");
  }
  ~MappedFileGuard() override { ::sigaction(SIGBUS, &before_, nullptr); }

  std::filesystem::path file_of(const std::string& name, size_t size) {
    write_text(folder_ / name, std::string(size, '\1'));
    return folder_ / name;
  }

  std::string message(const std::filesystem::path& path) {
    return path.string() + ": was truncated while it was being read, or its disk failed";
  }

  ScratchFolder folder_;
  struct sigaction before_;
};

TEST_F(MappedFileGuard, TurnsDeathIntoZerosAndAnError) {
  const auto path = file_of("a", 100'000);
  {
    const MappedFile file(path);
    EXPECT_EQ(sum_of(file.bytes()), 100'000);
    EXPECT_EQ(fault(), "");
    std::filesystem::resize_file(path, 8192);
    ::madvise(const_cast<std::byte*>(file.bytes().data()), file.bytes().size(), MADV_DONTNEED);
    EXPECT_EQ(sum_of(file.bytes()), 8192);
    EXPECT_EQ(fault(), message(path));
    EXPECT_EQ(fault(), message(path));  // as long as it is mapped
    EXPECT_EQ(message_of<InputError>([&] { file.check_whole(); }), message(path));
  }
  // Values of the file may have been used, so the error is reported once more after the file is unmapped.
  EXPECT_EQ(fault(), message(path));
  EXPECT_EQ(fault(), "");
}

TEST_F(MappedFileGuard, SeesAnEndInsideAPageAndPartsThatWereNotRead) {
  const auto path = file_of("a", 100'000);
  {
    const MappedFile file(path);
    // Beyond the new end, the rest of the page reads as zeros without any signal.
    std::filesystem::resize_file(path, 99'990);
    EXPECT_EQ(fault(), message(path));
    EXPECT_EQ(message_of<InputError>([&] { file.check_whole(); }), message(path));
  }
  EXPECT_EQ(fault(), "");  // nothing was read
}

TEST_F(MappedFileGuard, LeavesFilesAloneThatGrowAreRemovedOrReplaced) {
  const auto path = file_of("a", 10'000), other = file_of("b", 10'000);
  const MappedFile file(path), second(other);
  std::filesystem::resize_file(path, 50'000);
  EXPECT_EQ(fault(), "");
  std::filesystem::remove(path);
  write_text(other, "shorter");  // beside it, then renamed: the mapped file lives on
  EXPECT_EQ(sum_of(file.bytes()) + sum_of(second.bytes()), 20'000);
  file.check_whole();
  EXPECT_EQ(fault(), "");
}

TEST_F(MappedFileGuard, FindsTheFileAmongMany) {
  std::vector<std::unique_ptr<MappedFile>> files;
  const auto path = [&](int i) { return folder_ / std::to_string(i); };
  for (int i = 0; i < 200; ++i)
    files.push_back(std::make_unique<MappedFile>(file_of(std::to_string(i), 5000)));
  for (int i = 0; i < 200; i += 2) files[i].reset();
  for (int i = 0; i < 200; i += 4) files[i] = std::make_unique<MappedFile>(path(i));
  EXPECT_EQ(fault(), "");
  for (const int i : {0, 63, 197}) {
    std::filesystem::resize_file(path(i), 0);
    EXPECT_EQ(sum_of(files[i]->bytes()), 0);
    EXPECT_EQ(fault(), message(path(i)));
    files[i].reset();
    EXPECT_EQ(fault(), message(path(i)));
  }
  EXPECT_EQ(fault(), "");
}

TEST_F(MappedFileGuard, HoldsInEveryThread) {
  const auto path = file_of("a", 4'000'000);
  const MappedFile file(path);
  std::filesystem::resize_file(path, 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&] { EXPECT_EQ(sum_of(file.bytes()), 0); });
  for (std::thread& each : threads) each.join();
  EXPECT_EQ(fault(), message(path));
}

bool ended_badly(int status) {
  return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

bool killed_by_bus_error(int status) {
#ifdef ESPALIER_SANITIZED
  return ended_badly(status);  // the sanitizer's handler was there before, and reports it
#else
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
#endif
}

// Control: without a guard, and for memory that is not guarded, the signal kills as before.
TEST(MappedFileGuardDeathTest, OtherBusErrorsStayFatal) {
  const ScratchFolder folder;
  write_text(folder / "a", std::string(10'000, '\1'));
  const auto read_truncated = [&] {
    const MappedFile file(folder / "a");
    std::filesystem::resize_file(folder / "a", 0);
    if (sum_of(file.bytes()) == 0) std::_Exit(0);
  };
  EXPECT_EXIT(read_truncated(), ended_badly, "");
  write_text(folder / "a", std::string(10'000, '\1'));
  EXPECT_EXIT(
      {
        guard_mapped_files();
        read_truncated();
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        guard_mapped_files();
        ::raise(SIGBUS);
        // A raised signal has no address. The handler restores the default handler for the next one.
        ::raise(SIGBUS);
      },
      killed_by_bus_error, "");
}

TEST(MappedFile, PipesAreRefusedAtOnce) {
  const ScratchFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(
      message_of<InputError>([&] { const MappedFile file(folder / "pipe"); }),
      "cannot map " + (folder / "pipe").string() + ": expected a regular file, received a pipe or device");
}

}  // namespace
}  // namespace espalier
