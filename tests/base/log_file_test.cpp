// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "espalier/base/file.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::ScratchFolder;

// While the object lives, files cannot grow beyond some bytes, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(LogFile, AppendsToWhatIsThere) {
  const ScratchFolder folder;
  write_text(folder / "log", "old\n");
  LogFile log(folder / "log");
  log.append("one\n");
  log.append("two\n");
  EXPECT_EQ(read_text(folder / "log"), "old\none\ntwo\n");
  EXPECT_EQ(log.num_missing(), 0);
  EXPECT_EQ(log.failure(), "");
}

TEST(LogFile, WritesWhatWaitedOnceItCan) {
  const ScratchFolder folder;
  LogFile log(folder / "log");
  log.append("0123456789\n");
  {
    const FullDisk full(16);
    log.append("abcdefghij\n");  // five bytes of it fit
    log.append("next\n");
    EXPECT_EQ(log.num_missing(), 2);
    EXPECT_NE(log.failure().find("File too large"), std::string::npos) << log.failure();
    EXPECT_NE(log.failure().find("16 bytes"), std::string::npos) << log.failure();
  }
  log.append("last\n");
  EXPECT_EQ(read_text(folder / "log"), "0123456789\nabcdefghij\nnext\nlast\n");
  EXPECT_EQ(log.num_missing(), 0);
  EXPECT_EQ(log.failure(), "");
}

TEST(LogFile, MayBeOpenedLater) {
  const ScratchFolder folder;
  LogFile log(folder / "missing/log");
  log.append("one\n");
  EXPECT_NE(log.failure().find("No such file"), std::string::npos) << log.failure();
  std::filesystem::create_directory(folder / "missing");
  log.append("two\n");
  EXPECT_EQ(read_text(folder / "missing/log"), "one\ntwo\n");
}

TEST(LogFile, BeginsAgainWhereItWasRemovedOrReplaced) {
  const ScratchFolder folder;
  LogFile log(folder / "log");
  EXPECT_FALSE(log.close_if_removed());  // not open yet
  log.append("one\n");
  EXPECT_FALSE(log.close_if_removed());
  std::filesystem::remove(folder / "log");
  EXPECT_TRUE(log.close_if_removed());
  EXPECT_FALSE(log.close_if_removed());
  log.append("two\n");
  EXPECT_EQ(read_text(folder / "log"), "two\n");
  std::filesystem::rename(folder / "log", folder / "log.1");
  write_text(folder / "log", "another\n");
  EXPECT_TRUE(log.close_if_removed());
  log.append("three\n");
  EXPECT_EQ(read_text(folder / "log.1"), "two\n");
  EXPECT_EQ(read_text(folder / "log"), "another\nthree\n");
}

TEST(LogFile, DropsWholeRecordsWhereTooMuchWaits) {
  const ScratchFolder folder;
  LogFile log(folder / "missing/log");
  const std::string record(size_t{1} << 20, 'x');
  for (int i = 0; i < 20; ++i) log.append(record);
  EXPECT_EQ(log.num_missing(), 20);
  std::filesystem::create_directory(folder / "missing");
  log.append("end");
  EXPECT_EQ(read_text(folder / "missing/log").size(), 16 * record.size());
  EXPECT_EQ(log.num_missing(), 5);  // four, and the one that came while sixteen waited
}

}  // namespace
}  // namespace espalier
