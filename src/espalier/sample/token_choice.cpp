// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/token_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"

namespace espalier {

TokenChooser::TokenChooser(const TokenChoiceOptions& options) : options_(options) {
  ESPALIER_CHECK(std::isfinite(options.temperature) && options.temperature >= 0,
                 "{}: expected 0 or more, received {}", named("temperature"), options.temperature);
  ESPALIER_CHECK(options.top_k >= 0, "{}: expected 0 or more, received {}", named("top-k"), options.top_k);
  ESPALIER_CHECK(options.top_p > 0 && options.top_p <= 1, "{}: expected above 0 and at most 1, received {}",
                 named("top-p"), options.top_p);
}

template <class Scalar>
TokenChoice TokenChooser::choose(std::span<const Scalar> logits, double uniform) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const auto maximum = static_cast<double>(*best);
  const bool greedy = options_.temperature == 0;
  const double temperature = greedy ? 1 : options_.temperature;
  weights_.resize(logits.size());
  double total = 0;
  for (size_t v = 0; v < logits.size(); ++v) {
    weights_[v] = std::exp((static_cast<double>(logits[v]) - maximum) / temperature);
    total += weights_[v];
  }
  // NaN and infinities propagate to the sum.
  ESPALIER_CHECK(std::isfinite(total), "the model's logits are not finite: no token can be chosen");
  const int32_t token = greedy ? static_cast<int32_t>(best - logits.begin()) : draw(total, uniform);
  if (greedy) left_ = weights_[token];
  return {.token = token,
          .logprob = (static_cast<double>(logits[token]) - maximum) / temperature - std::log(total),
          .truncation = std::log(total) - std::log(left_)};
}

/// Sorts ranks [begin, end) of ranked_ by descending weight; ranks before `begin` are sorted already.
void TokenChooser::rank(size_t begin, size_t end) {
  const auto at = [&](size_t place) { return ranked_.begin() + static_cast<int64_t>(place); };
  std::partial_sort(at(begin), at(end), ranked_.end(), [&](int32_t a, int32_t b) {
    return weights_[a] > weights_[b] || (weights_[a] == weights_[b] && a < b);
  });
}

/// Number of tokens left by top_k and top_p; sorts them. `total`: the sum of all weights.
size_t TokenChooser::num_kept(double total) {
  const size_t most =
      options_.top_k == 0 ? weights_.size() : std::min(weights_.size(), static_cast<size_t>(options_.top_k));
  ranked_.resize(weights_.size());
  std::iota(ranked_.begin(), ranked_.end(), 0);
  const auto sum_of = [&](size_t begin, size_t end, double sum) {
    for (size_t i = begin; i < end; ++i) sum += weights_[ranked_[i]];
    return sum;
  };
  size_t ranked = 0;
  if (most < weights_.size()) {
    rank(0, ranked = most);
    total = sum_of(0, most, 0);
  }
  if (options_.top_p == 1) return most;
  // Usually a few tokens suffice, so sort in growing blocks.
  double sum = 0;
  for (size_t n = 0; n < most;) {
    if (n == ranked) {
      const size_t end = std::min(most, std::max<size_t>(64, 4 * ranked));
      rank(ranked, end);
      ranked = end;
    }
    sum += weights_[ranked_[n++]];
    if (sum >= options_.top_p * total) return n;
  }
  return most;
}

int32_t TokenChooser::draw(double total, double uniform) {
  const bool all =
      options_.top_p == 1 && (options_.top_k == 0 || static_cast<size_t>(options_.top_k) >= weights_.size());
  const size_t count = all ? weights_.size() : num_kept(total);
  const auto token = [&](size_t i) { return all ? static_cast<int32_t>(i) : ranked_[i]; };
  if (!all) {
    total = 0;
    for (size_t i = 0; i < count; ++i) total += weights_[token(i)];
  }
  left_ = total;
  const double target = uniform * total;
  double sum = 0;
  int32_t last = token(0);
  for (size_t i = 0; i < count; ++i) {
    const double weight = weights_[token(i)];
    if (weight == 0) continue;
    last = token(i);
    sum += weight;
    if (sum > target) break;  // if rounding keeps the sum below, the last token is taken
  }
  return last;
}

template TokenChoice TokenChooser::choose(std::span<const float>, double);
template TokenChoice TokenChooser::choose(std::span<const double>, double);

}  // namespace espalier
