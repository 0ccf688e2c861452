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
///   turn_rewards:            one reward r_k for each turn. The return G_k = sum over j >= k of g^(j - k) r_j
///                            takes the place of R on the tokens of turn k, and baselines and deviations are
///                            those of the returns of the k-th turns alone: of the trajectories of the group
///                            that have so many turns (advantages of turns as in Zeng et al., "Reinforcing
///                            multi-turn reasoning in LLM agents", 2025; of discounted returns as in Ding et
///                            al., GTPO, 2025). A group has turn_rewards in all its rows or in none
///   kl_in reward:            R - kl_coef * (sum over the tokens with loss of the estimated divergence of the
///                            behaviour policy from the reference) in place of R (Ziegler et al., 2019,
///                            equation 2); of turn_rewards, each loses what its own turn adds to the sum
///
/// Throws InputError naming a row that lacks what it needs.
class Advantages {
 public:
  Advantages() = default;
  Advantages(const Trajectories& trajectories, const ObjectiveOptions& options);

  double at(int64_t row, int64_t position) const;

 private:
  const Trajectories* trajectories_ = nullptr;
  std::vector<double> from_reward_;  // [R], or empty when every row has its own; unused with turn_rewards
  double turn_discount_ = 1;
  Csr<int64_t> turns_;           // row r: first positions of its turns; empty where nothing asks for them
  std::vector<double> of_turn_;  // [turns], aligned to turns_, of rows with turn_rewards
};

/// Whether the row has a reward or rewards of turns.
bool has_reward(const Trajectories& trajectories, int64_t row);

/// The reward of the file, or the sum of the row's turn_rewards, less the penalty of divergence (kl_in
/// reward). The row has a reward.
double reward_of(const Trajectories& trajectories, int64_t row, const ObjectiveOptions& options);

}  // namespace espalier
