// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/rank_table.h"

#include <fmt/format.h>

#include <algorithm>

#include "espalier/base/units.h"
#include "espalier/cli/print/plan_table.h"

namespace espalier::cli {
namespace {

constexpr size_t kMostRows = 16;

std::string percent(double part) {
  return fmt::format("{:.1f}%", 100 * part);
}

nlohmann::ordered_json json_of(const RankPlan& plan) {
  return {{"seconds", plan.seconds()},
          {"imbalance", plan.imbalance()},
          {"least_seconds", plan.least_seconds},
          {"split_trees", plan.split_trees},
          {"repeated_tokens", plan.repeated_tokens}};
}

}  // namespace

RankTable::RankTable(const Forest& forest, int64_t num_ranks, const TimeModel& model, bool has_model)
    : plan(distribute(forest, num_ranks, model)),
      trajectories(distribute_trajectories(forest, num_ranks, model)),
      forest_tokens(forest.tree_tokens()),
      has_model(has_model) {}

std::string RankTable::text() const {
  std::string text;
  const auto row = [&](const char* name, const std::string& value) {
    text += fmt::format("{:<20}{}\n", name, value);
  };
  const auto slowest = [&](const RankPlan& ranks) {
    const std::string seconds = has_model ? seconds_text(ranks.seconds()) + ", " : "";
    return fmt::format("{}{} over the mean", seconds, percent(ranks.imbalance()));
  };
  const auto idle =
      std::ranges::count_if(plan.ranks, [](const RankShare& r) { return r.trajectories.empty(); });
  row("ranks", with_commas(static_cast<int64_t>(plan.ranks.size())) +
                   (idle > 0 ? fmt::format(", {} of them idle", with_commas(idle)) : ""));
  row("slowest rank", slowest(plan));
  row("  over the bound",
      fmt::format("{} above the lower bound of any distribution",
                  percent(plan.least_seconds > 0 ? plan.seconds() / plan.least_seconds - 1 : 0)));
  row("split trees", fmt::format("{}, which repeat {} tokens ({})", with_commas(plan.split_trees),
                                 with_commas(plan.repeated_tokens),
                                 percent(static_cast<double>(plan.repeated_tokens) /
                                         std::max(1.0, static_cast<double>(forest_tokens)))));
  row("without trees",
      fmt::format("{}, {:.2f} times the seconds (whole trajectories, by Karmarkar-Karp)",
                  slowest(trajectories), plan.seconds() > 0 ? trajectories.seconds() / plan.seconds() : 1));
  if (plan.ranks.size() > kMostRows) return text;
  text += fmt::format("\n  {:>4}  {:>12}  {:>11}  {:>10}\n", "rank", "trajectories", "tree tokens",
                      has_model ? "time" : "of slowest");
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const RankShare& share = plan.ranks[r];
    text += fmt::format(
        "  {:>4}  {:>12}  {:>11}  {:>10}\n", r, with_commas(static_cast<int64_t>(share.trajectories.size())),
        with_commas(share.tree_tokens),
        has_model ? seconds_text(share.seconds) : percent(share.seconds / std::max(plan.seconds(), 1e-300)));
  }
  return text;
}

nlohmann::ordered_json RankTable::json() const {
  nlohmann::ordered_json json = json_of(plan);
  json["without_trees"] = json_of(trajectories);
  json["ranks"] = nlohmann::ordered_json::array();
  for (const RankShare& share : plan.ranks) {
    json["ranks"].push_back({{"trajectories", share.trajectories},
                             {"tree_tokens", share.tree_tokens},
                             {"predicted_seconds", share.seconds}});
  }
  return json;
}

}  // namespace espalier::cli
