// SPDX-License-Identifier: Apache-2.0
// Any bytes as a TOML file for --config: refused with InputError or by the parser of flags, or flags that
// survive being written to a file and read again.
#include <optional>

#include "espalier/base/check.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/flags/toml_config.h"
#include "tests/fuzz/input_file.h"

namespace espalier::fuzz {
namespace {

// The flags of a command after a run with --config; nothing where they are refused.
std::optional<nlohmann::ordered_json> flags_of(const InputFile& file) {
  cli::Command command{.name = "train", .summary = ""};
  std::string text;
  std::vector<std::string> names;
  std::vector<double> numbers;
  int64_t whole = 0;
  double real = 0;
  bool flag = false;
  command.options.add("text", &text, "");
  command.options.add("name", &names, "");
  command.options.add("numbers", &numbers, "", {.has_commas = true});
  command.options.add("whole-number", &whole, "");
  command.options.add("real", &real, "");
  command.options.add("flag", &flag, "");
  try {
    cli::set_options(&command, {"--config", file.path().string()});
  } catch (const InputError&) {
    return std::nullopt;
  } catch (const cli::UsageError&) {
    return std::nullopt;
  }
  return cli::resolved_flags(command.options);
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
