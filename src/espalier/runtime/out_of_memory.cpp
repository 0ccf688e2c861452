// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/out_of_memory.h"

#include <c10/util/Exception.h>

#include <new>
#include <string_view>

#include "espalier/runtime/progress.h"

namespace espalier {
namespace {

/// LibTorch has an exception type for GPU memory, but not for host memory.
bool is_about_memory(const c10::Error& error) {
  const std::string_view text = error.what_without_backtrace();
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         (text.find("CPUAllocator") != std::string_view::npos &&
          text.find("memory") != std::string_view::npos);
}

}  // namespace

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const bool is_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                         (torch_error != nullptr && is_about_memory(*torch_error));
  if (is_memory) return out_of_memory_text();
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace espalier
