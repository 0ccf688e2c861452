// espalier inspect: what sharing there is, what it will gain, and what was lost.
#include <fmt/format.h>

#include <filesystem>
#include <numeric>
#include <optional>

#include "espalier/base/file.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/inspect/page.h"
#include "espalier/cli/inspect/report.h"
#include "espalier/cli/inspect/sharing.h"
#include "espalier/plan/planner.h"
#include "espalier/train/cost.h"
#include "espalier/tree/statistics.h"

namespace espalier::cli {
namespace {

struct Flags {
  DataFlags data;
  std::string model;
  std::string html;
  bool json = false;
};

// FLOPs of the forward and backward passes under the three ways of laying out the same loss.
Prediction predict_flops(const ModelShape& shape, const Trajectories& trajectories, const Forest& forest) {
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  Step step;
  step.rows = rows;
  step.forest = forest;
  set_plan(&step, make_plan(step.forest, {}));
  step.terms = step_terms_or_all(trajectories, rows, step.forest, {});
  const double tree = step_flops(shape, plan_work(step)).total();
  return {step_flops(shape, flat_work(step)).total() / tree,
          step_flops(shape, append_only_work(step)).total() / tree, true};
}

Prediction predict_tokens(const ForestStatistics& statistics) {
  return {statistics.cached_token_ratio,
          static_cast<double>(statistics.append_only_tokens) / static_cast<double>(statistics.tree_tokens)};
}

std::optional<Vocabulary> read_vocabulary(const std::string& model) {
  const std::filesystem::path path = std::filesystem::path(model) / "tokenizer.json";
  if (model.empty() || !std::filesystem::exists(path)) return std::nullopt;
  return Vocabulary::read(path);
}

void run(const Flags& flags) {
  const Trajectories trajectories = flags.data.read(vocab_size_of(flags.model));
  const Forest forest = forest_of(trajectories, {});
  const std::optional<Vocabulary> known = read_vocabulary(flags.model);
  const Vocabulary* vocabulary = known ? &*known : nullptr;
  InspectReport report;
  report.statistics = forest_statistics(forest);
  report.by_depth = sharing_by_depth(forest);
  report.prediction = flags.model.empty()
                          ? predict_tokens(report.statistics)
                          : predict_flops(model_shape(read_config(flags.model)), trajectories, forest);
  SharingOptions options;
  options.vocabulary = vocabulary;
  report.sharing = analyse_sharing(trajectories, forest, options);
  if (!flags.html.empty()) {
    const std::string file = std::filesystem::path(flags.data.data).filename().string();
    write_text(flags.html, inspect_page(file, to_json(report, trajectories, vocabulary), trajectories, forest,
                                        vocabulary));
  }
  if (flags.json) {
    fmt::print("{}\n", to_json(report, trajectories, vocabulary).dump(2));
  } else {
    print(report, trajectories, vocabulary);
    if (!flags.html.empty()) fmt::print("wrote {}\n", flags.html);
  }
}

}  // namespace

void add_inspect(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "inspect", "Say what prefixes the trajectories share, what that gains, and what was lost");
  auto flags = std::make_shared<Flags>();
  flags->data.add(command);
  add_model(command, &flags->model,
            "Hugging Face model folder: checks the ids, predicts in FLOPs instead of tokens, and with its "
            "tokenizer.json shows text");
  command->add_option("--html", flags->html,
                      "Also write a page with the trees to this file; needs no network");
  command->add_flag("--json", flags->json, "Print JSON");
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
