// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/suggest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <string_view>

namespace espalier::cli {
namespace {

// Flags with their names in other trainers before them.
constexpr std::string_view kOtherNames =
    "lr learning-rate max-steps steps num-steps steps num-epochs epochs num-train-epochs epochs bs "
    "batch-size "
    "output out output-dir out wd weight-decay grad-clip max-grad-norm clip-grad max-grad-norm dataset data "
    "train-file data model-name-or-path model model-path model loss objective lr-scheduler scheduler "
    "lr-scheduler-type scheduler warmup warmup-steps gradient-checkpointing checkpoint-activations "
    "max-tokens "
    "token-budget save-steps save-every save-total-limit keep-last";

/// The flag that other trainers call `name`; "": none.
std::string flag_called(const std::string& name) {
  std::istringstream words{std::string(kOtherNames)};
  for (std::string other, flag; words >> other >> flag;) {
    if (other == name) return flag;
  }
  return "";
}

// The Levenshtein distance.
size_t edits(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (from[i - 1] != to[j - 1])});
      diagonal = above;
    }
  }
  return row.back();
}

std::string meant(const std::string& prefix, const std::string& word) {
  return word.empty() ? std::string() : fmt::format("; did you mean {}{}?", prefix, word);
}

std::string unknown_flag(const Command& command, const std::string& argument) {
  const std::string name = argument.substr(2, argument.find('=') - 2);
  const std::vector<std::string> known = command.flag_names();
  if (std::ranges::find(known, name) != known.end()) return "";
  return fmt::format("unknown flag {} of `espalier {}`{}", argument.substr(0, argument.find('=')),
                     command.name, suggested_flag(command, name));
}

}  // namespace

std::string nearest_word(const std::string& given, std::span<const std::string> known) {
  std::string nearest;
  size_t least = given.size() / 2 + 1;
  for (const std::string& word : known) {
    const size_t distance = edits(given, word);
    if (distance >= least) continue;
    least = distance;
    nearest = word;
  }
  return nearest;
}

std::string suggested_flag(const Command& command, const std::string& name) {
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  const std::vector<std::string> known = command.flag_names();
  const std::string other = flag_called(dashed);
  const bool has_other = std::ranges::find(known, other) != known.end();
  return meant("--", has_other ? other : nearest_word(dashed, known));
}

std::string unknown_word(const std::deque<Command>& commands, const std::vector<std::string>& args) {
  if (args.empty() || args[0].starts_with('-')) return "";
  const auto command = std::ranges::find(commands, args[0], &Command::name);
  if (command == commands.end()) {
    std::vector<std::string> names;
    for (const Command& known : commands) names.push_back(known.name);
    return fmt::format("unknown command {}; expected one of {}{}", args[0], fmt::join(names, ", "),
                       meant("", nearest_word(args[0], names)));
  }
  if (command->pass_on) return "";
  for (size_t i = 1; i < args.size() && args[i] != "--"; ++i) {
    if (!args[i].starts_with("--")) continue;
    if (std::string fault = unknown_flag(*command, args[i]); !fault.empty()) return fault;
  }
  return "";
}

}  // namespace espalier::cli
