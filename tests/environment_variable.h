// SPDX-License-Identifier: Apache-2.0
// Environment variables of tests.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace espalier::testing {

/// Sets a variable while it lives, or unsets it where the value is null. Then it is what it was before.
class ForcedVariable {
 public:
  ForcedVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~ForcedVariable() { set(before_ ? before_->c_str() : nullptr); }
  ForcedVariable(const ForcedVariable&) = delete;
  ForcedVariable& operator=(const ForcedVariable&) = delete;

 private:
  void set(const char* value) {
    value == nullptr ? unsetenv(name_.c_str()) : setenv(name_.c_str(), value, 1);
  }

  std::string name_;
  std::optional<std::string> before_;
};

}  // namespace espalier::testing
