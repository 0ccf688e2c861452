// SPDX-License-Identifier: Apache-2.0
// Values that operators find without being given them.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace espalier::detail {

/// The kinds of scoped values.
enum class Scope : uint8_t { kKernels, kUpcastWeights, kPreparedWeights, kRowAdapters };

/// The kind as LibTorch knows it. Differs from LibTorch's kinds.
c10::DebugInfoKind kind_of(Scope scope);

/// Holds a value that operators find while this lives: in the thread that made it, and in all threads that
/// run its backward passes, to which LibTorch passes on such values. Of several of one kind (Value::kScope)
/// the innermost counts. They end in the reverse order.
template <class Value>
class ScopedValue {
 public:
  explicit ScopedValue(Value value = {})
      : guard_(kind_of(Value::kScope), std::make_shared<Held>(std::move(value))) {}

  /// The innermost value; null where there is none.
  static Value* find() {
    auto* held = static_cast<Held*>(c10::ThreadLocalDebugInfo::get(kind_of(Value::kScope)));
    return held == nullptr ? nullptr : &held->value;
  }

 private:
  struct Held : c10::DebugInfoBase {
    explicit Held(Value given) : value(std::move(given)) {}
    Value value;
  };

  c10::DebugInfoGuard guard_;
};

}  // namespace espalier::detail
