#include "espalier/train/benchmark.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "espalier/base/check.h"

namespace espalier {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double seconds_of_step(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                       const ObjectiveOptions& objective, const Advantages* advantages,
                       Gradients* gradients) {
  gradients->zero();
  const auto begin = std::chrono::steady_clock::now();
  forward_backward(decoder, trajectories, step, objective, advantages, gradients);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

BenchmarkRow benchmark(const Decoder& decoder, const Trajectories& trajectories,
                       const BenchmarkOptions& options, const BenchmarkProgress& progress) {
  std::vector<int64_t> rows(trajectories.num_rows());
  std::iota(rows.begin(), rows.end(), 0);
  int64_t token_budget = options.token_budget;
  if (token_budget == 0) token_budget = forest_of(trajectories, rows).tree_tokens();
  const Step tree = make_step(trajectories, rows, {Strategy::kTreePacking, token_budget}, options.objective);
  const Step packing =
      make_step(trajectories, rows, {Strategy::kSequencePacking, token_budget}, options.objective);
  Advantages advantages;
  if (options.objective.kind == ObjectiveKind::kGrpo) {
    advantages = Advantages(trajectories, options.objective.scale_rewards);
  }
  Gradients gradients(decoder);
  const auto measure = [&](const Step& step) {
    return seconds_of_step(decoder, trajectories, step, options.objective, &advantages, &gradients);
  };

  for (int64_t i = 0; i < options.warmup; ++i) measure(tree);
  std::vector<double> tree_seconds, packing_seconds, ratios;
  for (int64_t round = 0; round < options.repeats; ++round) {
    double tree_time = 0, packing_time = 0;
    // The order alternates, so that what drifts over the run favours neither side.
    if (round % 2 == 0) {
      tree_time = measure(tree);
      packing_time = measure(packing);
    } else {
      packing_time = measure(packing);
      tree_time = measure(tree);
    }
    if (progress) {
      progress(fmt::format("round {}: tree {:.3f} s, sequence packing {:.3f} s", round + 1, tree_time,
                           packing_time));
    }
    tree_seconds.push_back(tree_time);
    packing_seconds.push_back(packing_time);
    ratios.push_back(packing_time / tree_time);
  }

  const ModelShape shape = model_shape(decoder.config());
  BenchmarkRow row;
  row.flat_tokens = tree.flat_tokens();
  row.tree_tokens = tree.forest.tree_tokens();
  row.cached_token_ratio = static_cast<double>(row.flat_tokens) / static_cast<double>(row.tree_tokens);
  row.tree_seconds = median(tree_seconds);
  row.packing_seconds = median(packing_seconds);
  row.speedup = median(ratios);
  row.speedup_low = *std::min_element(ratios.begin(), ratios.end());
  row.speedup_high = *std::max_element(ratios.begin(), ratios.end());
  row.bound = speedup_bound(shape, tree);
  row.share_of_bound = row.speedup / row.bound;
  row.tree_tflops_per_second = step_flops(shape, plan_work(tree)).total() / row.tree_seconds / 1e12;
  row.packing_tflops_per_second = step_flops(shape, plan_work(packing)).total() / row.packing_seconds / 1e12;
  return row;
}

}  // namespace espalier
