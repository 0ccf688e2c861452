// SPDX-License-Identifier: Apache-2.0
// A random forest in chunks with rows for a linear recurrence, and its results.
#pragma once

#include <vector>

#include "espalier/base/rng.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence.h"
#include "tests/test_seed.h"

namespace espalier::testing {

/// Six heads of two keys: blocks of heads of one key are computed together.
template <class Scalar>
struct RecurrenceRun {
  static constexpr int64_t kKeyHeads = 2, kHeads = 12, kKeyDim = 7, kValueDim = 19, kContexts = 2;

  bool delta;
  Rng rng;
  RecurrenceForest forest;
  std::vector<Scalar> q, k, v, g, beta, contexts;

  RecurrenceRun(bool is_delta, uint64_t seed)
      : delta(is_delta),
        rng(test_seed(seed), 0x6D7),
        forest(random_forest(rng)),
        q(numbers(forest.num_tokens * kKeyHeads * kKeyDim)),
        k(numbers(static_cast<int64_t>(q.size()))),
        v(numbers(forest.num_tokens * kHeads * kValueDim)),
        g(numbers(forest.num_tokens * kHeads)),
        beta(numbers(static_cast<int64_t>(g.size()))),
        contexts(numbers(kContexts * kHeads * kKeyDim * kValueDim)) {
    for (Scalar& x : g) x = -x * x;
    for (Scalar& x : k) x /= 3;
  }

  std::vector<Scalar> numbers(int64_t count) {
    std::vector<Scalar> result(count);
    for (Scalar& x : result) x = static_cast<Scalar>(rng.normal());
    return result;
  }

  RecurrenceProblem<Scalar> problem() const {
    return {.instruction_set = instruction_set(),
            .delta = delta,
            .scale = 0.4,
            .key_heads = kKeyHeads,
            .heads = kHeads,
            .key_dim = kKeyDim,
            .value_dim = kValueDim,
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .g = g.data(),
            .beta = beta.data(),
            .contexts = contexts.data()};
  }

  /// Trees of more tokens than one task has, each chunk beginning somewhere above.
  static RecurrenceForest random_forest(Rng& rng) {
    std::vector<RecurrenceChunk> chunks;
    std::vector<int64_t> ends;
    int64_t tokens = 0;
    for (int64_t c = 0; c < 90; ++c) {
      const int64_t size = rng.between(1, 32);
      const bool is_root = c % 30 == 0;
      chunks.push_back({tokens, size, is_root ? -1 : rng.between(c / 30 * 30, c - 1),
                        is_root ? std::min<int64_t>(c / 30, kContexts) - 1 : -1});
      if (rng.below(4) == 0) ends.push_back(c);
      tokens += size;
    }
    return {std::move(chunks), ends, kContexts, 32};
  }
};

/// Everything that a run writes.
template <class Scalar>
struct RecurrenceOutcome {
  std::vector<Scalar> out, ends, q, k, v, g, beta, contexts;

  bool operator==(const RecurrenceOutcome&) const = default;
  std::vector<const std::vector<Scalar>*> all() const {
    return {&out, &ends, &q, &k, &v, &g, &beta, &contexts};
  }
};

/// `in_parallel(count, work)` calls work(begin, end) on parts of [0, count). Gradients are those of the
/// results with themselves.
template <class Scalar, class InParallel>
RecurrenceOutcome<Scalar> outcome_of(const RecurrenceRun<Scalar>& run, const InParallel& in_parallel) {
  const RecurrenceProblem<Scalar> problem = run.problem();
  const int64_t state = problem.heads * problem.key_dim * problem.value_dim;
  const int64_t blocks = recurrence_blocks(problem.heads / problem.key_heads);
  RecurrenceOutcome<Scalar> to;
  to.out.resize(run.v.size());
  to.ends.resize(run.forest.ends.values.size() * state);
  to.q.resize(blocks * run.q.size());
  to.k.resize(to.q.size());
  to.v.resize(run.v.size());
  to.g.resize(run.g.size());
  to.beta.resize(run.g.size());
  to.contexts.resize(run.contexts.size());
  const int64_t tasks = recurrence_tasks(run.forest, problem);
  in_parallel(tasks, [&](int64_t begin, int64_t end) {
    recurrence_forward(run.forest, problem, {to.out.data(), to.ends.data()}, begin, end);
  });
  const RecurrenceGradients<Scalar> gradients{to.out.data(),  to.ends.data(),    to.q.data(),
                                              to.k.data(),    to.v.data(),       to.g.data(),
                                              to.beta.data(), to.contexts.data()};
  in_parallel(tasks, [&](int64_t begin, int64_t end) {
    recurrence_backward(run.forest, problem, gradients, begin, end);
  });
  return to;
}

}  // namespace espalier::testing
