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
#include "espalier/data/foreign_rows.h"
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
  bool per_turn = false;
};

/// Whether `espalier prepare` has to convert the data first. Throws InputError if it has to convert only some
/// of the files.
bool needs_conversion(const InspectArguments& flags) {
  const std::vector<std::filesystem::path> files = flags.data.files();
  std::optional<std::filesystem::path> raw, rows;  // the first of each
  for (const std::filesystem::path& file : files) {
    const bool is_raw = espalier::needs_conversion(file, flags.data.max_row_bytes, flags.data.skip_bad_rows);
    std::optional<std::filesystem::path>& first = is_raw ? raw : rows;
    if (!first) first = file;
  }
  ESPALIER_CHECK(!raw || !rows,
                 "--data: expected files of rows, or files that are converted to rows, received both: {} is "
                 "converted, {} is not; convert the former with `espalier prepare`",
                 raw->string(), rows->string());
  ESPALIER_CHECK(raw || !flags.per_turn, "--per-turn: expected chats, received rows ({})",
                 files.front().string());
  return raw.has_value();
}

// In FLOPs of the whole forest in one micro-batch. In tokens without a model, or if every trajectory is a
// single token, because then no token can carry loss.
Gains predict(const std::string& model, const Trajectories& trajectories,
              const ForestStatistics& statistics) {
  const Gains in_tokens = Gains::in_tokens(statistics, statistics.tree_tokens);
  if (model.empty()) return in_tokens;
  const Step step = make_step(trajectories, {.terms = TermChoice::kWithLossOrAll});
  StepFlops flops;
  flops.add(model_cost(read_config(model)), step);
  return flops.plan > 0 ? flops.gains() : in_tokens;
}

std::optional<Vocabulary> vocabulary_of(const std::string& model, const Caller& caller) {
  const std::filesystem::path path = std::filesystem::path(model) / "tokenizer.json";
  if (model.empty() || !std::filesystem::exists(path)) return std::nullopt;
  return caller.read_vocabulary(path);
}

/// {"convert": the files} if the data has to be converted first; otherwise the report.
nlohmann::ordered_json run_inspect(const InspectArguments& flags, const Caller& caller) {
  const DataUse use = data_use_of(flags.model);
  if (needs_conversion(flags)) {
    std::vector<std::string> files;
    for (const std::filesystem::path& file : flags.data.files()) files.push_back(file.string());
    return {{"convert", files}};
  }
  const Trajectories trajectories = flags.data.read(use);
  const Forest forest = forest_of(trajectories, {});
  const std::optional<Vocabulary> known = vocabulary_of(flags.model, caller);
  const Vocabulary* vocabulary = known ? &*known : nullptr;
  InspectReport report;
  report.statistics = forest_statistics(forest);
  report.by_depth = sharing_by_depth(forest);
  report.gains = predict(flags.model, trajectories, report.statistics);
  SharingOptions options;
  options.vocabulary = vocabulary;
  report.sharing = analyse_sharing(trajectories, forest, options);
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
  list.add("per-turn", &flags->per_turn,
           "Chats: one trajectory for each message of the assistant, not one for each conversation");
  list.add("converted-from", &flags->data.converted_from, "Files that --data was converted from",
           {.path = PathKind::kFile, .hidden = true});
  list.group(kOutputGroup);
  list.add("html", &flags->html, "Also write an HTML page with the trees to this file; it works offline",
           {.path = PathKind::kFile});
  return command;
}

}  // namespace espalier::commands
