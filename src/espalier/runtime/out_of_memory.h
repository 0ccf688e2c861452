// SPDX-License-Identifier: Apache-2.0
// The error message when memory runs out.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace espalier {

/// Sets the current work for the message, such as "reading rows.jsonl". Thread-safe.
void set_current_work(const std::string& work);

/// A message with advice for running out of memory in the current work.
std::string out_of_memory_text();

/// The same if `error` is out of memory, of the host (std::bad_alloc, LibTorch's allocator) or of a GPU;
/// nullopt for any other error.
std::optional<std::string> out_of_memory_message(const std::exception& error);

}  // namespace espalier
