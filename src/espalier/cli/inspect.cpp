// espalier inspect: what sharing there is and what it will gain.
#include <numeric>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/progress.h"
#include "espalier/train/cost.h"
#include "espalier/tree/statistics.h"

namespace espalier::cli {
namespace {

struct Flags {
  DataFlags data;
  std::string model;
  bool json = false;
};

// FLOPs of the forward and backward passes under the three ways of laying out the same loss.
struct Prediction {
  double over_packing = 0;
  double over_append_only = 0;
};

bool carries_loss(const Trajectories& trajectories) {
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
      if (trajectories.loss_weights[i] > 0) return true;
    }
  }
  return false;
}

Prediction predict(const ModelShape& shape, const Trajectories& trajectories) {
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  Step step;
  step.rows = rows;
  step.forest = forest_of(trajectories, rows);
  step.plan = make_plan(step.forest, {});
  // Data that carries no loss yet is counted as if every token did.
  step.terms = carries_loss(trajectories) ? step_terms(trajectories, rows, step.forest, {})
                                          : all_terms(trajectories, rows);
  const double tree = step_flops(shape, plan_work(step)).total();
  return {step_flops(shape, flat_work(step)).total() / tree,
          step_flops(shape, append_only_work(step)).total() / tree};
}

nlohmann::ordered_json to_json(const ForestStatistics& s) {
  nlohmann::ordered_json multiplicity = nlohmann::ordered_json::object();
  for (const auto& [count, tokens] : s.tokens_by_multiplicity) multiplicity[std::to_string(count)] = tokens;
  nlohmann::ordered_json branching = nlohmann::ordered_json::object();
  for (const auto& [children, nodes] : s.nodes_by_branching) branching[std::to_string(children)] = nodes;
  return {{"trajectories", s.num_trajectories},
          {"trees", s.num_trees},
          {"nodes", s.num_nodes},
          {"leaves", s.num_leaves},
          {"flat_tokens", s.flat_tokens},
          {"tree_tokens", s.tree_tokens},
          {"append_only_tokens", s.append_only_tokens},
          {"cached_token_ratio", s.cached_token_ratio},
          {"por", s.por},
          {"depth_nodes", s.max_depth_nodes},
          {"depth_tokens", s.max_depth_tokens},
          {"mean_branching", s.mean_branching},
          {"max_branching", s.max_branching},
          {"tokens_by_multiplicity", multiplicity},
          {"nodes_by_branching", branching}};
}

// Multiplicities in powers of two, so that the table stays short.
void print_histogram(const ForestStatistics& s) {
  std::map<int64_t, int64_t> buckets;
  for (const auto& [count, tokens] : s.tokens_by_multiplicity) {
    int64_t low = 1;
    while (low * 2 <= count) low *= 2;
    buckets[low] += tokens;
  }
  fmt::print("\n{:>16}  {:>14}  part of the tree tokens\n", "multiplicity", "tree tokens");
  for (const auto& [low, tokens] : buckets) {
    const double part = static_cast<double>(tokens) / static_cast<double>(s.tree_tokens);
    const std::string range = low == 1 ? "1" : fmt::format("{} to {}", low, 2 * low - 1);
    fmt::print("{:>16}  {:>14}  {:5.1f}% {:#<{}}\n", range, with_commas(tokens), part * 100, "",
               static_cast<int>(part * 40 + 0.5));
  }
}

void print(const ForestStatistics& s) {
  const auto row = [](const char* name, const std::string& value) {
    fmt::print("{:<22}{:>16}\n", name, value);
  };
  row("trajectories", with_commas(s.num_trajectories));
  row("trees", with_commas(s.num_trees));
  row("nodes", with_commas(s.num_nodes));
  row("leaves", with_commas(s.num_leaves));
  row("flat tokens", with_commas(s.flat_tokens));
  row("append-only tokens", with_commas(s.append_only_tokens));
  row("tree tokens", with_commas(s.tree_tokens));
  row("cached-token ratio", fmt::format("{:.3f}", s.cached_token_ratio));
  row("POR", fmt::format("{:.4f}", s.por));
  row("depth in nodes", with_commas(s.max_depth_nodes));
  row("depth in tokens", with_commas(s.max_depth_tokens));
  row("mean branching", fmt::format("{:.2f}", s.mean_branching));
  row("largest branching", with_commas(s.max_branching));
  print_histogram(s);
}

const char* verdict(double gain) {
  if (gain >= 1.5) return "train on trees.";
  if (gain >= 1.1) return "trees help a little.";
  return "not worth it for speed: almost nothing is shared (training on trees costs nothing either).";
}

void run(const Flags& flags) {
  const Trajectories trajectories = flags.data.read(vocab_size_of(flags.model));
  const ForestStatistics statistics = forest_statistics(forest_of(trajectories, {}));
  nlohmann::ordered_json json = to_json(statistics);
  const double tree_tokens = static_cast<double>(statistics.tree_tokens);
  Prediction prediction{statistics.cached_token_ratio,
                        static_cast<double>(statistics.append_only_tokens) / tree_tokens};
  if (!flags.model.empty()) prediction = predict(model_shape(read_config(flags.model)), trajectories);
  json["predicted_speedup_over_sequence_packing"] = prediction.over_packing;
  json["predicted_speedup_over_append_only"] = prediction.over_append_only;
  json["prediction_counts"] = flags.model.empty() ? "tokens" : "FLOPs";
  if (flags.json) {
    fmt::print("{}\n", json.dump(2));
    return;
  }
  print(statistics);
  fmt::print(
      "\npredicted speed-up (in {}): {:.2f}x over sequence packing, {:.2f}x over append-only merging: {}\n",
      flags.model.empty() ? "tokens; --model gives FLOPs" : "FLOPs", prediction.over_packing,
      prediction.over_append_only, verdict(prediction.over_packing));
}

}  // namespace

void add_inspect(CLI::App& app, int*) {
  CLI::App* command =
      app.add_subcommand("inspect", "Say what prefixes the trajectories share and what that gains");
  auto flags = std::make_shared<Flags>();
  flags->data.add(command);
  add_model(command, &flags->model,
            "Hugging Face model folder: checks the ids and predicts in FLOPs instead of tokens");
  command->add_flag("--json", flags->json, "Print JSON");
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
