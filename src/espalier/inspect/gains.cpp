// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/gains.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

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

bool Gains::merging_helps() const {
  return over_packing >= kMergingCounts * over_append_only;
}

std::array<GainFigure, 2> gain_figures(const Gains& gains) {
  std::array<GainFigure, 2> figures = {
      GainFigure{gains.over_packing, "sequence packing",
                 "a trainer that encodes every trajectory separately"},
      GainFigure{gains.over_append_only, "append-only merging",
                 std::string("a trainer that first drops trajectories which others extend") +
                     (gains.merging_helps() ? "" : " (few or none here)")}};
  if (gains.merging_helps()) std::swap(figures[0], figures[1]);
  return figures;
}

std::string both_gains(const Gains& gains) {
  const auto [first, second] = gain_figures(gains);
  return fmt::format("{:.2f}x over {} and {:.2f}x over {}", first.gain, first.over, second.gain, second.over);
}

std::string gains_lines(const Gains& gains) {
  std::string lines;
  for (const GainFigure& figure : gain_figures(gains)) {
    lines += fmt::format("{:>10.2f}x over {}: {}\n", figure.gain, figure.over, figure.meaning);
  }
  return lines;
}

std::string gains_report(const Gains& gains, bool has_model) {
  const char* counted = gains.in_flops ? "FLOPs" : has_model ? "tokens" : "tokens; --model gives FLOPs";
  return fmt::format("predicted speed-up, at most (in {})\n{}", counted, gains_lines(gains));
}

}  // namespace espalier
