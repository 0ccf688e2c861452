// SPDX-License-Identifier: Apache-2.0
// Drawing a token from logits. Free of LibTorch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// How a token is chosen.
struct TokenChoiceOptions {
  double temperature = 1;  // logits are divided by it; 0: the most likely token
  int64_t top_k = 0;       // choose among so many most likely tokens; 0: among all
  /// Then among the fewest most likely ones of these whose probabilities sum up to this or more (Holtzman et
  /// al., "The curious case of neural text degeneration", 2020). In (0, 1].
  double top_p = 1;
};

struct TokenChoice {
  int32_t token = 0;
  /// log softmax(logits / temperature) of the token over the whole vocabulary, natural log. What top_k and
  /// top_p leave out counts as well, because that is what trainers compute again; at temperature 0 it is that
  /// of temperature 1.
  double logprob = 0;
};

/// Chooses tokens, one row of logits at a time. Everything is computed in float64, and among equally likely
/// tokens the one with the lowest id comes first, so a choice depends on the row and the random number alone.
class TokenChooser {
 public:
  /// Throws InputError where an option is not as said.
  explicit TokenChooser(const TokenChoiceOptions& options);

  /// `logits` [V], not empty; `uniform` in [0, 1), not read at temperature 0. Throws InputError where a logit
  /// is NaN or infinite; minus infinity is a token that is never chosen.
  template <class Scalar>
  TokenChoice choose(std::span<const Scalar> logits, double uniform);

 private:
  int32_t draw(double total, double uniform);
  void rank(size_t begin, size_t end);
  size_t num_kept(double total);

  TokenChoiceOptions options_;
  std::vector<double> weights_;  // [V] probabilities times their sum
  std::vector<int32_t> ranked_;  // [V] tokens, of which the first are ranked
};

}  // namespace espalier
