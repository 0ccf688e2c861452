// SPDX-License-Identifier: Apache-2.0
// The subcommands of `espalier`.
#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/data/vocabulary.h"

namespace espalier {
class Group;
}

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
  /// Gets the raw arguments once they have set the options, before `run`, and may not return.
  std::function<void(const std::vector<std::string>& arguments)> hand_over{};
  /// Instead of options and `run`: gets the raw arguments.
  std::function<void(const std::vector<std::string>& arguments)> pass_on{};
  std::string group{};  // heading in the help

  /// All names of flags, without dashes.
  std::vector<std::string> flag_names() const {
    std::vector<std::string> names;
    for (const Option& option : options.all()) {
      if (!option.text().names.empty()) names.push_back(option.name());
    }
    if (has_config) names.emplace_back("config");
    names.emplace_back("help");
    return names;
  }
};

/// Appends all commands in the order of the help. `version` gives the text of --version.
void add_all_commands(std::deque<Command>* all, const std::function<std::string()>& version);

/// What the Python package makes of JSON: the page of `inspect --html` or the text of a command
/// (python/espalier/printed/__main__.py has the kinds).
std::string by_python(const std::string& command, const std::string& kind, std::string_view json);

/// Becomes a Python that converts files to rows with these arguments of `espalier prepare`, and then runs
/// this program as `inspect` on the rows, with those of `inspect`.
[[noreturn]] void inspect_converted(const std::vector<std::string>& prepare,
                                    const std::vector<std::string>& inspect);

/// The vocabulary of a tokenizer.json, which the Python package reads. Throws InputError, which names the
/// file.
Vocabulary read_vocabulary(const std::string& command, const std::filesystem::path& tokenizer_json);

// `version` gives the text of --version, which runs store.
// `group`: the ranks that divide the work; nullptr: one process.
Command bench_command();
Command completion_command(const std::deque<Command>* all);
Command device_command();
Command inspect_command();
Command man_command(const std::deque<Command>* all, const std::function<std::string()>& version);
Command plan_command();
/// One that is written in Python.
Command python_command(std::string_view name);
Command synth_command();
Command train_command(const std::function<std::string()>& version, const Group* group = nullptr);
Command verify_command(const Group* group = nullptr);

/// Becomes so many processes of `espalier train`, without --processes, which torchrun starts.
[[noreturn]] void start_processes(int64_t processes, std::vector<std::string> arguments);

// Summaries of the commands that need LibTorch. The program without LibTorch lists them as well.
inline constexpr const char* kSummaryOfTrain =
    "Train a model on trajectories; shared prefixes are encoded once";
inline constexpr const char* kSummaryOfVerify =
    "Prove on your model and data that loss and every gradient equal per-trajectory training";
inline constexpr const char* kSummaryOfBench =
    "Measure strategies against sequence packing, interleaved, with the FLOP bound";
inline constexpr const char* kSummaryOfDevice =
    "Print the CPU and GPUs of this machine and the kernels that run on them";

}  // namespace espalier::cli
