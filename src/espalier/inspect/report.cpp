// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "espalier/base/printable.h"
#include "espalier/base/units.h"

namespace espalier {
namespace {

// A smaller gain of merging does not count: a few rows of a group may be equal by chance.
constexpr double kMergingCounts = 1.05;

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

bool Gains::merging_helps() const {
  return over_packing >= kMergingCounts * over_append_only;
}

std::string both_gains(const Gains& gains) {
  const std::string packing = fmt::format("{:.2f}x over sequence packing", gains.over_packing),
                    merging = fmt::format("{:.2f}x over append-only merging", gains.over_append_only);
  return gains.merging_helps() ? merging + " and " + packing : packing + " and " + merging;
}

namespace {

using Json = nlohmann::ordered_json;

// Smaller gains are reported as small, and as none.
constexpr double kClearGain = 1.5, kSmallGain = 1.1;
// Losses below this fraction of the tree tokens are not worth changing the data.
constexpr double kSmallLoss = 0.02;

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
          {"cached_token_ratio_without_losses", ratio_without_losses(report)},
          {"how_counted", kHowLossIsCounted},
          {"causes", std::move(causes)}};
}

// The text quoted on one line, shortened at the back.
std::string quoted(const std::string& text, size_t most) {
  std::string line = printable(text);
  if (line.size() > most) {
    size_t cut = most;
    while (cut > 0 && (static_cast<unsigned char>(line[cut]) & 0xC0) == 0x80) --cut;
    line = line.substr(0, cut) + "...";
  }
  return '"' + line + '"';
}

}  // namespace

const char* const kHowLossIsCounted =
    "Tokens lost: for each branch that diverges for this cause, the equal ids that follow the differing "
    "text, up to the next difference (numbers and ids in the same message are skipped). This is a lower "
    "bound of the tokens that are encoded again. Between groups: the lost tokens that only trajectories of "
    "other groups have. They are encoded once if the groups are in the same step.";

double ratio_without_losses(const InspectReport& report) {
  const int64_t left = report.statistics.tree_tokens - report.sharing.lost_tokens();
  if (left <= 0) return report.statistics.cached_token_ratio;
  return static_cast<double>(report.statistics.flat_tokens) / static_cast<double>(left);
}

namespace {

std::string verdict_text(const Gains& gains) {
  const std::string figures = both_gains(gains);
  if (gains.over_packing < kSmallGain) {
    return fmt::format(
        "trees do not help ({}): almost nothing is shared. Training on trees is not slower either.", figures);
  }
  if (gains.over_append_only < kSmallGain) {
    return fmt::format(
        "trees help only if your trainer encodes every trajectory ({}): a trainer that drops trajectories "
        "which others extend gains as much.",
        figures);
  }
  if (gains.leading() < kClearGain) return fmt::format("trees help a little: {}.", figures);
  return fmt::format("train on trees: {}.", figures);
}

}  // namespace

Verdict verdict_of(const InspectReport& report) {
  const Gains& gains = report.gains;
  Verdict verdict;
  verdict.worth_it = gains.over_packing >= kSmallGain && gains.over_append_only >= kSmallGain;
  verdict.text = verdict_text(gains);
  const SharingReport& sharing = report.sharing;
  const int64_t lost = sharing.lost_tokens(), between = sharing.lost_tokens_between_groups();
  const double part =
      static_cast<double>(lost) / static_cast<double>(std::max<int64_t>(1, report.statistics.tree_tokens));
  if (part < kSmallLoss) return verdict;
  const auto worst = std::max_element(sharing.causes.begin(), sharing.causes.end(),
                                      [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  const auto cause = static_cast<Cause>(worst - sharing.causes.begin());
  std::string values;
  for (size_t i = 0; i < std::min<size_t>(worst->values.size(), 2); ++i) {
    values += (i == 0 ? " (" : ", ") + quoted(worst->values[i], 48);
  }
  verdict.advice = fmt::format(
      "At least {} ({:.0f}% of the tree tokens) {} encoded again although {} equal{}; first "
      "cause: {}{}. To share {}, {}; the cached-token ratio would be {:.2f} or more instead of {:.2f}.",
      count_of(lost, "token", "tokens"), part * 100, lost == 1 ? "is" : "are",
      lost == 1 ? "it is" : "they are",
      between > 0 ? fmt::format(", {} of them between groups", with_commas(between)) : "",
      text_of(cause).phrase, values.empty() ? "" : values + ")", lost == 1 ? "it" : "them",
      text_of(cause).remedy, ratio_without_losses(report), report.statistics.cached_token_ratio);
  return verdict;
}

std::string snippet(const Vocabulary* vocabulary, std::span<const int32_t> tokens) {
  if (vocabulary != nullptr) return vocabulary->text(tokens);
  return fmt::format("{}", fmt::join(tokens, " "));
}

nlohmann::ordered_json to_json(const InspectReport& report, const Trajectories& trajectories,
                               const Vocabulary* vocabulary) {
  const Verdict verdict = verdict_of(report);
  Json json = statistics_to_json(report.statistics);
  json["sharing_by_depth"] = depth_to_json(report.by_depth);
  json["predicted_speedup_over_sequence_packing"] = report.gains.over_packing;
  json["predicted_speedup_over_append_only"] = report.gains.over_append_only;
  json["prediction_counts"] = report.gains.in_flops ? "FLOPs" : "tokens";
  json["sharing"] = sharing_to_json(report, trajectories, vocabulary);
  json["verdict"] = {{"worth_it", verdict.worth_it},
                     {"leads_with", report.gains.merging_helps() ? "append_only" : "sequence_packing"},
                     {"text", verdict.text},
                     {"advice", verdict.advice}};
  return json;
}

}  // namespace espalier
