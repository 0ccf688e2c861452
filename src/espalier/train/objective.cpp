#include "espalier/train/objective.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <cmath>
#include <cstdlib>
#include <map>

#include "espalier/base/check.h"

namespace espalier {

ObjectiveKind parse_objective(const std::string& name) {
  if (name == "sft") return ObjectiveKind::kSft;
  if (name == "grpo") return ObjectiveKind::kGrpo;
  throw InputError(fmt::format("objective: expected sft or grpo, received `{}`", name));
}

SharedTargets parse_shared_targets(const std::string& name) {
  if (name == "sum") return SharedTargets::kSum;
  if (name == "once") return SharedTargets::kOnce;
  throw InputError(fmt::format("shared-targets: expected sum or once, received `{}`", name));
}

void parse_normalize(const std::string& text, ObjectiveOptions* options) {
  if (text == "token") {
    options->normalize = Normalize::kToken;
  } else if (text == "sequence") {
    options->normalize = Normalize::kSequence;
  } else {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    ESPALIER_CHECK(!text.empty() && *end == '\0' && std::isfinite(value) && value > 0,
                   "normalize: expected token, sequence or a positive number, received `{}`", text);
    options->normalize = Normalize::kConstant;
    options->normalize_constant = value;
  }
}

namespace {

// Calls visit(position, forest token) for every token of trajectory k of the forest but its first.
template <typename Visit>
void for_each_target(const Forest& forest, int64_t k, Visit visit) {
  for (const int64_t node : root_path(forest, forest.end_node[k])) {
    for (int64_t i = 0; i < forest.node_size(node); ++i) {
      const int64_t position = forest.position[node] + i;
      if (position >= 1) visit(position, forest.node_begin[node] + i);
    }
  }
}

// Weighted terms before normalisation.
Csr<Term> weighted_terms(const Trajectories& trajectories, std::span<const int64_t> rows,
                         const Forest& forest, SharedTargets shared_targets) {
  Csr<Term> terms;
  std::vector<bool> taken;
  if (shared_targets == SharedTargets::kOnce) taken.resize(forest.tree_tokens());
  for (size_t k = 0; k < rows.size(); ++k) {
    const int64_t begin = trajectories.offsets[rows[k]];
    for_each_target(forest, static_cast<int64_t>(k), [&](int64_t position, int64_t token) {
      const double weight = trajectories.loss_weights[begin + position];
      if (weight == 0) return;
      if (shared_targets == SharedTargets::kOnce) {
        if (taken[token]) return;
        taken[token] = true;
      }
      terms.values.push_back({position, weight});
    });
    terms.end_row();
  }
  return terms;
}

}  // namespace

Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options) {
  Csr<Term> terms = weighted_terms(trajectories, rows, forest, options.shared_targets);
  std::vector<double> row_sum(rows.size());
  double sum = 0;
  int64_t rows_with_loss = 0;
  for (size_t k = 0; k < rows.size(); ++k) {
    for (const Term& term : terms.row(k)) row_sum[k] += term.coefficient;
    sum += row_sum[k];
    rows_with_loss += row_sum[k] > 0;
  }
  ESPALIER_CHECK(rows_with_loss > 0,
                 "no token carries loss in a step of {} trajectories (first: {}): expected a loss_mask or "
                 "loss_weights above 0 "
                 "somewhere after the first token",
                 rows.size(), rows.empty() ? "none" : trajectories.name(rows[0]));
  for (size_t k = 0; k < rows.size(); ++k) {
    const double normaliser = options.normalize == Normalize::kToken      ? sum
                              : options.normalize == Normalize::kSequence ? row_sum[k] * rows_with_loss
                                                                          : options.normalize_constant;
    for (Term& term : terms.row(k)) term.coefficient /= normaliser;
  }
  return terms;
}

std::span<const Term> terms_from(std::span<const Term> terms, int64_t position) {
  const auto begin =
      std::lower_bound(terms.begin(), terms.end(), position,
                       [](const Term& term, int64_t wanted) { return term.position < wanted; });
  return {begin, terms.end()};
}

Csr<Term> step_terms_or_all(const Trajectories& trajectories, std::span<const int64_t> rows,
                            const Forest& forest, const ObjectiveOptions& options) {
  for (const int64_t row : rows) {
    for (int64_t i = trajectories.offsets[row] + 1; i < trajectories.offsets[row + 1]; ++i) {
      if (trajectories.loss_weights[i] > 0) return step_terms(trajectories, rows, forest, options);
    }
  }
  return all_terms(trajectories, rows);
}

Csr<Term> all_terms(const Trajectories& trajectories, std::span<const int64_t> rows) {
  Csr<Term> terms;
  for (const int64_t row : rows) {
    for (int64_t position = 1; position < trajectories.row_size(row); ++position) {
      terms.values.push_back({position, 1.0});
    }
    terms.end_row();
  }
  return terms;
}

Advantages::Advantages(const Trajectories& trajectories, bool scale_rewards) : trajectories_(&trajectories) {
  struct Group {
    int64_t count = 0;
    double mean = 0;
    double squares = 0;  // sum of squared distances from the mean (Welford)
  };
  std::map<std::string, Group> groups;
  const auto from_reward = [&](int64_t row) {
    return trajectories.reward.has(row) && !trajectories.group_id.empty() &&
           !trajectories.group_id[row].empty();
  };
  bool needed = false;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (from_reward(row)) {
      Group& group = groups[trajectories.group_id[row]];
      const double distance = trajectories.reward.values[row] - group.mean;
      group.mean += distance / static_cast<double>(++group.count);
      group.squares += distance * (trajectories.reward.values[row] - group.mean);
    }
    if (!trajectories.advantages.has(row)) {
      needed = true;
      ESPALIER_CHECK(from_reward(row),
                     "trajectory {} (row {}): objective grpo expects `advantages`, `advantage`, or `reward` "
                     "with `group_id`; "
                     "received none of them",
                     trajectories.name(row), row);
    }
  }
  if (!needed) return;
  from_reward_.resize(trajectories.num_rows());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    if (!from_reward(row)) continue;
    const Group& group = groups[trajectories.group_id[row]];
    double advantage = trajectories.reward.values[row] - group.mean;
    if (scale_rewards) {
      const double deviation =
          group.count > 1 ? std::sqrt(group.squares / static_cast<double>(group.count - 1)) : 0.0;
      advantage /= deviation + 1e-6;
    }
    from_reward_[row] = advantage;
  }
}

double Advantages::at(int64_t row, int64_t position) const {
  if (trajectories_->advantages.has(row)) {
    return trajectories_->advantages.values[trajectories_->offsets[row] + position];
  }
  return from_reward_[row];
}

ObjectiveValue objective_value(const ObjectiveOptions& options, const at::Tensor& logprobs,
                               const TermTensors& terms) {
  ObjectiveValue value;
  if (options.kind == ObjectiveKind::kSft) {
    value.loss = -(terms.coefficient * logprobs).sum();
    return value;
  }
  const at::Tensor current = logprobs.detach();
  const at::Tensor log_ratio = logprobs - at::where(terms.has_old, terms.old_logprob, current);
  const at::Tensor ratio = log_ratio.exp();
  const at::Tensor plain = ratio * terms.advantage;
  const at::Tensor clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * terms.advantage;
  value.loss = -(terms.coefficient * at::minimum(plain, clipped)).sum();
  const at::Tensor ratio_value = ratio.detach();
  value.clipped_terms = (clipped.detach() < plain.detach()).sum();
  value.ratio_sum = ratio_value.sum();
  value.mismatch_kl_sum = (ratio_value - 1 - log_ratio.detach()).sum();
  return value;
}

TermBytes term_bytes(ObjectiveKind kind) {
  constexpr int64_t kIndex = 8, kReal = 8, kFlag = 1;
  if (kind == ObjectiveKind::kSft) {
    // Running: the log-probability and its product with the coefficient; or their gradients.
    return {.batch = kIndex + kReal, .graph = 0, .running = 2 * kReal};
  }
  // Graph: ratio, plain and clipped. Running: log-probability, log-ratio and two results; or the gradients of
  // the minimum and of both its sides, one of them on the way, and where they are equal.
  return {.batch = kIndex + 3 * kReal + kFlag, .graph = 3 * kReal, .running = 4 * kReal + 2 * kFlag};
}

}  // namespace espalier
