// SPDX-License-Identifier: Apache-2.0
// Messages of exceptions, of those about memory among them.
#pragma once

#include <exception>
#include <string>

namespace espalier {

/// out_of_memory_text (runtime/progress.h) where the host (std::bad_alloc, LibTorch's allocator) or a GPU is
/// out of memory; or else what the exception says, without LibTorch's backtrace.
std::string text_of(const std::exception& error);

}  // namespace espalier
