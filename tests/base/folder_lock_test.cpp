// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/folder_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;

void no_warning(const std::string& text) {
  FAIL() << text;
}

TEST(FolderLock, HasOneHolderAtATime) {
  const ScratchFolder folder;
  {
    const FolderLock lock(folder.path(), no_warning);
    EXPECT_TRUE(lock.held());
    const std::string message = message_of<InputError>([&] { FolderLock(folder.path(), no_warning); });
    EXPECT_NE(message.find(fmt::format("process {} on ", ::getpid())), std::string::npos) << message;
    EXPECT_NE(message.find(folder.path().string()), std::string::npos) << message;
  }
  EXPECT_TRUE(FolderLock(folder.path(), no_warning).held());
}

TEST(FolderLock, IsGivenBackByAKilledProcess) {
  const ScratchFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(folder.path(), {});
    [[maybe_unused]] const ssize_t told = ::write(ready[1], "x", 1);
    while (true) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string message = message_of<InputError>([&] { FolderLock(folder.path(), no_warning); });
  EXPECT_NE(message.find(fmt::format("process {} on ", child)), std::string::npos) << message;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(FolderLock(folder.path(), no_warning).held());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(FolderLock, NeedsAFolderThatCanBeWrittenTo) {
  const ScratchFolder folder;
  EXPECT_THROW(FolderLock(folder / "missing", no_warning), InputError);
}

}  // namespace
}  // namespace espalier
