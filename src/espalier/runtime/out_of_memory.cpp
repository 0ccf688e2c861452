// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/out_of_memory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <mutex>
#include <new>
#include <string_view>

namespace espalier {
namespace {

std::mutex mutex;
std::string current_work;

constexpr std::string_view kReading = "reading ";

std::string message() {
  const std::lock_guard lock(mutex);
  if (current_work.starts_with(kReading)) {
    return fmt::format(
        "out of memory while {}: use fewer trajectories (--limit), or packed .safetensors, which stay on "
        "disk",
        current_work);
  }
  return fmt::format(
      "out of memory{}: give a smaller --memory-budget, --token-budget or --batch-size, or "
      "--checkpoint-activations "
      "layer",
      current_work.empty() ? "" : " in " + current_work);
}

/// LibTorch has an exception type for GPU memory, but not for host memory.
bool is_about_memory(const c10::Error& error) {
  const std::string_view text = error.what_without_backtrace();
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         (text.find("CPUAllocator") != std::string_view::npos &&
          text.find("memory") != std::string_view::npos);
}

}  // namespace

void set_current_work(const std::string& work) {
  const std::lock_guard lock(mutex);
  current_work = work;
}

std::optional<std::string> out_of_memory_message(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return message();
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr || !is_about_memory(*torch_error)) return std::nullopt;
  return message();
}

}  // namespace espalier
