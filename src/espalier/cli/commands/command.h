// SPDX-License-Identifier: Apache-2.0
// A subcommand of `espalier`: what it is called, its options, and what it does.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "espalier/base/options.h"

namespace espalier::cli {

/// A command that is used wrongly: exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Command {
  std::string name;
  std::string summary;                                  // one sentence
  std::string closing{};                                // what its help ends with
  OptionList options{};                                 // which fill what `run` holds
  std::function<int(const OptionList& options)> run{};  // gives the exit status; throws for what fails (1)
  bool has_config = true;                               // --config FILE, with its flags as keys
  /// In place of options and `run`: takes the arguments as they are.
  std::function<void(const std::vector<std::string>& arguments)> pass_on{};
  std::string group{};  // of commands that stand together in the help

  /// All that may follow two dashes.
  std::vector<std::string> flag_names() const;
};

}  // namespace espalier::cli
