// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/cli/validators.h"

namespace espalier::python_engine {
namespace {

// As Python writes it.
std::string python_name(std::string name) {
  std::ranges::replace(name, '-', '_');
  return name;
}

std::string flag_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? std::string() : option.get_lnames().front();
}

std::vector<const CLI::Option*> flags_of(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return !option->get_lnames().empty(); });
}

// An application with nothing but the flags that `add` adds.
template <class Add>
void with_flags(CLI::App* app, const Add& add) {
  app->set_help_flag();
  app->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add(app);
  cli::require_decimal_numbers(app);
}

void parse(CLI::App* app, const NamedValues& values) {
  std::vector<std::string> words;
  for (const auto& [name, value] : values) {
    if (app->get_option_no_throw("--" + name) == nullptr) {
      std::vector<std::string> names;
      for (const CLI::Option* option : flags_of(*app)) names.push_back(python_name(flag_name(*option)));
      throw InputError(fmt::format("{}: there is no such option; expected one of {}", python_name(name),
                                   fmt::join(names, ", ")));
    }
    words.push_back(fmt::format("--{}={}", name, value));
  }
  std::ranges::reverse(words);  // CLI11 takes a vector from its end
  try {
    app->parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    throw InputError(error.what());
  }
}

std::vector<FlagHelp> help_of(const CLI::App& app) {
  std::vector<FlagHelp> help;
  for (const CLI::Option* option : flags_of(app)) {
    help.push_back({python_name(flag_name(*option)), option->get_default_str(), option->get_description()});
  }
  return help;
}

void add_engine_flags(CLI::App* app, EngineFlags* flags) {
  cli::add_dtype(app, &flags->dtype,
                 "Precision of training (bfloat16: with float32 master weights and gradient sums)");
  cli::add_freeze_pad_embedding(app, &flags->freeze_pad_embedding);
  flags->optimizer.add(app, /*schedules=*/false);
  flags->plan.add(app);
  app->remove_option(app->get_option("--no-calibration"));  // nothing is predicted
  flags->device.add(app, /*trains=*/true);
  cli::add_threads(app);
}

void add_objective_flags(CLI::App* app, cli::ObjectiveFlags* flags) {
  flags->add(app);
}

}  // namespace

EngineFlags parse_engine_flags(const NamedValues& values) {
  EngineFlags flags;
  CLI::App app;
  with_flags(&app, [&](CLI::App* to) { add_engine_flags(to, &flags); });
  parse(&app, values);
  return flags;
}

ObjectiveOptions parse_objective_flags(const NamedValues& values) {
  cli::ObjectiveFlags flags;
  CLI::App app;
  with_flags(&app, [&](CLI::App* to) { add_objective_flags(to, &flags); });
  parse(&app, values);
  ObjectiveOptions options = flags.options();
  check_objective_options(options);
  return options;
}

cli::SampleFlags parse_sample_flags(const NamedValues& values) {
  cli::SampleFlags flags;
  CLI::App app;
  with_flags(&app, [&](CLI::App* to) {
    flags.add_sampling(to);
    flags.add_sizes(to);
  });
  parse(&app, values);
  return flags;
}

std::vector<FlagHelp> engine_flags_help() {
  EngineFlags flags;
  CLI::App app;
  with_flags(&app, [&](CLI::App* to) { add_engine_flags(to, &flags); });
  return help_of(app);
}

std::vector<FlagHelp> objective_flags_help() {
  cli::ObjectiveFlags flags;
  CLI::App app;
  with_flags(&app, [&](CLI::App* to) { add_objective_flags(to, &flags); });
  return help_of(app);
}

}  // namespace espalier::python_engine
