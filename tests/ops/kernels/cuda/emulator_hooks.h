// SPDX-License-Identifier: Apache-2.0
// What the emulator's parts for single kinds of GPU need of its threads and blocks.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>

namespace espalier::testing {

template <class... Args>
[[noreturn]] void fail_emulation(fmt::format_string<Args...> text, Args&&... args) {
  throw std::logic_error(fmt::format(text, std::forward<Args>(args)...));
}

/// State that a part keeps of a block.
class BlockPart {
 public:
  virtual ~BlockPart() = default;
  /// When all threads have ended. Throws what the block did wrong.
  virtual void end() = 0;
};

/// The running block's state, made by `make` when it is first asked for.
BlockPart& block_part(const std::function<std::unique_ptr<BlockPart>()>& make);
int64_t shared_bytes();
/// Lets others run until `ready`.
void wait_until(std::function<bool()> ready);
/// Where something others may have waited for has just happened, or something is about to that comes too late
/// for a kernel that does not wait for it.
void let_others_run();
/// Runs `action` at a random moment, at the latest when all threads wait; not after they have ended.
void do_later(std::function<void()> action);

}  // namespace espalier::testing
