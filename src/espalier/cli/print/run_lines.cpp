// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/print/run_lines.h"

#include <fmt/format.h>

#include <cmath>

#include "espalier/base/units.h"

namespace espalier::cli {

std::string evaluation_line(int64_t step, int64_t total, const nlohmann::ordered_json& values,
                            const EvaluationState& state) {
  std::string line =
      fmt::format("evaluation after step {}/{}  loss {:.6g}  nll {:.6g} per token", step, total,
                  values["eval_loss"].get<double>(), values["eval_nll_per_token"].get<double>());
  if (values.contains("eval_reward_accuracy")) {
    line += fmt::format("  margin {:.4f}  accuracy {:.3f}", values["eval_reward_margin"].get<double>(),
                        values["eval_reward_accuracy"].get<double>());
  }
  if (state.best_step == step) {
    line += "  the best so far";
  } else if (state.best_step > 0) {
    line += fmt::format("  best {:.6g} after step {}", state.best_loss, state.best_step);
  }
  return line + fmt::format("  {:.2f} s", values["eval_seconds"].get<double>());
}

std::string step_line(int64_t step, int64_t total, const nlohmann::ordered_json& metrics) {
  std::string line = fmt::format(
      "step {}/{}  loss {:.6g}  grad norm {:.4g}  lr {:.3g}  {} tree tokens/s  {} flat tokens/s  {:.2f} s",
      step, total, metrics["loss"].get<double>(), metrics["grad_norm"].get<double>(),
      metrics["learning_rate"].get<double>(),
      with_commas(std::llround(metrics["tree_tokens_per_second"].get<double>())),
      with_commas(std::llround(metrics["flat_tokens_per_second"].get<double>())),
      metrics["seconds"].get<double>());
  if (metrics.contains("clip_fraction")) {
    line += fmt::format("  clipped {:.3f}", metrics["clip_fraction"].get<double>());
  }
  if (metrics.contains("ratio_mean")) {
    line += fmt::format("  ratio {:.4f}", metrics["ratio_mean"].get<double>());
  }
  if (metrics.contains("reward_accuracy")) {
    line += fmt::format("  margin {:.4f}  accuracy {:.3f}", metrics["reward_margin"].get<double>(),
                        metrics["reward_accuracy"].get<double>());
  }
  if (metrics.contains("entropy")) line += fmt::format("  entropy {:.4f}", metrics["entropy"].get<double>());
  if (metrics.contains("router_aux_loss")) {
    line += fmt::format("  balance {:.4f}", metrics["router_aux_loss"].get<double>());
  }
  return line;
}

}  // namespace espalier::cli
