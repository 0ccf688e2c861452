// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/temporaries.h"

#include <limits.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>

#include "espalier/base/check.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = ".espalier-", kSuffix = ".tmp";

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  std::string text(name.data());
  for (char& letter : text) {
    if (letter == '/') letter = '_';
  }
  return text;
}

// Process ids are unique only within their namespace, and containers on one host may share its host name.
std::string host_and_namespace() {
  struct stat status{};
  const bool known = ::stat("/proc/self/ns/pid", &status) == 0;
  return fmt::format("{}-{}", host_name(), known ? static_cast<uint64_t>(status.st_ino) : 0);
}

struct TemporarySlot {
  std::atomic<bool> taken{false};  // by a RegisteredTemporary
  std::atomic<bool> ready{false};  // `path` is complete
  std::array<char, PATH_MAX> path{};
};
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler reads it

std::array<TemporarySlot, 64> temporary_slots;

}  // namespace

std::string process_tag() {
  return fmt::format("{}-{}", host_and_namespace(), ::getpid());
}

bool names_ended_process(std::string_view tag) {
  const size_t dash = tag.rfind('-');
  if (dash == std::string_view::npos || tag.substr(0, dash) != host_and_namespace()) return false;
  const char* end = tag.data() + tag.size();
  pid_t pid = 0;
  const auto [last, error] = std::from_chars(tag.data() + dash + 1, end, pid);
  if (error != std::errc() || last != end || pid <= 0) return false;
  return ::kill(pid, 0) != 0 && errno == ESRCH;
}

RegisteredTemporary::RegisteredTemporary(const fs::path& path) {
  // An absolute path stays valid if the process changes its working directory.
  std::error_code error;
  const std::string text = fs::absolute(path, error).string();
  if (error || text.size() >= PATH_MAX) return;
  for (size_t i = 0; i < temporary_slots.size(); ++i) {
    if (temporary_slots[i].taken.exchange(true)) continue;
    std::memcpy(temporary_slots[i].path.data(), text.c_str(), text.size() + 1);
    temporary_slots[i].ready = true;
    slot_ = static_cast<int>(i);
    return;
  }
}

void RegisteredTemporary::forget() {
  if (slot_ < 0) return;
  temporary_slots[slot_].ready = false;
  temporary_slots[slot_].taken = false;
  slot_ = -1;
}

void remove_registered_temporaries() noexcept {
  for (const TemporarySlot& slot : temporary_slots) {
    if (slot.ready) ::unlink(slot.path.data());
  }
}

std::string temporary_name(uint64_t number) {
  return fmt::format("{}{}-{}{}", kPrefix, process_tag(), number, kSuffix);
}

void sweep_temporaries(const fs::path& folder) noexcept {
  try {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) continue;
      const std::string_view inner =
          std::string_view(name).substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
      const size_t dash = inner.rfind('-');
      if (dash == std::string_view::npos || !names_ended_process(inner.substr(0, dash))) continue;
      if (fs::is_regular_file(entry.symlink_status())) ::unlink(entry.path().c_str());
    }
    // NOLINTNEXTLINE(bugprone-empty-catch): a folder that cannot be listed is left unchanged
  } catch (const std::exception&) {
  }
}

}  // namespace espalier
