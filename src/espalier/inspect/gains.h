// SPDX-License-Identifier: Apache-2.0
// The gain of training on trees over sequence packing and append-only merging.
#pragma once

#include <array>
#include <string>

namespace espalier {

/// The work of computing the same loss without trees over the work with trees. 1: no gain.
struct Gains {
  double over_packing = 1;      // over every trajectory separately, packed
  double over_append_only = 1;  // over packing without trajectories that others extend (ForestStatistics)
  bool in_flops = false;        // else in tokens

  /// Quotients of work; 1 if there is no work.
  static Gains of(double packing, double append_only, double tree, bool in_flops);

  /// Whether append-only merging alone saves a substantial part. If so, the gain over it is listed first,
  /// because it is what trees add. Otherwise (a group of answers to one prompt, for example) the gain over
  /// packing is listed first.
  bool merging_helps() const;
  double leading() const { return merging_helps() ? over_append_only : over_packing; }
};

struct GainFigure {
  double gain = 1;
  const char* over;     // "sequence packing"
  std::string meaning;  // what a trainer of this kind does
};
/// Both gains, the leading one first.
std::array<GainFigure, 2> gain_figures(const Gains& gains);

/// Both gains, the leading one first: "1.21x over append-only merging and 10.50x over sequence packing".
std::string both_gains(const Gains& gains);

/// Both gains as lines of a report, the leading one first, each with its meaning.
std::string gains_lines(const Gains& gains);

/// gains_lines under a title that names the unit and, without a model, what --model would add.
std::string gains_report(const Gains& gains, bool has_model);

}  // namespace espalier
