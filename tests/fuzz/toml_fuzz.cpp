// SPDX-License-Identifier: Apache-2.0
// Any bytes as a TOML file for --config: refused with InputError or by the parser of flags, or flags that
// survive being written to a file and read again.
#include <algorithm>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/cli/flags/toml_config.h"
#include "tests/fuzz/input_file.h"

namespace espalier::fuzz {
namespace {

using cli::expand_config;
using cli::refuse_repeated_flags;
using cli::resolved_flags;

// The flags of a command after a run with --config; nothing where they are refused.
std::optional<nlohmann::ordered_json> flags_of(const InputFile& file) {
  CLI::App app;
  CLI::App* command = app.add_subcommand("train");
  std::string config, text;
  std::vector<std::string> names;
  std::vector<double> numbers;
  int64_t whole = 0;
  double real = 0;
  bool flag = false;
  command->add_option("--config", config);
  command->add_option("--text", text);
  command->add_option("--name", names);
  command->add_option("--numbers", numbers)->delimiter(',');
  command->add_option("--whole-number", whole);
  command->add_option("--real", real);
  command->add_flag("--flag", flag);
  refuse_repeated_flags(command);
  try {
    std::vector<std::string> arguments = expand_config(app, {"train", "--config", file.path().string()});
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
  } catch (const InputError&) {
    return std::nullopt;
  } catch (const CLI::ParseError&) {
    return std::nullopt;
  }
  return resolved_flags(*command);
}

}  // namespace
}  // namespace espalier::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  const auto flags = fuzz::flags_of(fuzz::InputFile(data, size));
  if (!flags) return 0;
  const std::string written = cli::to_toml(*flags);
  const auto again = fuzz::flags_of(fuzz::InputFile(written.data(), written.size()));
  fuzz::require(again && *again == *flags);
  return 0;
}
