// SPDX-License-Identifier: Apache-2.0
// Linear recurrences at every instruction set. Gradients against autograd: tests/ops/chunk_scan.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/error_ratio.h"
#include "tests/ops/kernels/cpu/instruction_sets.h"
#include "tests/ops/kernels/cpu/recurrence/recurrence_problem.h"

namespace espalier::testing {
namespace {

template <class Scalar>
RecurrenceOutcome<Scalar> outcome_at(const RecurrenceRun<Scalar>& run, InstructionSet isa) {
  const ForcedInstructionSet forced(std::string(instruction_set_name(isa)).c_str());
  return outcome_of(run, [](int64_t tasks, const auto& work) { work(0, tasks); });
}

// One head, token by token.
template <class Scalar>
class PlainRecurrence {
 public:
  PlainRecurrence(const RecurrenceRun<Scalar>& run, int64_t head)
      : run_(run), p_(run.problem()), head_(head) {}

  /// Moves a state on by one token and returns S^T (scale q).
  std::vector<Scalar> step(int64_t token, std::vector<Scalar>* state) const {
    const int64_t key_head = head_ / (p_.heads / p_.key_heads);
    const Scalar* q = p_.q + (token * p_.key_heads + key_head) * p_.key_dim;
    const Scalar* k = p_.k + (token * p_.key_heads + key_head) * p_.key_dim;
    const Scalar* v = p_.v + (token * p_.heads + head_) * p_.value_dim;
    const Scalar decay = std::exp(p_.g[token * p_.heads + head_]), beta = p_.beta[token * p_.heads + head_];
    std::vector<Scalar> out(p_.value_dim);
    for (int64_t i = 0; i < p_.value_dim; ++i) {
      const auto at = [&](int64_t d) -> Scalar& { return (*state)[d * p_.value_dim + i]; };
      Scalar old = 0;
      for (int64_t d = 0; d < p_.key_dim; ++d) old += k[d] * (at(d) *= decay);
      const Scalar news = p_.delta ? beta * (v[i] - old) : v[i];
      for (int64_t d = 0; d < p_.key_dim; ++d)
        out[i] += (at(d) += k[d] * news) * static_cast<Scalar>(p_.scale) * q[d];
    }
    return out;
  }

  /// The state that a chunk's path begins with.
  std::vector<Scalar> first(const RecurrenceChunk& chunk) const {
    const int64_t size = p_.key_dim * p_.value_dim;
    std::vector<Scalar> state(size);
    if (chunk.context >= 0)
      std::copy_n(p_.contexts + (chunk.context * p_.heads + head_) * size, size, state.begin());
    return state;
  }

 private:
  const RecurrenceRun<Scalar>& run_;
  RecurrenceProblem<Scalar> p_;
  int64_t head_;
};

/// [T, H, Dv]
template <class Scalar>
std::vector<Scalar> plain_out(const RecurrenceRun<Scalar>& run) {
  using Run = RecurrenceRun<Scalar>;
  std::vector<Scalar> out(run.v.size());
  for (int64_t head = 0; head < Run::kHeads; ++head) {
    const PlainRecurrence<Scalar> plain(run, head);
    std::vector<std::vector<Scalar>> states;
    for (const RecurrenceChunk& chunk : run.forest.chunks) {
      states.push_back(chunk.parent >= 0 ? states[chunk.parent] : plain.first(chunk));
      for (int64_t t = chunk.begin; t < chunk.begin + chunk.size; ++t) {
        const std::vector<Scalar> row = plain.step(t, &states.back());
        std::copy(row.begin(), row.end(), out.begin() + (t * Run::kHeads + head) * Run::kValueDim);
      }
    }
  }
  return out;
}

double relative_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / size);
}

TEST(Recurrence, EqualsThePlainFormAtEveryInstructionSet) {
  for (const bool delta : {true, false}) {
    const RecurrenceRun<double> run(delta, 2);
    const std::vector<double> plain = plain_out(run);
    const RecurrenceOutcome<double> first = outcome_at(run, InstructionSet::kDefault);
    for (const InstructionSet isa : instruction_sets_of_this_machine()) {
      const RecurrenceOutcome<double> outcome = outcome_at(run, isa);
      EXPECT_LE(relative_distance(outcome.out, plain), 1e-13) << instruction_set_name(isa) << " " << delta;
      for (size_t i = 0; i < first.all().size(); ++i) {
        if (first.all()[i]->empty() || (!delta && first.all()[i] == &first.beta)) continue;
        EXPECT_LE(relative_distance(*outcome.all()[i], *first.all()[i]), 1e-12)
            << instruction_set_name(isa) << " " << i;
      }
    }
  }
}

TEST(Recurrence, IsAsGoodAsThePlainFormInFloat32) {
  for (const bool delta : {true, false}) {
    const RecurrenceRun<float> run(delta, 3);
    RecurrenceRun<double> exact(delta, 3);
    const auto upcast = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.end()); };
    exact.q = upcast(run.q);
    exact.k = upcast(run.k);
    exact.v = upcast(run.v);
    exact.g = upcast(run.g);
    exact.beta = upcast(run.beta);
    exact.contexts = upcast(run.contexts);
    const std::vector<double> right = plain_out(exact);
    const std::vector<float> plain = plain_out(run);
    for (const InstructionSet isa : instruction_sets_of_this_machine()) {
      const RecurrenceOutcome<float> outcome = outcome_at(run, isa);
      SquaredErrors errors;
      for (size_t i = 0; i < right.size(); ++i) errors.add(outcome.out[i], plain[i], right[i]);
      EXPECT_TRUE(at_most_twice_the_plain_error(errors, {kFloat32Roundoff}))
          << instruction_set_name(isa) << " " << delta;
    }
  }
}

}  // namespace
}  // namespace espalier::testing
