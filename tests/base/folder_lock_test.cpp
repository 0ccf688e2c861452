// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/folder_lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <optional>
#include <thread>

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

TEST(FolderLock, KnowsWhenItsFolderIsAnotherOne) {
  const ScratchFolder folder;
  const FolderLock lock(folder.path(), no_warning);
  EXPECT_TRUE(lock.is_in_place());
  std::filesystem::remove(folder / ".lock");
  EXPECT_FALSE(lock.is_in_place());
  const FolderLock other(folder.path(), no_warning);
  EXPECT_FALSE(lock.is_in_place());
  EXPECT_TRUE(other.is_in_place());
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

// A lock whose holder has not named itself: it has just taken it, or is about to give it back.
class NamelessHolder {
 public:
  explicit NamelessHolder(const std::filesystem::path& folder)
      : descriptor_(::open((folder / ".lock").c_str(), O_RDWR | O_CREAT, 0666)) {
    EXPECT_EQ(::flock(descriptor_, LOCK_EX | LOCK_NB), 0);
  }
  ~NamelessHolder() { ::close(descriptor_); }
  void write_name(const std::string& text) const {
    EXPECT_EQ(::pwrite(descriptor_, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  }

 private:
  int descriptor_;
};

TEST(FolderLock, IsTakenFromAHolderThatIsAboutToEnd) {
  const ScratchFolder folder;
  auto holder = std::make_optional<NamelessHolder>(folder.path());
  auto next = std::async(std::launch::async, [&] { return FolderLock(folder.path(), no_warning).held(); });
  // The holder ends after the first refusal. Ending before it would pass too, but show less.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  holder.reset();
  EXPECT_TRUE(next.get());
}

TEST(FolderLock, NamesAHolderThatHasJustBegun) {
  const ScratchFolder folder;
  const NamelessHolder holder(folder.path());
  auto next = std::async(std::launch::async, [&] {
    return message_of<InputError>([&] { FolderLock(folder.path(), no_warning); });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  holder.write_name("process 7 on host\n");
  EXPECT_NE(next.get().find("process 7 on host is writing"), std::string::npos);
}

TEST(FolderLock, NeedsAFolderThatCanBeWrittenTo) {
  const ScratchFolder folder;
  EXPECT_THROW(FolderLock(folder / "missing", no_warning), InputError);
}

}  // namespace
}  // namespace espalier
