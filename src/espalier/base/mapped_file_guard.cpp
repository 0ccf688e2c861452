// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/mapped_file_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <optional>

#include "espalier/base/check.h"

namespace espalier {

/// The signal handler reads slots, so they need neither locks nor memory that may be freed.
struct GuardedRange::Slot {
  std::atomic<uintptr_t> begin{0};  // 0: the slot is free; written last and cleared first
  std::atomic<size_t> size{0};
  std::atomic<bool> faulted{false};  // was read beyond its end
  // Used outside of the handler only, under the mutex.
  bool taken = false;
  const std::string* name = nullptr;
  int descriptor = -1;
};

namespace {

using Slot = GuardedRange::Slot;
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

/// Blocks are never freed, because a signal handler may be reading them.
struct Block {
  Slot slots[64];
  std::atomic<Block*> next{nullptr};
};
Block first_block;
std::mutex mutex;
std::optional<std::string> lost_file;  // a file that faulted and was unregistered since
uintptr_t page_bytes = 4096;
std::atomic<bool> has_other_action{false};
struct sigaction other_action;  // that of another library of this process, which guards files of its own

template <typename Predicate>
Slot* find_slot(Predicate matches) {
  for (Block* block = &first_block; block != nullptr; block = block->next.load(std::memory_order_acquire)) {
    for (Slot& slot : block->slots) {
      if (matches(slot)) return &slot;
    }
  }
  return nullptr;
}

Slot* take_slot() {
  Slot* free = find_slot([](const Slot& slot) { return !slot.taken; });
  if (free != nullptr) return free;
  Block* last = &first_block;
  while (Block* next = last->next.load(std::memory_order_acquire)) last = next;
  auto* added = new Block;
  last->next.store(added, std::memory_order_release);
  return &added->slots[0];
}

// Maps zeros beyond the end of the file, so that the faulting instruction can continue.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  Slot* slot = find_slot([address](const Slot& candidate) {
    const uintptr_t begin = candidate.begin.load(std::memory_order_acquire);
    return begin != 0 && address >= begin && address - begin < candidate.size.load(std::memory_order_relaxed);
  });
  const uintptr_t page = address & ~(page_bytes - 1);
  const uintptr_t end = slot == nullptr ? 0 : slot->begin.load() + slot->size.load();
  // The pages after this one are missing too. If the disk failed instead, nothing of the file will be used.
  const bool replaced =
      slot != nullptr &&
      ::mmap(reinterpret_cast<void*>(page),  // NOLINT(performance-no-int-to-ptr)
             end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  if (replaced) {
    slot->faulted.store(true);
  } else if (slot == nullptr && (other_action.sa_flags & SA_SIGINFO) != 0) {
    other_action.sa_sigaction(signal, info, context);
  } else {
    ::signal(signal, SIG_DFL);  // the instruction faults again, and the default handler ends the process
  }
  errno = error;
}

bool is_shorter(const Slot& slot) {
  struct stat status;
  return ::fstat(slot.descriptor, &status) == 0 &&
         (status.st_size < 0 || static_cast<size_t>(status.st_size) < slot.size.load());
}

[[noreturn]] void throw_truncated(const std::string& name) {
  throw InputError(name + ": was truncated while it was being read, or its disk failed");
}

}  // namespace

GuardedRange::GuardedRange(const void* begin, size_t size, const std::string& name, int descriptor)
    : name_(std::make_unique<std::string>(name)) {
  const std::lock_guard lock(mutex);
  slot_ = take_slot();
  slot_->taken = true;
  slot_->name = name_.get();
  slot_->descriptor = descriptor;
  slot_->faulted.store(false);
  slot_->size.store(size);
  slot_->begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
}

GuardedRange::~GuardedRange() {
  const std::lock_guard lock(mutex);
  slot_->begin.store(0);
  if (slot_->faulted.load()) lost_file = *name_;
  slot_->taken = false;
}

void GuardedRange::check() const {
  if (slot_->faulted.load() || is_shorter(*slot_)) throw_truncated(*name_);
}

void guard_mapped_files() {
  page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  struct sigaction before{};
  ::sigaction(SIGBUS, &action, &before);
  // Only the first: two libraries that call each other would never end.
  if (before.sa_sigaction != on_bus_error && !has_other_action.exchange(true)) other_action = before;
}

void check_mapped_files() {
  std::optional<std::string> name;
  {
    const std::lock_guard lock(mutex);
    name.swap(lost_file);
    const Slot* bad =
        find_slot([](const Slot& slot) { return slot.taken && (slot.faulted.load() || is_shorter(slot)); });
    if (bad != nullptr) name = *bad->name;
  }
  if (name) throw_truncated(*name);
}

}  // namespace espalier
