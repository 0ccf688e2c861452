// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/plan_message.h"

#include <cstdint>
#include <iterator>

#include "espalier/base/check.h"

namespace espalier {
namespace {

constexpr int64_t kFormat = 0x6573'7061'0001;  // "espa", version 1

/// Takes integers off a message one after the other.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> message) : message_(message) {}

  /// The next integer, which has to be in [least, most].
  int64_t take(const char* what, int64_t least, int64_t most) {
    ESPALIER_CHECK(next_ < message_.size(), "plan message: expected {} at integer {}, received its end", what,
                   next_);
    const int64_t value = message_[next_];
    ESPALIER_CHECK(least <= value && value <= most,
                   "plan message: {} at integer {}: expected {} to {}, received {}", what, next_, least, most,
                   value);
    ++next_;
    return value;
  }

  /// A number of things that take `size` integers each.
  int64_t take_count(const char* what, int64_t size) {
    return take(what, 0, (std::ssize(message_) - static_cast<int64_t>(next_)) / size);
  }

  void expect_end() const {
    ESPALIER_CHECK(next_ == message_.size(), "plan message: expected {} integers, received {}", next_,
                   message_.size());
  }

 private:
  std::span<const int64_t> message_;
  size_t next_ = 0;
};

void pack_micro_batch(const MicroBatch& batch, std::vector<int64_t>* message) {
  message->insert(message->end(), {batch.parent, batch.num_tokens, batch.num_pairs, std::ssize(batch.runs)});
  for (const Run& run : batch.runs) message->insert(message->end(), {run.begin, run.end, run.parent});
  message->push_back(std::ssize(batch.trajectories));
  for (const Placement& placement : batch.trajectories) {
    message->insert(message->end(), {placement.trajectory, placement.run});
  }
  message->push_back(std::ssize(batch.context_runs));
  message->insert(message->end(), batch.context_runs.begin(), batch.context_runs.end());
}

MicroBatch take_micro_batch(const Plan& before, const Forest& forest, Reader* message) {
  const auto index = static_cast<int64_t>(before.micro_batches.size());
  MicroBatch batch;
  batch.parent = message->take("parent", -1, index - 1);
  batch.num_tokens = message->take("tokens", 0, INT64_MAX);
  batch.num_pairs = message->take("pairs", 0, INT64_MAX);
  const int64_t num_runs = message->take_count("number of runs", 3);
  for (int64_t run = 0; run < num_runs; ++run) {
    const int64_t begin = message->take("begin of a run", 0, forest.tree_tokens() - 1);
    const int64_t end = message->take("end of a run", begin + 1, forest.tree_tokens());
    batch.runs.push_back({begin, end, message->take("parent of a run", -1, run - 1)});
  }
  const int64_t num_placements = message->take_count("number of trajectories", 2);
  for (int64_t i = 0; i < num_placements; ++i) {
    const int64_t trajectory = message->take("trajectory", 0, forest.num_trajectories() - 1);
    batch.trajectories.push_back({trajectory, message->take("run of a trajectory", 0, num_runs - 1)});
  }
  const int64_t num_context_runs = message->take_count("number of context runs", 1);
  const int64_t runs_of_parent = batch.parent < 0 ? 0 : std::ssize(before.micro_batches[batch.parent].runs);
  for (int64_t i = 0; i < num_context_runs; ++i) {
    batch.context_runs.push_back(message->take("context run", 0, runs_of_parent - 1));
  }
  return batch;
}

}  // namespace

std::vector<int64_t> pack_plan(const Plan& plan) {
  const PlanOptions& options = plan.options;
  std::vector<int64_t> message{kFormat,
                               static_cast<int64_t>(options.strategy),
                               options.token_budget,
                               static_cast<int64_t>(options.checkpoint_activations),
                               options.offload_context,
                               options.memory_budget,
                               std::ssize(plan.micro_batches)};
  for (const MicroBatch& batch : plan.micro_batches) pack_micro_batch(batch, &message);
  return message;
}

Plan unpack_plan(std::span<const int64_t> message, const Forest& forest) {
  Reader reader(message);
  reader.take("format", kFormat, kFormat);
  Plan plan;
  plan.options.strategy =
      static_cast<Strategy>(reader.take("strategy", 0, static_cast<int64_t>(Strategy::kSequencePacking)));
  plan.options.token_budget = reader.take("token budget", 0, INT64_MAX);
  plan.options.checkpoint_activations = static_cast<CheckpointActivations>(
      reader.take("checkpointing", 0, static_cast<int64_t>(CheckpointActivations::kAuto)));
  plan.options.offload_context = reader.take("offloading", 0, 1) == 1;
  plan.options.memory_budget = reader.take("memory budget", 0, INT64_MAX);
  const int64_t num_micro_batches = reader.take_count("number of micro-batches", 6);
  for (int64_t m = 0; m < num_micro_batches; ++m) {
    plan.micro_batches.push_back(take_micro_batch(plan, forest, &reader));
  }
  reader.expect_end();
  return plan;
}

}  // namespace espalier
