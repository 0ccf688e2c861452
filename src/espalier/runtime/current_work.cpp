// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <mutex>
#include <string_view>

#include "espalier/runtime/out_of_memory.h"

namespace espalier {
namespace {

std::mutex mutex;
std::string current_work;

constexpr std::string_view kReading = "reading ";

}  // namespace

void set_current_work(const std::string& work) {
  const std::lock_guard lock(mutex);
  current_work = work;
}

std::string out_of_memory_text() {
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

}  // namespace espalier
