// SPDX-License-Identifier: Apache-2.0
// Advantages: as the data give them, or made of rewards.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/options.h"

namespace espalier {

/// Advantages of all trajectories. A row's own advantages win; otherwise they are made of its reward R, in a
/// group of n rows with rewards (equal group_id; groups are those of the whole file):
///
///   baseline mean:           A = R - mean of the group (DeepSeekMath, 2024, section 4.1.2)
///   baseline leave-one-out:  A = R - mean of the others of the group (Ahmadian et al., "Back to basics",
///                            2024, equation 8); 0 in a group of one
///   baseline running:        A = R - mean of all rewards of the groups that stand before this one in the
///                            file, 0 for the first one (Williams, 1992, section 2: a reinforcement baseline
///                            that does not depend on the sample itself)
///   baseline none:           A = R
///   scale_rewards:           A / (standard deviation of the group + 1e-6), with the n - 1 deviation, 0 in a
///                            group of one; without this division (Dr. GRPO, 2025) groups that differ little
///                            are not blown up
///   turn_discount g:         A g^k on tokens that k turns follow; a turn is a stretch of tokens with loss.
///                            The return of a reward at the end (Sutton and Barto, 2018, equation 3.8)
///   kl_in reward:            R - kl_coef * (sum over the tokens with loss of the estimated divergence of the
///                            behaviour policy from the reference) in place of R (Ziegler et al., 2019,
///                            equation 2)
///
/// Throws InputError naming a row that lacks what it needs.
class Advantages {
 public:
  Advantages() = default;
  Advantages(const Trajectories& trajectories, const ObjectiveOptions& options);

  double at(int64_t row, int64_t position) const;

 private:
  const Trajectories* trajectories_ = nullptr;
  std::vector<double> from_reward_;  // [R], or empty when every row has its own
  double turn_discount_ = 1;
  Csr<int64_t> turns_;  // row r: first positions of its turns; empty without a discount
};

/// The field of the file, or the same less its penalty of divergence (kl_in reward). The row has a reward.
double reward_of(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options);

}  // namespace espalier
