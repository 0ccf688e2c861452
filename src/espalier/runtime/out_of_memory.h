// SPDX-License-Identifier: Apache-2.0
// Messages of exceptions, of those about memory among them.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace espalier {

/// out_of_memory_text (runtime/progress.h) if `error` is out of memory, of the host (std::bad_alloc,
/// LibTorch's allocator) or of a GPU; nullopt for any other error.
std::optional<std::string> out_of_memory_message(const std::exception& error);

/// out_of_memory_message, or else what the exception says, without LibTorch's backtrace.
std::string text_of(const std::exception& error);

}  // namespace espalier
