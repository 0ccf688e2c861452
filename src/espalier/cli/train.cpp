// espalier train: the main job.
#include <csignal>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/plan_table.h"
#include "espalier/cli/progress.h"
#include "espalier/cli/toml_config.h"
#include "espalier/model/weights.h"
#include "espalier/train/trainer.h"

namespace espalier::cli {
namespace {

// Distinct from failure (1) and bad usage (2), so that a scheduler can tell a preempted run and start it
// again.
constexpr int kStoppedExitCode = 3;

std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // it is set from a signal handler

struct Flags {
  DataFlags data;
  PlanFlags plan;
  ObjectiveFlags objective;
  DeviceFlags device;
  TrainOptions train;
  std::string model, out, dtype = "float32", save_dtype, optimizer = "adamw", scheduler = "constant",
                          shuffle = "none";
  std::string profile;
  bool dry_run = false;
};

ModelUse use_of(const Flags& flags, at::Device device) {
  return {.config = read_config(flags.model),
          .dtype = parse_dtype(flags.dtype),
          .device = device,
          .optimizer = parse_optimizer(flags.optimizer),
          .objective = flags.objective.options().kind};
}

TrainOptions options_of(const Flags& flags, const Trajectories& trajectories, at::Device device,
                        const CLI::App& command) {
  TrainOptions options = flags.train;
  options.device = device;
  options.model = flags.model;
  options.out = flags.out;
  options.dtype = parse_dtype(flags.dtype);
  options.save_dtype = flags.save_dtype.empty() ? options.dtype : parse_dtype(flags.save_dtype);
  options.objective = flags.objective.options();
  options.optimizer.kind = parse_optimizer(flags.optimizer);
  options.plan = flags.plan.options(trajectories);
  options.costs = flags.plan.costs(use_of(flags, device),
                                   [](const std::string& text) { fmt::print(stderr, "{}\n", text); });
  options.scheduler = parse_scheduler(flags.scheduler);
  options.shuffle = parse_shuffle(flags.shuffle);
  options.config = resolved_flags(command);
  return options;
}

void print_dry_run(const Flags& flags, const TrainOptions& options, const Trajectories& trajectories) {
  const DecoderConfig config = read_config(flags.model);
  fmt::print("# resolved config\n{}\n", to_toml(options.config));
  const auto batches = epoch_batches(trajectories, options, 0);
  fmt::print("# plan: {} steps of {} trajectories at most; the first step:\n",
             total_steps(trajectories, options), with_commas(static_cast<int64_t>(batches.front().size())));
  double flat_flops = 0, plan_flops = 0, seconds = 0, largest = 0;
  for (const std::vector<int64_t>& rows : batches) {
    const Step step = make_step(trajectories, rows, options.plan, options.objective, &*options.costs);
    const StepPrediction prediction = predict_step(*options.costs, step);
    if (&rows == &batches.front()) {
      const PlanTable table{
          .forest = &step.forest, .plan = &step.plan, .prediction = &prediction, .max_rows = 20};
      fmt::print("{}", table.text());
    }
    seconds += prediction.total_seconds();
    largest = std::max(largest, prediction.largest_peak_bytes());
    flat_flops += step_flops(model_shape(config), flat_work(step)).total();
    plan_flops += step_flops(model_shape(config), plan_work(step)).total();
  }
  fmt::print("\n# predicted memory: {}, of which {} for weights, gradients and optimizer\n",
             human_bytes(largest), human_bytes(resident_bytes(options.costs->memory)));
  fmt::print("# predicted time: {:.1f} s for forward and backward of an epoch{}\n", seconds,
             options.costs->time.calibrated ? "" : " (by assumed rates)");
  fmt::print(
      "# predicted speed-up over sequence packing: {:.2f}x at most ({:.3g} TFLOP an epoch instead of "
      "{:.3g})\n",
      flat_flops / plan_flops, plan_flops / 1e12, flat_flops / 1e12);
}

std::string step_line(int64_t step, int64_t total, const nlohmann::ordered_json& metrics) {
  std::string line = fmt::format(
      "step {}/{}  loss {:.6g}  grad norm {:.4g}  lr {:.3g}  {} tree tokens/s  {} flat tokens/s  {:.2f} s",
      step, total, metrics["loss"].get<double>(), metrics["grad_norm"].get<double>(),
      metrics["learning_rate"].get<double>(),
      with_commas(std::llround(metrics["tree_tokens_per_second"].get<double>())),
      with_commas(std::llround(metrics["flat_tokens_per_second"].get<double>())),
      metrics["seconds"].get<double>());
  if (metrics.contains("clip_fraction")) {
    line += fmt::format("  clipped {:.3f}  ratio {:.4f}", metrics["clip_fraction"].get<double>(),
                        metrics["ratio_mean"].get<double>());
  }
  return line;
}

void run(const Flags& flags, const CLI::App& command, int* exit_code) {
  const at::Device device = flags.device.open();
  std::optional<Profiler> profiler;
  if (!flags.profile.empty() && !flags.dry_run) profiler.emplace(flags.profile, device);
  const Trajectories trajectories = flags.data.read(vocab_size_of(flags.model));
  TrainOptions options = options_of(flags, trajectories, device, command);
  options.profiler = profiler ? &*profiler : nullptr;
  if (flags.dry_run) {
    print_dry_run(flags, options, trajectories);
    return;
  }
  const ModelUse use = use_of(flags, device);
  std::filesystem::create_directories(options.out);
  std::signal(SIGINT, [](int) { stop_requested = true; });
  std::signal(SIGTERM, [](int) { stop_requested = true; });

  Progress progress("train");
  int64_t total = 0, first = 0;
  TrainEvents events;
  events.note = [&](const std::string& text) { progress.line(text); };
  events.started = [&](int64_t total_steps, int64_t resumed_step) {
    total = total_steps;
    first = resumed_step;
    write_text(options.out / "config.toml", to_toml(options.config));
    if (first > 0) progress.line(fmt::format("resuming after step {}", first));
  };
  events.micro_batch = [&](int64_t step, int64_t done, int64_t of) {
    const double steps_done =
        static_cast<double>(step - 1 - first) + static_cast<double>(done) / static_cast<double>(of);
    progress.update(steps_done / static_cast<double>(total - first),
                    fmt::format("step {}/{}, micro-batch {}/{}", step, total, done, of));
  };
  events.step = [&](int64_t step, const nlohmann::ordered_json& metrics) {
    progress.line(step_line(step, total, metrics));
    if (step == first + 2) {  // the first one is slower
      flags.plan.judge_calibration(use, metrics["predicted_seconds"], metrics["micro_batch_seconds"],
                                   events.note);
    }
  };
  events.predicted = [&](const Step& step, const StepPrediction& prediction, const StepResult& result) {
    const PlanTable table{
        .forest = &step.forest, .plan = &step.plan, .prediction = &prediction, .measured = &result};
    write_text(options.out / "plan.txt", table.text());
    progress.line(fmt::format(
        "micro-batches: predicted {:.2f} s and {}, measured {:.2f} s and {}; see {}",
        prediction.total_seconds(), human_bytes(prediction.largest_peak_bytes()), result.measured_seconds(),
        human_bytes(static_cast<double>(result.measured_peak_bytes())), (options.out / "plan.txt").string()));
  };
  events.saved = [&](const std::filesystem::path& folder) { progress.line("saved " + folder.string()); };
  if (!train(trajectories, options, events, &stop_requested)) {
    progress.line("stopped by a signal after saving; continue with --resume");
    *exit_code = kStoppedExitCode;
  }
}

void add_flags(CLI::App* command, Flags* flags) {
  add_model(command, &flags->model)->required();
  flags->data.add(command);
  command
      ->add_option("--out", flags->out,
                   "Folder of the run: config.toml, plan.txt (the first step's micro-batches, predicted and "
                   "measured), metrics.jsonl, TensorBoard events, checkpoints/")
      ->required();
  add_config(command);
  flags->objective.add(command);
  flags->plan.add(command);
  flags->device.add(command, /*trains=*/true);
  add_dtype(command, &flags->dtype,
            "Precision of training (bfloat16: with float32 master weights and gradient sums)");
  command->add_option("--save-dtype", flags->save_dtype, "Precision of saved weights, if other than --dtype")
      ->check(CLI::IsMember({"float64", "float32", "bfloat16"}));
  TrainOptions& train = flags->train;
  command->add_option("--optimizer", flags->optimizer, "adamw or sgd (plain, no momentum)")
      ->check(CLI::IsMember({"adamw", "sgd"}))
      ->capture_default_str();
  command->add_option("--learning-rate", train.learning_rate, "Peak learning rate")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--weight-decay", train.optimizer.weight_decay,
                   "Decay of matrices; norms and biases have none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--max-grad-norm", train.optimizer.max_grad_norm, "Clip the global gradient norm (0: off)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--beta1", train.optimizer.beta1, "adamw")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--beta2", train.optimizer.beta2, "adamw")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--eps", train.optimizer.eps, "adamw")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--scheduler", flags->scheduler, "constant, linear or cosine (the latter two fall to 0)")
      ->check(CLI::IsMember({"constant", "linear", "cosine"}))
      ->capture_default_str();
  command->add_option("--warmup-steps", train.warmup_steps, "Steps in which the learning rate rises")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--steps", train.steps, "Optimiser steps (0: as many as --epochs need)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--epochs", train.epochs, "Passes over the file, when --steps is 0")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--batch-size", train.batch_size, "Trajectories per optimiser step (0: the whole file)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--shuffle", flags->shuffle,
                   "none: file order; groups: groups in random order, each kept together; rows: trajectories "
                   "in random order")
      ->check(CLI::IsMember({"none", "groups", "rows"}))
      ->capture_default_str();
  command->add_option("--seed", train.seed, "Of the shuffle; draws depend on seed and epoch only")
      ->capture_default_str();
  command->add_option("--save-every", train.save_every, "Steps between checkpoints (0: only the last)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--resume", train.resume,
                    "Continue from the newest checkpoint in --out, bit for bit; --device may be another");
  auto* profile = add_profile(command, &flags->profile, "one step");
  command
      ->add_option("--profile-step", train.profile_step,
                   "Number of that step (0: the run's second one, or the only one; the first has memory to "
                   "get)")
      ->needs(profile)
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--dry-run", flags->dry_run,
                    "Print the resolved config, the plan, predicted memory and speed-up; write nothing");
  add_threads(command);
}

}  // namespace

void add_train(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model on trajectories, shared prefixes encoded once");
  command->footer(
      "The last checkpoint is OUT/checkpoints/step_N, a Hugging Face folder. SIGINT and SIGTERM save after "
      "the current step "
      "and exit with status 3; --resume continues.\n"
      "Example: espalier train --model DIR --data rows.jsonl --out runs/a --steps 100 --batch-size 64 "
      "--token-budget 8192");
  auto flags = std::make_shared<Flags>();
  add_flags(command, flags.get());
  command->callback([flags, command, exit_code] { run(*flags, *command, exit_code); });
}

}  // namespace espalier::cli
