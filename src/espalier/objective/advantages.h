// SPDX-License-Identifier: Apache-2.0
// Advantages, read from the data or computed from rewards.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/objective/options.h"

namespace espalier {

/// Advantages of all trajectories. A row's own advantages take precedence; otherwise they are computed from
/// its reward R within a group of n rows with rewards (equal group_id, over the whole file):
///
///   baseline mean:           A = R - mean of the group (DeepSeekMath, 2024, section 4.1.2)
///   baseline leave-one-out:  A = R - mean of the others of the group (Ahmadian et al., "Back to basics",
///                            2024, equation 8); 0 in a group of one
///   baseline running:        A = R - mean of all rewards of earlier groups in the file, 0 for the first
///                            (Williams, 1992, section 2: a reinforcement baseline that does not depend on
///                            the sample itself)
///   baseline none:           A = R
///   scale_rewards:           A / (standard deviation of the group + 1e-6), with the n - 1 deviation, 0 in a
///                            group of one. Without it (Dr. GRPO, 2025), groups whose rewards differ little
///                            are not amplified
///   turn_discount g:         A g^k on tokens followed by k turns; a turn is a contiguous range of tokens
///                            with loss. The return of a reward at the end (Sutton and Barto, 2018,
///                            equation 3.8)
///   turn_rewards:            one reward r_k for each turn. The return G_k = sum over j >= k of g^(j - k) r_j
///                            replaces R on the tokens of turn k. Baselines and deviations are computed over
///                            the returns of the k-th turns of those trajectories of the group that have one
///                            (advantages of turns as in Zeng et al., "Reinforcing multi-turn reasoning in
///                            LLM agents", 2025; of discounted returns as in Ding et al., GTPO, 2025). A
///                            group has turn_rewards in all its rows or in none
///   kl_in reward:            R - kl_coef * (sum over the tokens with loss of the estimated divergence of the
///                            behaviour policy from the reference) in place of R (Ziegler et al., 2019,
///                            equation 2). With turn_rewards, each is reduced by the divergence of its turn
///
/// Throws InputError naming a row that lacks what it needs.
class Advantages {
 public:
  Advantages() = default;
  Advantages(const Trajectories& trajectories, const ObjectiveOptions& options);

  double at(int64_t row, int64_t position) const;

 private:
  const Trajectories* trajectories_ = nullptr;
  std::vector<double> from_reward_;  // [R]; empty if no row needs it; unused for rows with turn_rewards
  double turn_discount_ = 1;
  Csr<int64_t> turns_;                   // row r: first position of each turn; empty if not needed
  std::vector<double> turn_advantages_;  // [turns], aligned to turns_; for rows with turn_rewards
};

/// Whether the row has `reward` or `turn_rewards`.
bool has_reward(const Trajectories& trajectories, int64_t row);

/// The row's `reward` or the sum of its `turn_rewards`, minus the KL penalty (kl_in reward). Requires
/// has_reward().
double reward_of(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options);

}  // namespace espalier
