// SPDX-License-Identifier: Apache-2.0
// How much training on trees gains over the two ways of training without trees.
#pragma once

#include <array>
#include <string>

namespace espalier {

/// The work of computing the same loss without trees, over the work with trees. 1 means no gain.
struct Gains {
  double over_packing = 1;  // every trajectory by itself, packed
  double over_append_only =
      1;                  // the same, once trajectories that others extend are dropped (ForestStatistics)
  bool in_flops = false;  // else in tokens

  /// Quotients of the work; 1 where there is none.
  static Gains of(double packing, double append_only, double tree, bool in_flops);

  /// Whether append-only merging alone saves a substantial part. If so, the gain over it is what trees add,
  /// and is named first. Otherwise nothing can be merged, as in a group of answers to one prompt, and the
  /// gain over packing is named first.
  bool merging_helps() const;
  double leading() const { return merging_helps() ? over_append_only : over_packing; }
};

struct GainFigure {
  double gain = 1;
  const char* over;     // "sequence packing"
  std::string meaning;  // of `over`: what such a trainer does
};
/// Both gains, the leading one first.
std::array<GainFigure, 2> gain_figures(const Gains& gains);

/// Both gains, the leading one first: "1.21x over append-only merging and 10.50x over sequence packing".
std::string both_gains(const Gains& gains);

/// Both as lines of a report, the leading one first, each with what it compares with.
std::string gains_lines(const Gains& gains);

/// The same under a title, which says what is counted, and without a model what one would add.
std::string gains_report(const Gains& gains, bool has_model);

}  // namespace espalier
