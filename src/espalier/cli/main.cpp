// espalier: trains language models on trees of tokens.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "espalier/cli/commands.h"
#include "espalier/cli/toml_config.h"
#include "espalier/train/memory.h"

namespace espalier::cli {
namespace {

constexpr const char* kDescription =
    "Espalier trains language models on trees of tokens: shared prefixes are encoded once, forward and "
    "backward, with "
    "exactly the gradients of ordinary training.";
constexpr const char* kFooter =
    "A first run:\n"
    "  espalier prepare --model DIR --per-turn CHATS.jsonl -o rows.jsonl   text to trajectories\n"
    "  espalier inspect --model DIR --data rows.jsonl                      what sharing will gain\n"
    "  espalier verify  --model DIR --data rows.jsonl --limit 8            proof on your model and data\n"
    "  espalier train   --model DIR --data rows.jsonl --out RUN            train; then "
    "RUN/checkpoints/step_N\n"
    "\n`espalier COMMAND --help` says more of each.";

int run(const std::vector<std::string>& args) {
  CLI::App app(kDescription, "espalier");
  app.footer(kFooter);
  app.set_version_flag("--version", "espalier " ESPALIER_VERSION);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.require_subcommand(1);
  int exit_code = 0;
  add_prepare(app, &exit_code);
  add_inspect(app, &exit_code);
  add_plan(app, &exit_code);
  add_train(app, &exit_code);
  add_logprobs(app, &exit_code);
  add_verify(app, &exit_code);
  add_bench(app, &exit_code);
  add_synth(app, &exit_code);
  add_init(app, &exit_code);
  std::vector<std::string> expanded = expand_config(app, args);
  std::reverse(expanded.begin(), expanded.end());  // CLI11 takes a vector from its end
  try {
    app.parse(expanded);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  }
  return exit_code;
}

}  // namespace
}  // namespace espalier::cli

int main(int argc, char** argv) {
  espalier::count_tensor_memory();
  espalier::reuse_freed_memory();
  try {
    return espalier::cli::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const c10::Error& error) {
    fmt::print(stderr, "espalier: error: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "espalier: error: {}\n", error.what());
  }
  return 1;
}
