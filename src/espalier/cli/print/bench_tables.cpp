// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/bench_tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "espalier/base/units.h"

namespace espalier::cli {
namespace {

// Table of tree_and_packing_sides.
std::string ratio_table(const std::vector<Measured>& all) {
  std::string text =
      "| flat tokens | merged tokens | tree tokens | flat / tree | tree s | merging s | packing s | over "
      "merging | bound "
      "| over packing | low .. high | bound | share of bound | tree TFLOP/s | packing TFLOP/s |\n"
      "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  bool as_packing = false;
  for (const auto& [name, result] : all) {
    const SideResult &tree = result.sides.front(), &packing = result.sides.back();
    const SideResult* merging = result.merged_side();
    as_packing |= merging == nullptr;
    text += fmt::format(
        "| {} | {} | {} | {:.2f} | {:.3f} | {} | {:.3f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} .. {:.2f} "
        "| {:.2f} | {:.3f} | {:.3f} | {:.3f} |\n",
        with_commas(result.flat_tokens), with_commas(result.append_only_tokens),
        with_commas(result.tree_tokens), result.cached_token_ratio, tree.seconds,
        merging == nullptr ? "as packing" : fmt::format("{:.3f}", merging->seconds), packing.seconds,
        tree.merging_speedup, tree.merging_bound, tree.speedup, tree.speedup_low, tree.speedup_high,
        tree.bound, tree.share_of_bound, tree.tflops_per_second, packing.tflops_per_second);
  }
  text +=
      "\nOver merging: speed-up over append-only merging, which drops trajectories that others extend and "
      "packs the rest.\nOver packing: speed-up over sequence packing, which encodes every trajectory.\n";
  if (as_packing) text += "As packing: no trajectory extends another, so there is nothing to merge.\n";
  return text;
}

// Whether the budget exceeds the requested one because a trajectory is longer.
bool is_raised(const Measured& measured, const SideResult& side) {
  const std::vector<SideResult>& sides = measured.result.sides;
  const auto partition = std::find_if(sides.begin(), sides.end(), [](const SideResult& other) {
    return other.side.plan.strategy == Strategy::kPartition;
  });
  return &side != &sides.front() && partition != sides.end() &&
         side.side.plan.token_budget > partition->side.plan.token_budget;
}

// Table of strategy_sides.
std::string strategy_table(const std::vector<Measured>& all) {
  std::string text =
      "| data | POR | flat tokens | tree tokens | strategy | token budget | micro-batches | encoded tokens | "
      "ERR | seconds | speed-up over packing | low .. high | bound of the plan | share of it | bound of the "
      "whole tree | bound over merging | speed / whole tree | working memory | peak memory |\n"
      "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  bool raised = false;
  for (const Measured& measured : all) {
    const BenchmarkResult& result = measured.result;
    for (const SideResult& side : result.sides) {
      const bool mark = is_raised(measured, side);
      raised |= mark;
      text += fmt::format(
          "| {} | {:.2f} | {} | {} | {} | {}{} | {} | {} | {:.2f} | {:.3f} | {:.2f} | {:.2f} .. {:.2f} | "
          "{:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.3f} | {} | {} |\n",
          measured.name, result.por, with_commas(result.flat_tokens), with_commas(result.tree_tokens),
          side.side.name, with_commas(side.side.plan.token_budget), mark ? "*" : "",
          with_commas(side.micro_batches), with_commas(side.encoded_tokens), side.err, side.seconds,
          side.speedup, side.speedup_low, side.speedup_high, side.bound, side.share_of_bound,
          result.sides.front().bound, side.merging_bound, side.relative_speed,
          human_bytes(static_cast<double>(side.working_bytes)),
          human_bytes(static_cast<double>(side.peak_bytes)));
    }
  }
  if (raised) {
    text +=
        "\n\\* The longest trajectory: neither tree packing nor sequence packing can run at the budget of "
        "partition.\n";
  }
  return text;
}

// Table of tree_side alone.
std::string tree_table(const std::vector<Measured>& all) {
  std::string text =
      "| flat tokens | tree tokens | flat / tree | micro-batches | encoded tokens | tree s | bound | tree "
      "TFLOP/s | loss |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const auto& [name, result] : all) {
    const SideResult& tree = result.sides.front();
    text += fmt::format("| {} | {} | {:.2f} | {} | {} | {:.3f} | {:.2f} | {:.3f} | {:.6f} |\n",
                        with_commas(result.flat_tokens), with_commas(result.tree_tokens),
                        result.cached_token_ratio, with_commas(tree.micro_batches),
                        with_commas(tree.encoded_tokens), tree.seconds, tree.bound, tree.tflops_per_second,
                        tree.loss);
  }
  return text;
}

nlohmann::ordered_json tree_json(const Measured& measured) {
  const BenchmarkResult& result = measured.result;
  const SideResult& tree = result.sides.front();
  return {{"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"cached_token_ratio", result.cached_token_ratio},
          {"micro_batches", tree.micro_batches},
          {"encoded_tokens", tree.encoded_tokens},
          {"tree_seconds", tree.seconds},
          {"bound", tree.bound},
          {"tree_tflops_per_second", tree.tflops_per_second},
          {"loss", tree.loss},
          {"grad_norm", tree.grad_norm}};
}

nlohmann::ordered_json ratio_json(const Measured& measured) {
  const BenchmarkResult& result = measured.result;
  const SideResult* merging = result.merged_side();
  const SideResult &tree = result.sides.front(), &packing = result.sides.back();
  return {{"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"append_only_tokens", result.append_only_tokens},
          {"cached_token_ratio", result.cached_token_ratio},
          {"tree_seconds", tree.seconds},
          {"packing_seconds", packing.seconds},
          {"append_only_seconds", merging == nullptr ? packing.seconds : merging->seconds},
          {"append_only_measured", merging != nullptr},
          {"speedup_over_append_only", tree.merging_speedup},
          {"bound_over_append_only", tree.merging_bound},
          {"speedup", tree.speedup},
          {"speedup_low", tree.speedup_low},
          {"speedup_high", tree.speedup_high},
          {"bound", tree.bound},
          {"share_of_bound", tree.share_of_bound},
          {"tree_tflops_per_second", tree.tflops_per_second},
          {"packing_tflops_per_second", packing.tflops_per_second},
          {"loss", tree.loss},
          {"grad_norm", tree.grad_norm}};
}

nlohmann::ordered_json strategy_json(const Measured& measured, const SideResult& side) {
  const BenchmarkResult& result = measured.result;
  return {{"data", measured.name},
          {"por", result.por},
          {"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"longest_trajectory", result.longest_trajectory},
          {"side", side.side.name},
          {"strategy", to_string(side.side.plan.strategy)},
          {"token_budget", side.side.plan.token_budget},
          {"micro_batches", side.micro_batches},
          {"encoded_tokens", side.encoded_tokens},
          {"err", side.err},
          {"seconds", side.seconds},
          {"speedup", side.speedup},
          {"speedup_low", side.speedup_low},
          {"speedup_high", side.speedup_high},
          {"bound", side.bound},
          {"bound_over_append_only", side.merging_bound},
          {"share_of_bound", side.share_of_bound},
          {"whole_tree_bound", result.sides.front().bound},
          {"relative_speed", side.relative_speed},
          {"working_bytes", side.working_bytes},
          {"peak_bytes", side.peak_bytes}};
}

}  // namespace

std::string bench_table(BenchSides sides, const std::vector<Measured>& all) {
  switch (sides) {
    case BenchSides::kStrategies:
      return strategy_table(all);
    case BenchSides::kTree:
      return tree_table(all);
    case BenchSides::kTreeAndPacking:
      break;
  }
  return ratio_table(all);
}

nlohmann::ordered_json bench_rows(BenchSides sides, const std::vector<Measured>& all) {
  auto rows = nlohmann::ordered_json::array();
  for (const Measured& measured : all) {
    if (sides == BenchSides::kTree) rows.push_back(tree_json(measured));
    if (sides == BenchSides::kTreeAndPacking) rows.push_back(ratio_json(measured));
    if (sides != BenchSides::kStrategies) continue;
    for (const SideResult& side : measured.result.sides) rows.push_back(strategy_json(measured, side));
  }
  return rows;
}

}  // namespace espalier::cli
