// SPDX-License-Identifier: Apache-2.0
// The work of commands as a library: options in, JSON out. The Python package parses arguments, shows what
// happens and prints (python/espalier/commands).
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/options.h"
#include "espalier/data/vocabulary.h"

namespace espalier {
class Group;
}

namespace espalier::commands {

/// Options that a command cannot be run with.
class UsageError : public InputError {
 public:
  using InputError::InputError;
};

/// A request to stop training, which another thread makes.
struct StopRequest {
  std::atomic<bool> requested{false};
  /// -1: the process may end at once. 0: a run has begun and has no step to save. Otherwise the current step,
  /// from 1, which is finished first.
  std::atomic<int64_t> step{-1};
};

/// A table of a TOML file.
struct FileTable {
  std::string where;              // "FILE:LINE"
  nlohmann::ordered_json values;  // by key: text, numbers, booleans, lists of them
};

/// What a command needs of whoever runs it.
struct Caller {
  /// The text for JSON of a kind (python/espalier/printed/__init__.py has the kinds): pages, tables, log
  /// lines.
  std::function<std::string(const std::string& kind, std::string_view json)> text_of{};
  /// The tables [[name]] of the TOML file of an option. Throws InputError with file:line.
  std::function<std::vector<FileTable>(const std::string& option, const std::string& file,
                                       const std::string& name)>
      read_tables{};
  /// The texts of the tokens of a tokenizer.json. Throws InputError, which names the file.
  std::function<Vocabulary(const std::filesystem::path& tokenizer_json)> read_vocabulary{};
  StopRequest* stop = nullptr;
  std::string version{};         // of the program, a property a line; runs store it
  const Group* group = nullptr;  // the ranks that divide the work; nullptr: one process
};

struct Result {
  nlohmann::ordered_json json{};  // what there is to print; null: nothing
  int status = 0;                 // the exit status
};

/// A command whose options can be set and described.
struct Command {
  OptionList options{};  // their targets are owned by `run`
  std::function<Result(const OptionList& options)> run{};

  /// Sets options that the command has. Throws UsageError for values that they cannot have.
  void set(const NamedTexts& texts);
  /// Sets the options and runs. Throws UsageError as well where one is missing, InputError and others where
  /// the work fails.
  Result operator()(const NamedTexts& texts);
};

// The Caller must outlive the command.
Command bench_command(const Caller& caller);
Command device_command(const Caller& caller);
Command inspect_command(const Caller& caller);
Command synth_command(const Caller& caller);
Command train_command(const Caller& caller);
Command verify_command(const Caller& caller);

}  // namespace espalier::commands
