// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/train_options.h"

#include <cmath>

#include "espalier/base/check.h"

namespace espalier {

void check_train_options(const TrainOptions& options) {
  // Written so that NaN, which is in no range, fails every check.
  const double rate = options.learning_rate;
  ESPALIER_CHECK(rate >= 0 && rate <= kLargestLearningRate,
                 "learning-rate: expected a number from 0 to {:g}, received {}", kLargestLearningRate, rate);
  check_optimizer_options(options.optimizer);
  ESPALIER_CHECK(!options.lora || options.adapter.empty(),
                 "adapter: expected no lora-rank beside it, which is that of the adapter, received {}",
                 options.lora->rank);
  if (options.lora) check_lora_options(*options.lora);
  // Each step takes that part off the weights; more than all of them would turn them round, larger and
  // larger.
  ESPALIER_CHECK(rate * options.optimizer.weight_decay <= 1,
                 "weight-decay: expected at most 1 / learning-rate, {:g}, received {}", 1 / rate,
                 options.optimizer.weight_decay);
  check_objective_options(options.objective);
  if (!options.mix.empty()) check_mix(options.mix);
  const auto count = [](const char* name, int64_t value, int64_t least) {
    ESPALIER_CHECK(value >= least && value <= kMostSteps, "{}: expected a number from {} to {}, received {}",
                   name, least, kMostSteps, value);
  };
  count("steps", options.steps, 0);
  count("epochs", options.epochs, 1);
  count("warmup-steps", options.warmup_steps, 0);
  count("batch-size", options.batch_size, 0);
  count("save-every", options.save_every, 0);
  count("profile-step", options.profile_step, 0);
}

}  // namespace espalier
