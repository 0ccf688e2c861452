// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/option_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

namespace espalier {
namespace {

std::atomic<OptionNames> option_names{OptionNames::kFlags};

}  // namespace

void name_options_as(OptionNames names) {
  option_names = names;
}

std::string named(std::string_view option, std::string_view value) {
  if (option_names == OptionNames::kFlags)
    return fmt::format("--{}{}{}", option, value.empty() ? "" : " ", value);
  std::string argument(option);
  std::ranges::replace(argument, '-', '_');
  return value.empty() ? argument : fmt::format("{}=\"{}\"", argument, value);
}

}  // namespace espalier
