// espalier plan: what would run together.
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/plan_table.h"
#include "espalier/cli/progress.h"
#include "espalier/plan/planner.h"
#include "espalier/train/batch.h"

namespace espalier::cli {

std::string plan_table(const Forest& forest, const Plan& plan, int64_t max_rows) {
  std::string text = fmt::format("{:>11}  {:>12}  {:>16}  {:>12}  {:>8}\n", "micro-batch", "tokens",
                                 "visible pairs", "trajectories", "runs");
  int64_t index = 0;
  for (const MicroBatch& micro_batch : plan.micro_batches) {
    if (index == max_rows) {
      text += fmt::format("{:>11}  and {} more\n", "...",
                          static_cast<int64_t>(plan.micro_batches.size()) - index);
      break;
    }
    text += fmt::format("{:>11}  {:>12}  {:>16}  {:>12}  {:>8}\n", index++,
                        with_commas(micro_batch.num_tokens), with_commas(micro_batch.num_pairs),
                        with_commas(static_cast<int64_t>(micro_batch.trajectories.size())),
                        with_commas(static_cast<int64_t>(micro_batch.runs.size())));
  }
  text += fmt::format("{} with {} micro-batches: {} flat tokens, {} tree tokens, {} encoded (ERR {:.4f})\n",
                      to_string(plan.options.strategy), plan.micro_batches.size(),
                      with_commas(forest.flat_tokens()), with_commas(forest.tree_tokens()),
                      with_commas(plan.num_tokens()), effective_reuse_ratio(forest, plan));
  return text;
}

nlohmann::ordered_json plan_json(const Forest& forest, const Plan& plan) {
  nlohmann::ordered_json json = {{"strategy", to_string(plan.options.strategy)},
                                 {"token_budget", plan.options.token_budget},
                                 {"flat_tokens", forest.flat_tokens()},
                                 {"tree_tokens", forest.tree_tokens()},
                                 {"encoded_tokens", plan.num_tokens()},
                                 {"visible_pairs", plan.num_pairs()},
                                 {"effective_reuse_ratio", effective_reuse_ratio(forest, plan)},
                                 {"micro_batches", nlohmann::ordered_json::array()}};
  for (const MicroBatch& micro_batch : plan.micro_batches) {
    nlohmann::ordered_json runs = nlohmann::ordered_json::array();
    for (const Run& run : micro_batch.runs) runs.push_back({run.begin, run.end, run.parent});
    nlohmann::ordered_json trajectories = nlohmann::ordered_json::array();
    for (const Placement& placement : micro_batch.trajectories) {
      trajectories.push_back({{"trajectory", placement.trajectory}, {"run", placement.run}});
    }
    json["micro_batches"].push_back({{"tokens", micro_batch.num_tokens},
                                     {"visible_pairs", micro_batch.num_pairs},
                                     {"trajectories", trajectories},
                                     {"runs", runs}});
  }
  return json;
}

namespace {

struct Flags {
  DataFlags data;
  PlanFlags plan;
  bool json = false;
};

void run(const Flags& flags) {
  const Trajectories trajectories = flags.data.read(0);
  const Forest forest = forest_of(trajectories, {});
  const Plan plan = make_plan(forest, flags.plan.options(trajectories));
  if (flags.json) {
    fmt::print("{}\n", plan_json(forest, plan).dump(1));
  } else {
    fmt::print("{}", plan_table(forest, plan, 1000));
  }
}

}  // namespace

void add_plan(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "plan", "Print which trajectories run together, and how many tokens are encoded, under a token budget");
  auto flags = std::make_shared<Flags>();
  flags->data.add(command);
  flags->plan.add(command);
  command->add_flag(
      "--json", flags->json,
      "Print JSON: per micro-batch its trajectories and runs [begin, end, parent run] of forest tokens");
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
