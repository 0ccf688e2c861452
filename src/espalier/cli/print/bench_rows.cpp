// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/bench_rows.h"

namespace espalier::cli {
namespace {

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

nlohmann::ordered_json bench_rows(bool strategies, const std::vector<Measured>& all) {
  auto rows = nlohmann::ordered_json::array();
  for (const Measured& measured : all) {
    const std::vector<SideResult>& sides = measured.result.sides;
    if (!strategies) rows.push_back(sides.size() == 1 ? tree_json(measured) : ratio_json(measured));
    for (size_t i = 0; strategies && i < sides.size(); ++i) rows.push_back(strategy_json(measured, sides[i]));
  }
  return rows;
}

}  // namespace espalier::cli
