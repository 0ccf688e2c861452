// SPDX-License-Identifier: Apache-2.0
// What an exception says.
#pragma once

#include <string>

namespace espalier::testing {

/// The message of the exception of type E that `action` throws; "" when it throws nothing.
template <typename E, typename Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace espalier::testing
