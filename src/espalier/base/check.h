// SPDX-License-Identifier: Apache-2.0
// Errors of LibTorch-free code: exceptions whose message says what was expected and what was received. Code
// that takes tensors uses TORCH_CHECK in the same way.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace espalier {

/// Invalid user input: a file, a flag, a value. The message can be shown to the user as it is.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A bug in Espalier: an invariant does not hold.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

}  // namespace espalier

/// Throws InputError with a formatted message unless `condition` holds.
#define ESPALIER_CHECK(condition, ...)                        \
  do {                                                        \
    if (!(condition)) [[unlikely]]                            \
      throw ::espalier::InputError(fmt::format(__VA_ARGS__)); \
  } while (false)

/// Throws InternalError unless `condition` holds. Release builds check it too, because the exactness of
/// gradients depends on it.
#define ESPALIER_ASSERT(condition)                                                          \
  do {                                                                                      \
    if (!(condition)) [[unlikely]]                                                          \
      throw ::espalier::InternalError(                                                      \
          fmt::format("{}:{}: internal check failed: {}", __FILE__, __LINE__, #condition)); \
  } while (false)
