// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

namespace espalier {
namespace {

double quotient(double work, double tree) {
  const double gain = work / tree;
  return tree > 0 && work > 0 && std::isfinite(gain) ? gain : 1;
}

}  // namespace

Gains Gains::of(double packing, double append_only, double tree, bool in_flops) {
  return {quotient(packing, tree), quotient(append_only, tree), in_flops};
}

Gains Gains::in_tokens(const ForestStatistics& statistics, int64_t encoded_tokens) {
  return of(static_cast<double>(statistics.flat_tokens), static_cast<double>(statistics.append_only_tokens),
            static_cast<double>(encoded_tokens), /*in_flops=*/false);
}

namespace {

using Json = nlohmann::ordered_json;

Json map_to_json(const std::map<int64_t, int64_t>& counts) {
  Json json = Json::object();
  for (const auto& [key, count] : counts) json[std::to_string(key)] = count;
  return json;
}

Json statistics_to_json(const ForestStatistics& s) {
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
          {"tokens_by_multiplicity", map_to_json(s.tokens_by_multiplicity)},
          {"nodes_by_branching", map_to_json(s.nodes_by_branching)}};
}

Json depth_to_json(const std::vector<DepthBucket>& buckets) {
  Json json = Json::array();
  for (const DepthBucket& bucket : buckets) {
    json.push_back({{"begin", bucket.begin},
                    {"end", bucket.end},
                    {"tree_tokens", bucket.tree_tokens},
                    {"flat_tokens", bucket.flat_tokens},
                    {"mean_multiplicity", bucket.mean_multiplicity()},
                    {"reused", bucket.reused()}});
  }
  return json;
}

Json example_to_json(const SharingExample& example, const Trajectories& trajectories,
                     const Vocabulary* vocabulary) {
  Json json = {{"position", example.position},
               {"role", to_string(example.role)},
               {"left_trajectory", valid_utf8(trajectories.name(example.left_row))},
               {"right_trajectory", valid_utf8(trajectories.name(example.right_row))},
               {"common", example.common},
               {"between_groups", example.between_groups}};
  const auto side = [&](const char* name, const std::vector<int32_t>& differing,
                        const std::vector<int32_t>& after) {
    const std::vector<int32_t>& tokens = differing.empty() ? after : differing;
    Json token = nullptr;
    if (!tokens.empty()) {
      token = {{"id", tokens[0]}};
      if (vocabulary != nullptr) token["text"] = vocabulary->text(std::span(tokens).first(1));
    }
    json[std::string(name) + "_token"] = token;
    json[name] = snippet(vocabulary, differing);
    json[std::string(name) + "_after"] = snippet(vocabulary, after);
  };
  json["before"] = snippet(vocabulary, example.before);
  side("left", example.left, example.left_after);
  side("right", example.right, example.right_after);
  return json;
}

Json sharing_to_json(const InspectReport& report, const Trajectories& trajectories,
                     const Vocabulary* vocabulary) {
  const SharingReport& sharing = report.sharing;
  Json causes = Json::array();
  for (int i = 0; i < kNumCauses; ++i) {
    const auto cause = static_cast<Cause>(i);
    const CauseReport& found = sharing[cause];
    if (found.divergences == 0) continue;
    Json examples = Json::array();
    for (const SharingExample& example : found.examples) {
      examples.push_back(example_to_json(example, trajectories, vocabulary));
    }
    causes.push_back({{"cause", text_of(cause).word},
                      {"meaning", text_of(cause).phrase},
                      {"lost", is_lost(cause)},
                      {"places", found.places},
                      {"divergences", found.divergences},
                      {"tokens", found.tokens},
                      {"tokens_between_groups", found.tokens_between_groups},
                      {"values", found.values},
                      {"remedy", text_of(cause).remedy},
                      {"examples", std::move(examples)}});
  }
  return {{"text_known", vocabulary != nullptr},
          {"places", sharing.places},
          {"divergences", sharing.divergences},
          {"not_examined", sharing.not_examined},
          {"lost_tokens", sharing.lost_tokens()},
          {"lost_tokens_between_groups", sharing.lost_tokens_between_groups()},
          {"causes", std::move(causes)}};
}

}  // namespace

InspectReport inspect_rows(const Trajectories& trajectories, const Forest& forest,
                           const Vocabulary* vocabulary) {
  InspectReport report;
  report.statistics = forest_statistics(forest);
  report.by_depth = sharing_by_depth(forest);
  report.gains = Gains::in_tokens(report.statistics, report.statistics.tree_tokens);
  report.sharing = analyse_sharing(trajectories, forest, {.vocabulary = vocabulary});
  return report;
}

std::string snippet(const Vocabulary* vocabulary, std::span<const int32_t> tokens) {
  if (vocabulary != nullptr) return vocabulary->text(tokens);
  return fmt::format("{}", fmt::join(tokens, " "));
}

nlohmann::ordered_json to_json(const InspectReport& report, const Trajectories& trajectories,
                               const Vocabulary* vocabulary) {
  Json json = statistics_to_json(report.statistics);
  json["sharing_by_depth"] = depth_to_json(report.by_depth);
  json["predicted_speedup_over_sequence_packing"] = report.gains.over_packing;
  json["predicted_speedup_over_append_only"] = report.gains.over_append_only;
  json["prediction_counts"] = report.gains.in_flops ? "FLOPs" : "tokens";
  json["sharing"] = sharing_to_json(report, trajectories, vocabulary);
  return json;
}

}  // namespace espalier
