// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/train_options.h"

#include <array>

#include "espalier/base/option_names.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/train/flags.h"

namespace espalier {
namespace {

constexpr auto kSchedulers = std::to_array<Word<SchedulerKind>>({{"constant", SchedulerKind::kConstant},
                                                                 {"linear", SchedulerKind::kLinear},
                                                                 {"cosine", SchedulerKind::kCosine}});
constexpr auto kShuffles = std::to_array<Word<Shuffle>>(
    {{"none", Shuffle::kNone}, {"groups", Shuffle::kGroups}, {"rows", Shuffle::kRows}});

}  // namespace

void add_run_options(TrainOptions* options, OptionList* list) {
  list->group("Run");
  list->add("out", &options->out,
            "Folder of the run: config.toml, plan.txt (the first step's micro-batches, predicted and "
            "measured), metrics.jsonl, TensorBoard events, checkpoints/",
            {.path = PathKind::kFolder, .required = true});
  list->add(
      "follow", &options->follow,
      "Instead of --data: train on the files that come into this folder while the run goes on, each once. "
      "At most --steps steps, or until the folder has a file `stop`",
      {.path = PathKind::kFolder});
  list->add("follow-files", &options->follow_files,
            "Files that --follow takes together, for steps of --batch-size rows",
            {.least = 1, .most = kMostSteps});
  list->add("resume", &options->resume,
            "Continue from the newest checkpoint in --out, bitwise identical to a run without the "
            "interruption, unless --device, --learning-rate or, with --scheduler linear or cosine, the "
            "number of steps changes, which is allowed");
  list->add("save-every", &options->save_every, "Steps between checkpoints (0: only the last)",
            {.least = 0, .most = kMostSteps});
  list->add(
      "save-in-background", &options->save_in_background,
      "Write checkpoints, but that of the last step, while the next steps go on, from a copy of weights and "
      "optimiser in memory, which --memory-budget includes on a CPU");
  list->add(
      "skip-bad-steps", &options->skip_bad_steps,
      "Leave out the updates of up to N steps of the run whose loss or gradients are not finite, and name "
      "their rows; one more is an error (0: the first is one)",
      {.least = 0, .most = kMostSteps});
  list->add("keep-last", &options->keep_last,
            "Keep only the newest N checkpoints (0: all). An older one is removed when a newer one has been "
            "saved. With 1, --resume has none to fall back to if the newest is damaged later",
            {.least = 0, .most = kMostSteps});
  list->add("keep-every", &options->keep_every,
            "With --keep-last: also keep the checkpoints of steps that are multiples of N (0: none)",
            {.least = 0, .most = kMostSteps});
  list->add("rescue-dir", &options->rescue_dir,
            "Folder of this run alone, on another disk. A checkpoint that cannot be written to --out goes to "
            "DIR/checkpoints/step_N, and --resume with the same DIR continues from there",
            {.path = PathKind::kFolder});
  list->add(
      "publish", &options->publish,
      "Folder for samplers: the weights, or the adapter, after --publish-every steps as DIR/step_N, which "
      "appears complete. The newest two stay",
      {.path = PathKind::kFolder});
  list->add("publish-command", &options->publish_command,
            "Shell command that is run after each publication, with the folder as last argument",
            {.shown = "CMD"});
  list->add("publish-every", &options->publish_every, "Steps between published weights",
            {.least = 1, .most = kMostSteps});
}

void add_step_options(TrainOptions* options, OptionList* list) {
  list->group("Steps");
  list->add("steps", &options->steps,
            "Optimiser steps (0: as many as --epochs need). With --scheduler linear or cosine the "
            "learning rate falls to 0 at the last one, so another number on --resume changes the rate "
            "of all later steps",
            {.least = 0, .most = kMostSteps, .may_change = true});
  list->add("epochs", &options->epochs, "Passes over the data, if --steps is 0",
            {.least = 1, .most = kMostSteps, .may_change = true});
  list->add("batch-size", &options->batch_size,
            "Trajectories per optimiser step (0: all); approximate if rows have a group_id, because groups "
            "stay whole",
            {.least = 0, .most = kMostSteps});
  list->add("shuffle", &options->shuffle, kShuffles,
            "none: file order, each group at the position of its first row; groups: groups in random order, "
            "each kept whole (the default with --mix); rows: trajectories in random order, which "
            "splits groups");
  list->add("seed", &options->seed,
            "Seed of the shuffle, which depends only on seed and epoch, and of new adapters");
}

void add_optimizer_options(TrainOptions* options, OptionList* list, bool schedules) {
  OptimizerOptions* optimizer = &options->optimizer;
  list->group("Optimiser");
  add_optimizer(&optimizer->kind, list, "adamw or sgd (plain, no momentum)");
  list->add("learning-rate", &options->learning_rate, "Peak learning rate",
            {.least = 0, .most = kLargestLearningRate, .may_change = true});
  if (schedules) {
    list->add("scheduler", &options->scheduler, kSchedulers,
              "constant, linear or cosine (the latter two fall to 0)");
    list->add("warmup-steps", &options->warmup_steps, "Steps over which the learning rate rises",
              {.least = 0, .most = kMostSteps});
  }
  list->add("weight-decay", &optimizer->weight_decay, "Weight decay of matrices (norms and biases have none)",
            {.least = 0});
  list->add("max-grad-norm", &optimizer->max_grad_norm, "Clip the global gradient norm (0: off)",
            {.least = 0});
  if (schedules) {
    list->add("log-grad-norms", &options->log_grad_norms,
              "Report the gradient norm of each kind of module as well, before clipping: "
              "grad_norm/self_attn, grad_norm/mlp and so on",
              {.may_change = true});
  }
  list->add("beta1", &optimizer->beta1, "adamw: decay of the mean of gradients", {.least = 0, .below = 1});
  list->add("beta2", &optimizer->beta2, "adamw: decay of the mean of their squares",
            {.least = 0, .below = 1});
  list->add("eps", &optimizer->eps, "adamw: added to the denominator, above 0", {.above = 0});
}

void add_profile_step(TrainOptions* options, OptionList* list) {
  list->add("profile-step", &options->profile_step,
            "Number of the step to profile (0: the second, or the only one, because the first also "
            "allocates memory)",
            {.least = 0, .most = kMostSteps, .group = kOutputGroup});
}

void check_optimizer_options(const OptimizerOptions& options) {
  TrainOptions copy;
  copy.optimizer = options;
  OptionList list;
  add_optimizer_options(&copy, &list, /*schedules=*/false);
  list.check();
}

void check_train_options(const TrainOptions& options) {
  TrainOptions copy = options;
  OptionList list;
  add_optimizer_options(&copy, &list, /*schedules=*/true);
  add_step_options(&copy, &list);
  add_run_options(&copy, &list);
  add_profile_step(&copy, &list);
  list.check();
  ESPALIER_CHECK(!options.lora || options.adapter.empty(),
                 "{}: expected no {} beside it, which is that of the adapter, received {}", named("adapter"),
                 named("lora-rank"), options.lora->rank);
  if (options.lora) check_lora_options(*options.lora);
  ESPALIER_CHECK(options.keep_every == 0 || options.keep_last > 0,
                 "--keep-every {}: requires --keep-last N; without it all checkpoints are kept",
                 options.keep_every);
  ESPALIER_CHECK(options.publish_command.empty() || !options.publish.empty(),
                 "--publish-command: requires --publish DIR");
  // Each step multiplies weights by 1 - rate * weight_decay; below -1 they would diverge.
  const double rate = options.learning_rate;
  ESPALIER_CHECK(rate * options.optimizer.weight_decay <= 1, "{}: expected at most 1 / {}, {:g}, received {}",
                 named("weight-decay"), named("learning-rate"), 1 / rate, options.optimizer.weight_decay);
  check_objective_options(options.objective);
  if (!options.mix.empty()) check_mix(options.mix);
}

std::optional<LoraOptions> LoraFlags::trained(const DecoderConfig& config) const {
  std::optional<LoraOptions> given = options();
  if (!adapter.empty()) return load_adapter(adapter, config, at::kFloat).options;
  if (given) adapted_maps(config, given->targets);  // throws if there are none
  return given;
}

}  // namespace espalier
