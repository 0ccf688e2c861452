// SPDX-License-Identifier: Apache-2.0
// Sampling a token from logits. Does not use LibTorch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

/// Temperature and truncation of the distribution.
struct TokenChoiceOptions {
  double temperature = 1;  // logits are divided by it; 0: the most likely token
  int64_t top_k = 0;       // keep the top_k most likely tokens; 0: all
  /// Of these, keep the smallest set of most likely tokens whose probabilities sum to at least top_p
  /// (Holtzman et al., "The curious case of neural text degeneration", 2020). In (0, 1].
  double top_p = 1;

  bool operator==(const TokenChoiceOptions&) const = default;
};

struct TokenChoice {
  int32_t token = 0;
  /// log softmax(logits / temperature) of the token over the whole vocabulary, natural log, without regard to
  /// top_k and top_p, as trainers recompute it. At temperature 0: as at temperature 1.
  double logprob = 0;
  /// -log of the probability of the tokens that top_k, top_p or temperature 0 leave: how much higher the
  /// token's log-probability is among them.
  double truncation = 0;
};

/// Samples tokens, one row of logits at a time. Computes in float64 and orders equally likely tokens by id,
/// so a choice depends only on the row and the random number.
class TokenChooser {
 public:
  /// Throws InputError if an option is out of range.
  explicit TokenChooser(const TokenChoiceOptions& options);

  /// `logits` [V], not empty; `uniform` in [0, 1), unused at temperature 0. Throws InputError if a logit is
  /// NaN or +inf; a token with logit -inf is never chosen.
  template <class Scalar>
  TokenChoice choose(std::span<const Scalar> logits, double uniform);

 private:
  int32_t draw(double total, double uniform);
  void rank(size_t begin, size_t end);
  size_t num_kept(double total);

  TokenChoiceOptions options_;
  double left_ = 0;              // sum of the weights that the last token was chosen among
  std::vector<double> weights_;  // [V] unnormalised probabilities
  std::vector<int32_t> ranked_;  // [V] tokens; a prefix is sorted by weight
};

}  // namespace espalier
