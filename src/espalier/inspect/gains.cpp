// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/gains.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

namespace espalier {
namespace {

// Merging that saves less than this part does not count: a few rows of a group may happen to be equal.
constexpr double kMergingCounts = 1.05;

double quotient(double work, double tree) {
  const double gain = work / tree;
  return tree > 0 && work > 0 && std::isfinite(gain) ? gain : 1;
}

}  // namespace

Gains Gains::of(double packing, double append_only, double tree, bool in_flops) {
  return {quotient(packing, tree), quotient(append_only, tree), in_flops};
}

bool Gains::merging_helps() const {
  return over_packing >= kMergingCounts * over_append_only;
}

std::string both_gains(const Gains& gains) {
  std::string first = fmt::format("{:.2f}x over sequence packing", gains.over_packing);
  std::string second = fmt::format("{:.2f}x over append-only merging", gains.over_append_only);
  if (gains.merging_helps()) std::swap(first, second);
  return first + " and " + second;
}

std::string gains_lines(const Gains& gains) {
  std::string packing =
      fmt::format("{:>10.2f}x over sequence packing: a trainer that encodes every trajectory on its own\n",
                  gains.over_packing);
  std::string merging = fmt::format(
      "{:>10.2f}x over append-only merging: one that first drops trajectories which others "
      "extend{}\n",
      gains.over_append_only, gains.merging_helps() ? "" : " (hardly any here)");
  return gains.merging_helps() ? merging + packing : packing + merging;
}

std::string gains_report(const Gains& gains, bool has_model) {
  const char* counted = gains.in_flops ? "FLOPs" : has_model ? "tokens" : "tokens; --model gives FLOPs";
  return fmt::format("predicted speed-up, at most (in {})\n{}", counted, gains_lines(gains));
}

}  // namespace espalier
