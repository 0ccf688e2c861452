// SPDX-License-Identifier: Apache-2.0
// What is said when memory runs out.
#pragma once

#include <exception>
#include <optional>
#include <string>

namespace espalier {

/// Names what the program is doing, for the message: "reading rows.jsonl". Safe to call from any thread.
void set_current_work(const std::string& work);

/// One sentence with what to do where memory runs out in the current work.
std::string out_of_memory_text();

/// The same where `error` says that memory could not be had, of the machine
/// (std::bad_alloc, LibTorch's allocator) or of a GPU; nullopt for any other error.
std::optional<std::string> out_of_memory_message(const std::exception& error);

}  // namespace espalier
