// SPDX-License-Identifier: Apache-2.0
// espalier: trains language models on trees of tokens.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "espalier/base/check.h"
#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/printable.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/help_format.h"
#include "espalier/cli/kernel_check.h"
#include "espalier/cli/out_of_memory.h"
#include "espalier/cli/output.h"
#include "espalier/cli/signals.h"
#include "espalier/cli/suggest.h"
#include "espalier/cli/toml_config.h"
#include "espalier/cli/validators.h"
#include "espalier/cli/version.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier::cli {
namespace {

constexpr const char* kDescription =
    "Espalier trains language models on trees of tokens: shared prefixes are encoded once, forward and "
    "backward, with "
    "exactly the gradients of ordinary training.";
constexpr const char* kHelp = "Print this help and exit";
constexpr const char* kFooter =
    "A first run:\n"
    "  espalier prepare --model DIR --per-turn CHATS.jsonl -o rows.jsonl   text to trajectories\n"
    "  espalier import TRACES.jsonl -o rows.jsonl                          rollouts of other trainers\n"
    "  espalier inspect --model DIR --data rows.jsonl                      what sharing will gain\n"
    "  espalier verify  --model DIR --data rows.jsonl --limit 8            proof on your model and data\n"
    "  espalier train   --model DIR --data rows.jsonl --out RUN            train; then "
    "RUN/checkpoints/step_N\n"
    "\n`espalier COMMAND --help` says more about each command.";

/// Adds subcommands that stand together in the help.
void in_group(CLI::App& app, const std::string& name, std::initializer_list<void (*)(CLI::App&, int*)> adders,
              int* exit_code) {
  for (const auto& add : adders) {
    add(app, exit_code);
    app.get_subcommands({}).back()->group(name);
  }
}

int run(const std::vector<std::string>& args) {
  CLI::App app(kDescription, "espalier");
  app.footer(kFooter);
  app.formatter(std::make_shared<HelpFormat>());
  app.set_version_flag("--version", version_text,
                       "Print the version and how the program was built, and exit");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.require_subcommand(1);
  int exit_code = 0;
  app.set_help_flag("-h,--help", kHelp);
  in_group(app, "From chats or rollouts to a plan",
           {add_prepare, add_import, add_inspect, add_plan, add_export}, &exit_code);
  in_group(app, "Training", {add_train, add_logprobs, add_merge, add_sample}, &exit_code);
  in_group(app, "Proof and measurement", {add_verify, add_bench, add_device}, &exit_code);
  in_group(app, "Random data and models", {add_synth, add_init}, &exit_code);
  in_group(app, "Shell", {add_completion, add_man}, &exit_code);
  for (CLI::App* command : app.get_subcommands({})) {
    refuse_repeated_flags(command);
    require_decimal_numbers(command);
    if (command->get_help_ptr() == nullptr) continue;
    command->set_help_flag();  // to add it again behind the others, where help lists it
    command->set_help_flag("-h,--help", kHelp)->group(kOtherGroup);
  }
  if (const std::string fault = unknown_word(app, args); !fault.empty()) {
    log_line("espalier: error: {} (see --help)", printable(fault));
    return 2;
  }
  std::vector<std::string> expanded = expand_config(app, args);
  std::reverse(expanded.begin(), expanded.end());  // CLI11 takes a vector from its end
  try {
    app.parse(expanded);
  } catch (const CLI::ParseError& error) {
    // Help goes to standard output, what is wrong to standard error, quoting what the user wrote.
    std::ostringstream out, err;
    const int code = app.exit(error, out, err);
    write_log(printable_lines(err.str()));
    write_output(out.str());
    flush_output();
    return code == 0 ? 0 : 2;
  }
  check_mapped_files();  // a result that was computed from a file that ended early is none
  flush_output();
  return exit_code;
}

int fail(const std::string& message) {
  // What was printed before the fault comes first; where it cannot, the fault is still what to tell.
  try {
    flush_output();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
  log_line("espalier: error: {}", message);
  return 1;
}

}  // namespace
}  // namespace espalier::cli

int main(int argc, char** argv) {
  using namespace espalier;
  cli::prepare_process();
  guard_mapped_files();
  count_tensor_memory();
  reuse_freed_memory();
  cli::check_kernels_by_this_program();
  try {
    return cli::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const cli::ClosedPipe&) {
    cli::die_of_closed_pipe();
  } catch (const InputError& error) {
    return cli::fail(printable(error.what()));
  } catch (const c10::Error& error) {
    const std::optional<std::string> memory = cli::out_of_memory_message(error);
    return cli::fail(memory ? printable(*memory) : printable_lines(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    const std::optional<std::string> memory = cli::out_of_memory_message(error);
    return cli::fail(memory ? printable(*memory) : printable_lines(error.what()));
  }
}
