// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/scoped_value.h"

#include <array>
#include <cstddef>
#include <string_view>
#include <type_traits>

namespace espalier::detail {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"espalier kernels", "espalier upcast weights",
                                                    "espalier prepared weights", "espalier row adapters"};
constexpr uint8_t kFirst = 0xe0;  // LibTorch's own kinds are the first numbers

// Kinds are numbers in PyTorch 2.11, and addresses of names in 2.15. A template, so that only the
// branch that exists is compiled.
template <class Kind>
Kind kind_in(Scope scope) {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(kFirst + static_cast<uint8_t>(scope));
  } else {
    return Kind(&kNames[static_cast<size_t>(scope)]);
  }
}

}  // namespace

c10::DebugInfoKind kind_of(Scope scope) {
  return kind_in<c10::DebugInfoKind>(scope);
}

}  // namespace espalier::detail
