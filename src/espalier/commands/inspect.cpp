// SPDX-License-Identifier: Apache-2.0
// espalier inspect: shared prefixes, their predicted gain, and lost sharing.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/printable.h"
#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/commands/plan_summary.h"
#include "espalier/config/config.h"
#include "espalier/engine/step_cost.h"
#include "espalier/inspect/page_data.h"
#include "espalier/inspect/report.h"
#include "espalier/inspect/sharing.h"
#include "espalier/plan/planner.h"
#include "espalier/tree/forest.h"

namespace espalier::commands {
namespace {

struct InspectArguments {
  DataFlags data;
  std::string model;
  std::string html;
};

/// In FLOPs of the whole forest in one micro-batch; nullopt if every trajectory is a single token, because
/// then no token can carry loss.
std::optional<Gains> gains_in_flops(const std::string& model, const Trajectories& trajectories) {
  const Step step = make_step(trajectories, {.terms = TermChoice::kWithLossOrAll});
  StepFlops flops;
  flops.add(model_cost(read_config(model)), step);
  return flops.plan > 0 ? std::optional(flops.gains()) : std::nullopt;
}

std::optional<Vocabulary> vocabulary_of(const std::string& model, const Caller& caller) {
  const std::filesystem::path path = std::filesystem::path(model) / "tokenizer.json";
  if (model.empty() || !std::filesystem::exists(path)) return std::nullopt;
  return caller.read_vocabulary(path);
}

nlohmann::ordered_json run_inspect(const InspectArguments& flags, const Caller& caller) {
  const DataUse use = data_use_of(flags.model);
  const Trajectories trajectories = flags.data.read(use);
  const Forest forest = forest_of(trajectories, {});
  const std::optional<Vocabulary> known = vocabulary_of(flags.model, caller);
  const Vocabulary* vocabulary = known ? &*known : nullptr;
  InspectReport report = inspect_rows(trajectories, forest, vocabulary);
  if (!flags.model.empty()) {
    report.gains = gains_in_flops(flags.model, trajectories).value_or(report.gains);
  }
  if (!flags.html.empty()) {
    const std::string title = printable(flags.data.title());
    write_text(flags.html,
               caller.text_of("page", page_data({title, report, trajectories, forest, vocabulary})));
  }
  return {{"report", to_json(report, trajectories, vocabulary)}};
}

}  // namespace

Command inspect_command(const Caller& caller) {
  const auto flags = std::make_shared<InspectArguments>();
  Command command{.run = [flags, &caller](const OptionList&) { return Result{run_inspect(*flags, caller)}; }};
  OptionList& list = command.options;
  flags->data.add(&list);
  add_model(&list, &flags->model,
            "Hugging Face model folder, used to check token ids, to predict FLOPs instead of tokens, and to "
            "show text (with its tokenizer.json)");
  list.add("converted-from", &flags->data.converted_from, "Files that --data was converted from",
           {.path = PathKind::kFile, .hidden = true});
  list.group(kOutputGroup);
  list.add("html", &flags->html, "Also write an HTML page with the trees to this file; it works offline",
           {.path = PathKind::kFile});
  return command;
}

}  // namespace espalier::commands
