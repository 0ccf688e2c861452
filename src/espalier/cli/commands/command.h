// SPDX-License-Identifier: Apache-2.0
// A subcommand of `espalier`.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "espalier/base/options.h"

namespace espalier::cli {

/// Wrong usage of a command: exit status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Command {
  std::string name;
  std::string summary;                                  // one sentence
  std::string closing{};                                // the end of its help
  OptionList options{};                                 // their targets are owned by `run`
  std::function<int(const OptionList& options)> run{};  // returns the exit status; throws on failure
  bool has_config = true;                               // accepts --config FILE, with its flags as keys
  /// Instead of options and `run`: gets the raw arguments.
  std::function<void(const std::vector<std::string>& arguments)> pass_on{};
  std::string group{};  // heading in the help

  /// All names of flags, without dashes.
  std::vector<std::string> flag_names() const;
};

}  // namespace espalier::cli
