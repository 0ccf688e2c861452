// SPDX-License-Identifier: Apache-2.0
// espalier train: the main job.
#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/folder_lock.h"
#include "espalier/base/json_file.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/help_format.h"
#include "espalier/cli/lora_flags.h"
#include "espalier/cli/mix_flags.h"
#include "espalier/cli/output.h"
#include "espalier/cli/plan_table.h"
#include "espalier/cli/progress.h"
#include "espalier/cli/run_lines.h"
#include "espalier/cli/signals.h"
#include "espalier/cli/step_gains.h"
#include "espalier/cli/toml_config.h"
#include "espalier/cli/validators.h"
#include "espalier/engine/order.h"
#include "espalier/measure/kept_products.h"
#include "espalier/model/weights.h"
#include "espalier/objective/signal.h"
#include "espalier/ops/checks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/plan/cost_model_file.h"
#include "espalier/train/reference.h"
#include "espalier/train/resume.h"
#include "espalier/train/trainer.h"

namespace espalier::cli {
namespace {

// Distinct from failure (1) and bad usage (2), so that a scheduler can tell a preempted run and start it
// again.
constexpr int kStoppedExitCode = 3;

constexpr const char* kMixFile = "mix.toml";  // of a run, beside its config.toml

StopRequest stop{.exit_code = kStoppedExitCode};

struct TrainArguments {
  DataFlags data;
  MixFlags mix;
  PlanFlags plan;
  ObjectiveFlags objective;
  DeviceFlags device;
  LoraFlags lora;
  TrainOptions train;
  OptimizerFlags optimizer;
  std::string model, reference_model, out, dtype = "float32", save_dtype, shuffle = "none";
  std::string profile;
  std::vector<std::string> eval_data;  // names and patterns
  EvaluationOptions evaluation;
  bool dry_run = false;

  /// --data's flags, for the files of --eval-data.
  DataFlags held_out_data() const {
    DataFlags flags = data;
    flags.data = eval_data;
    flags.limit = 0;
    return flags;
  }
};

ModelUse use_of(const TrainArguments& flags, const MixedData& data, at::Device device) {
  const DecoderConfig config = read_config(flags.model);
  return {.config = config,
          .dtype = parse_dtype(flags.dtype),
          .device = device,
          .optimizer = parse_optimizer(flags.optimizer.optimizer),
          .objective = flags.objective.options(),
          .mix = data.sources,
          .lora = flags.lora.trained(config),
          .ref_topk = data.trajectories.ref_topk};
}

/// The file that a run which goes on keeps of how it began; nothing where there is none.
std::optional<std::filesystem::path> kept_cost_model(const TrainArguments& flags) {
  const std::filesystem::path file = std::filesystem::path(flags.out) / kCostModelFile;
  return flags.train.resume && std::filesystem::exists(file) ? std::optional(file) : std::nullopt;
}

/// What `read` gives. Throws InputError with the cure where the file is damaged.
template <class Read>
auto read_kept(const std::filesystem::path& file, const Read& read) {
  try {
    ESPALIER_CHECK(nlohmann::json::accept(read_text(file)), "{}: expected JSON, received a damaged file",
                   file.string());
    return read(file);
  } catch (const InputError& error) {
    throw InputError(fmt::format(
        "--resume: {}; the run keeps there what its plans and matrix products were chosen by: put the file "
        "back, or remove it to go on as the flags and this machine choose, which may change the "
        "last bits of the weights",
        error.what()));
  }
}

// A run goes on with the matrix products that it began with, whatever this machine would take: others give
// other bits.
void restore_products(const TrainArguments& flags, at::Device device) {
  const auto kept = kept_cost_model(flags);
  if (!kept || !device.is_cpu()) return;
  const auto products = read_kept(*kept, read_products);
  if (!products) return;
  const ProductChoice own = product_choice(), taken = with_environment(*products);
  if (taken != own) {
    log_line("matrix products: {}, as when the run began; this machine would choose {}", to_string(taken),
             to_string(own));
  }
  set_product_choice(taken);
}

/// Rows of all sources come together in the steps of a mix, unless something else is asked for.
std::string shuffle_of(const TrainArguments& flags, const CLI::App& command) {
  const bool is_given = command.get_option("--shuffle")->count() > 0;
  return flags.mix.file.empty() || is_given ? flags.shuffle : to_string(Shuffle::kGroups);
}

TrainOptions options_of(const TrainArguments& flags, const MixedData& data, at::Device device) {
  TrainOptions options = flags.train;
  options.device = device;
  options.model = flags.model;
  options.out = flags.out;
  options.dtype = parse_dtype(flags.dtype);
  options.lora = flags.lora.options();
  options.adapter = flags.lora.adapter;
  const at::ScalarType trained =
      options.trains_adapter() ? detail::accumulator_dtype(options.dtype) : options.dtype;
  options.save_dtype = flags.save_dtype.empty() ? trained : parse_dtype(flags.save_dtype);
  options.objective = flags.objective.options();
  options.mix = data.sources;
  flags.optimizer.apply_to(&options);
  options.plan = flags.plan.options(data.trajectories);
  const ModelUse use = use_of(flags, data, device);
  options.costs = flags.plan.costs(use);
  if (const auto kept = kept_cost_model(flags)) {
    TimeModel time = read_kept(*kept, [&](const auto& file) { return read_cost_model(file, use.cost()); });
    if (!flags.plan.cost_model.empty() && time.seconds != options.costs->time.seconds) {
      log_line(
          "note: --cost-model {} is not used: the run goes on by the rates that it began with, those of {}",
          flags.plan.cost_model, kept->string());
    }
    options.costs->time = std::move(time);
  }
  options.predicted_costs =
      flags.plan.measured_costs(use, [](const std::string& text) { log_line("{}", text); });
  return options;
}

// The flags that make the run what it is, without those of one invocation: given back by --config they start
// the same run again.
std::string config_of_the_run(const TrainArguments& flags, const CLI::App& command) {
  nlohmann::ordered_json config = resolved_flags(command);
  if (flags.mix.file.empty()) {
    config["data"] = flags.data.resolved();
    if (!flags.eval_data.empty()) config["eval-data"] = flags.held_out_data().resolved();
    const nlohmann::ordered_json objective = flags.objective.resolved();
    for (const auto& [name, value] : objective.items()) config[name] = value;
  } else {
    config["shuffle"] = shuffle_of(flags, command);
    config["mix"] = (std::filesystem::path(flags.out) / kMixFile).string();
    for (const std::string& name : ObjectiveFlags::names()) config.erase(name);
  }
  for (const char* each : {"resume", "dry-run"}) config.erase(each);
  return to_toml(config);
}

/// What the run keeps in its folder.
std::vector<RunFile> files_of_the_run(const TrainArguments& flags, const TrainOptions& options,
                                      const std::string& mix, const CLI::App& command) {
  std::vector<RunFile> files{{"config.toml", config_of_the_run(flags, command)}};
  if (!mix.empty()) files.push_back({kMixFile, mix});
  nlohmann::ordered_json cost_model = cost_model_json(options.costs->time);
  if (options.device.is_cpu()) add_products(product_choice(), &cost_model);
  files.push_back({kCostModelFile, cost_model.dump(2) + "\n"});
  return files;
}

void print_dry_run(const TrainArguments& flags, const TrainOptions& options, const Trajectories& trajectories,
                   const CLI::App& command) {
  const ModelCost& cost = options.predicted_costs->time.cost;
  print_output("# resolved config\n{}\n", printable_lines(config_of_the_run(flags, command)));
  const auto batches = epoch_batches(trajectories, options, 0);
  print_output("# plan: {} of {} at most; the first step:\n",
               count_of(total_steps(trajectories, options), "step", "steps"),
               count_of(static_cast<int64_t>(batches.front().size()), "trajectory", "trajectories"));
  double seconds = 0, largest = 0;
  StepFlops flops;
  const Loss loss = make_loss(trajectories, options.objective, options.mix);
  for (const std::vector<int64_t>& rows : batches) {
    const Step step =
        make_step(trajectories, rows,
                  {options.plan, options.objective, &*options.costs, TermChoice::kWithLoss, options.mix});
    const StepPrediction prediction = predict_step(
        *options.predicted_costs, step, needs_logprob_pass(step, loss) || needs_routing_pass(step, loss));
    if (&rows == &batches.front()) {
      const PlanTable table{
          .forest = &step.forest, .plan = &step.plan, .prediction = &prediction, .max_rows = 20};
      print_output("{}", table.text());
    }
    seconds += prediction.total_seconds();
    largest = std::max(largest, prediction.largest_peak_bytes());
    flops.add(cost, step);
  }
  print_output("\n# predicted memory: {}, of which {} for weights, gradients and optimizer\n",
               human_bytes(largest), human_bytes(resident_bytes(options.predicted_costs->memory)));
  print_output("# predicted time: {:.1f} s for forward and backward of an epoch{}\n", seconds,
               options.predicted_costs->time.calibrated ? "" : " (by built-in rates)");
  print_output(
      "# predicted speed-up, at most: {:.3g} TFLOP an epoch; {:.3g} by append-only merging, {:.3g} by "
      "sequence packing\n{}",
      flops.plan / 1e12, flops.append_only / 1e12, flops.sequence_packing / 1e12, gains_lines(flops.gains()));
}

void print_evaluations(const HeldOut& held_out, const TrainOptions& options) {
  const Evaluator evaluator(held_out, options);
  const Step& step = evaluator.step();
  print_output("# evaluation {}: {}, {} from {} encoded in {}\n",
               held_out.options.every > 0
                   ? fmt::format("every {} and at the end", count_of(held_out.options.every, "step", "steps"))
                   : "at the end",
               count_of(held_out.trajectories.num_rows(), "trajectory", "trajectories"),
               count_of(step.flat_tokens(), "flat token", "flat tokens"), with_commas(step.plan.num_tokens()),
               count_of(std::ssize(step.plan.micro_batches), "micro-batch", "micro-batches"));
}

/// Transformers adds the load-balancing loss where config.json says so; here a flag does.
void note_router_losses(const TrainArguments& flags) {
  const auto config = read_json_file<nlohmann::json>(std::filesystem::path(flags.model) / "config.json");
  if (config.value("output_router_logits", nlohmann::json()) != true ||
      flags.objective.router_aux_loss_coef != 0)
    return;
  log_line(
      "note: config.json sets output_router_logits, by which Transformers adds the load-balancing loss; here "
      "--router-aux-loss-coef {} does",
      config.value("router_aux_loss_coef", nlohmann::json(0.001)).dump());
}

void warn_of_warmup(const TrainOptions& options, int64_t steps) {
  if (options.warmup_steps < steps) return;
  log_line("warning: --warmup-steps {} is not below the {} of the run: the learning rate stays below {}",
           options.warmup_steps, count_of(steps, "step", "steps"), options.learning_rate);
}

void check_evaluation_flags(const TrainArguments& flags) {
  const EvaluationOptions& evaluation = flags.evaluation;
  const char* without_rows = !flags.eval_data.empty()    ? nullptr
                             : evaluation.every > 0      ? "eval-every"
                             : evaluation.keep_best      ? "keep-best"
                             : evaluation.early_stop > 0 ? "early-stop"
                                                         : nullptr;
  ESPALIER_CHECK(without_rows == nullptr, "--{}: expected --eval-data FILE beside it", without_rows);
  ESPALIER_CHECK(flags.eval_data.empty() || flags.mix.file.empty(),
                 "--eval-data: expected no --mix beside it: held-out rows are evaluated by one --objective");
  ESPALIER_CHECK(evaluation.early_stop == 0 || evaluation.every > 0,
                 "--early-stop {}: expected --eval-every N beside it; without it the only evaluation is that "
                 "of the end",
                 evaluation.early_stop);
}

void check_reference_flag(const TrainArguments& flags) {
  ESPALIER_CHECK(
      flags.reference_model.empty() || flags.mix.file.empty(),
      "--reference-model: expected no --mix beside it: give the rows of its sources `ref_logprobs` "
      "(docs/objectives.md)");
}

/// What rows are read for. The objective judges them when they have what a reference model gives them.
DataUse use_of_rows(const TrainArguments& flags) {
  DataUse use = data_use_of(flags.model, flags.objective.options());
  if (!flags.reference_model.empty()) use.objective.reset();
  return use;
}

/// Rows that are evaluated; none without --eval-data.
std::optional<HeldOut> read_held_out(const TrainArguments& flags) {
  if (flags.eval_data.empty()) return std::nullopt;
  return HeldOut{flags.held_out_data().read(use_of_rows(flags)), flags.evaluation};
}

/// Throws InputError for what the objective lacks beside the reference's log-probabilities, which stand as
/// zeros afterwards: so that nobody waits for them in vain.
void check_with_reference(const Reference& reference, const TrainArguments& flags, const DataFlags& data,
                          Trajectories* rows) {
  const ObjectiveOptions objective = flags.objective.options();
  check_reference(reference, read_config(flags.model), objective, *rows, data.title());
  rows->ref_logprobs = {RealColumn(Column<float>(std::vector<float>(rows->num_tokens()))), {}};
  const Loss loss(*rows, objective);
}

void compute_reference(const Reference& reference, const KeptReference& kept,
                       const ObjectiveOptions& objective, Trajectories* rows) {
  Progress progress("reference");
  rows->ref_logprobs = {};
  const bool was_kept =
      add_reference_logprobs(reference,
                             {.file = kept.file,
                              .trained_hash = kept.trained_hash,
                              .progress =
                                  [&](int64_t done, int64_t total) {
                                    progress.update(static_cast<double>(done) / static_cast<double>(total),
                                                    fmt::format("micro-batch {}/{}", done, total));
                                  },
                              .note = [&](const std::string& text) { progress.line(text); }},
                             rows);
  progress.line(fmt::format("reference: log-probabilities of {} {} {}",
                            count_of(rows->num_rows(), "trajectory", "trajectories"),
                            was_kept ? "from" : "computed, kept in", kept.file.string()));
  for (const std::string& text : signal_warnings(Loss(*rows, objective))) progress.line("warning: " + text);
}

/// Gives the rows, and those that are evaluated, the log-probabilities of --reference-model.
void add_reference(const TrainArguments& flags, const TrainOptions& options, Trajectories* rows,
                   std::optional<HeldOut>* held_out) {
  const Reference reference{flags.reference_model, options.dtype, options.device, options.plan};
  check_with_reference(reference, flags, flags.data, rows);
  if (*held_out) check_with_reference(reference, flags, flags.held_out_data(), &(*held_out)->trajectories);
  if (flags.dry_run) return;
  std::filesystem::create_directories(options.out);
  const FolderLock lock(options.out, {});  // what another run keeps there stays as it is
  check_not_begun(options);
  stop_on_signals(&stop);
  compute_reference(reference,
                    {.file = options.out / "ref_logprobs.safetensors",
                     .trained_hash = trained_column_hash(options.out, "ref_logprobs")},
                    options.objective, rows);
  if (*held_out) {
    compute_reference(reference, {.file = options.out / "ref_logprobs_eval.safetensors"}, options.objective,
                      &(*held_out)->trajectories);
  }
}

void run_train(const TrainArguments& flags, const CLI::App& command, int* exit_code) {
  ESPALIER_CHECK(flags.train.profile_step == 0 || !flags.profile.empty(),
                 "--profile-step {}: expected --profile FILE beside it", flags.train.profile_step);
  flags.mix.check(command, flags.data);
  check_evaluation_flags(flags);
  check_reference_flag(flags);
  const at::Device device = flags.device.open();
  restore_products(flags, device);
  std::optional<Profiler> profiler;
  if (!flags.profile.empty() && !flags.dry_run) profiler.emplace(flags.profile, device);
  MixedData data;
  if (flags.mix.file.empty()) {
    data.trajectories = flags.data.read(use_of_rows(flags));
  } else {
    data = flags.mix.read(flags.model, flags.data);
  }
  Trajectories& trajectories = data.trajectories;
  std::optional<HeldOut> held_out = read_held_out(flags);
  const std::string mix = flags.mix.file.empty() ? "" : flags.mix.resolved();
  note_carried_tensors(flags.model);
  TrainOptions options = options_of(flags, data, device);
  options.shuffle = parse_shuffle(shuffle_of(flags, command));
  options.profiler = profiler ? &*profiler : nullptr;
  warn_of_warmup(options, total_steps(trajectories, options));
  TrainEvents events;
  events.files = files_of_the_run(flags, options, mix, command);
  note_router_losses(flags);
  if (const std::string text = uneven_steps_note(trajectories, options); !text.empty()) log_line("{}", text);
  if (!flags.reference_model.empty()) add_reference(flags, options, &trajectories, &held_out);
  if (flags.dry_run) {
    if (!mix.empty()) print_output("# resolved mix\n{}\n", printable_lines(mix));
    print_dry_run(flags, options, trajectories, command);
    if (held_out) print_evaluations(*held_out, options);
    return;
  }
  const ModelUse use = use_of(flags, data, device);
  std::filesystem::create_directories(options.out);
  stop_on_signals(&stop);

  Progress progress("train");
  int64_t total = 0, first = 0;
  events.note = [&](const std::string& text) { progress.line(text); };
  events.started = [&](int64_t total_steps, int64_t resumed_step) {
    total = total_steps;
    first = resumed_step;
    if (first > 0) progress.line(fmt::format("resuming after step {}", first));
    if (first < total) stop.step = first + 1;
  };
  events.micro_batch = [&](int64_t step, int64_t done, int64_t of) {
    const double steps_done =
        static_cast<double>(step - 1 - first) + static_cast<double>(done) / static_cast<double>(of);
    progress.update(steps_done / static_cast<double>(total - first),
                    fmt::format("step {}/{}, micro-batch {}/{}", step, total, done, of));
  };
  std::string plan;  // of the first step, once it is done
  const std::filesystem::path plan_file = options.out / "plan.txt";
  const auto write_plan = [&] {
    try {
      write_text(plan_file, plan);
    } catch (const InputError& error) {  // a table to look at is no reason to end the run
      plan.clear();
      progress.line(fmt::format("warning: {}", error.what()));
    }
  };
  events.step = [&](int64_t step, const nlohmann::ordered_json& metrics) {
    if (!plan.empty() && !std::filesystem::exists(plan_file)) write_plan();
    progress.line(step_line(step, total, metrics));
    if (step < total && !stop.requested) stop.step = step + 1;
    if (step == first + 2) {  // the first one is slower
      flags.plan.judge_calibration(use, metrics["predicted_seconds"], metrics["micro_batch_seconds"],
                                   events.note);
    }
  };
  events.evaluating = [&](int64_t step, int64_t done, int64_t of) {
    if (!stop.requested) stop.step = step;  // an evaluation is left where it is
    progress.update(
        static_cast<double>(step - first) / static_cast<double>(std::max<int64_t>(1, total - first)),
        fmt::format("evaluation after step {}/{}, micro-batch {}/{}", step, total, done, of));
  };
  events.evaluated = [&](int64_t step, const nlohmann::ordered_json& values, const EvaluationState& state) {
    progress.line(evaluation_line(step, total, values, state));
    if (step < total && !stop.requested) stop.step = step + 1;
  };
  events.predicted = [&](const Step& step, const StepPrediction& prediction, const StepResult& result) {
    const PlanTable table{
        .forest = &step.forest, .plan = &step.plan, .prediction = &prediction, .measured = &result};
    plan = table.text();
    write_plan();
    progress.line(fmt::format(
        "micro-batches: predicted {:.2f} s and {}, measured {:.2f} s and {}; see {}",
        prediction.total_seconds(), human_bytes(prediction.largest_peak_bytes()), result.measured_seconds(),
        human_bytes(static_cast<double>(result.measured_peak_bytes())), plan_file.string()));
  };
  bool saved = false;
  events.saved = [&](const std::filesystem::path& folder) {
    saved = true;
    progress.line("saved " + folder.string());
  };
  if (!train(trajectories, options, events, &stop.requested, held_out ? &*held_out : nullptr)) {
    progress.line(fmt::format("stopped by a signal {}; continue with --resume",
                              saved ? "after saving" : "before a step was done"));
    *exit_code = kStoppedExitCode;
  }
}

void add_run_flags(CLI::App* command, TrainArguments* flags) {
  const HelpGroup group(command, "Run");
  command
      ->add_option("--out", flags->out,
                   "Folder of the run: config.toml, plan.txt (the first step's micro-batches, predicted and "
                   "measured), metrics.jsonl, TensorBoard events, checkpoints/")
      ->type_name("DIR")
      ->required();
  command->add_flag(
      "--resume", flags->train.resume,
      "Continue from the newest checkpoint in --out, bitwise identical to a run without the "
      "interruption, unless --device, --learning-rate or, with --scheduler linear or cosine, the "
      "number of steps changes, which is allowed");
  command->add_option("--save-every", flags->train.save_every, "Steps between checkpoints (0: only the last)")
      ->check(whole_from(0))
      ->capture_default_str();
  command
      ->add_option("--save-dtype", flags->save_dtype,
                   "Precision of saved weights, if it differs from --dtype; of saved adapters, if it differs "
                   "from that of training, which is float32 beside a bfloat16 model")
      ->check(CLI::IsMember(dtype_names()));
  command->add_flag(
      "--dry-run", flags->dry_run,
      "Print the resolved config, the plan, the predicted memory and speed-up, and write nothing");
}

void add_step_flags(CLI::App* command, TrainArguments* flags) {
  const HelpGroup group(command, "Steps");
  TrainOptions& train = flags->train;
  command
      ->add_option("--steps", train.steps,
                   "Optimiser steps (0: as many as --epochs need). With --scheduler linear or cosine the "
                   "learning rate falls to 0 at the last one, so another number on --resume changes the rate "
                   "of all steps from there on")
      ->check(whole_from(0))
      ->capture_default_str();
  command->add_option("--epochs", train.epochs, "Passes over the data, if --steps is 0")
      ->check(whole_from(1))
      ->capture_default_str();
  command
      ->add_option(
          "--batch-size", train.batch_size,
          "Trajectories per optimiser step (0: all); about as many where rows have a group_id, because "
          "groups stay whole")
      ->check(whole_from(0))
      ->capture_default_str();
  command
      ->add_option("--shuffle", flags->shuffle,
                   "none: file order, each group where its first row stands; groups: groups in random order, "
                   "each kept whole (the default with --mix); rows: trajectories in random order, which "
                   "splits groups")
      ->check(CLI::IsMember(shuffle_names()))
      ->capture_default_str();
  command
      ->add_option("--seed", train.seed,
                   "Seed of the shuffle, which depends only on seed and epoch, and of new adapters")
      ->capture_default_str();
}

void add_reference_model(CLI::App* command, TrainArguments* flags) {
  const HelpGroup group(command, kObjectiveGroup);
  command
      ->add_option(
          "--reference-model", flags->reference_model,
          "Model folder of a reference or teacher of the same vocabulary: compute ref_logprobs of all "
          "rows with it before training begins, in --dtype on --device, for rows that have none. They "
          "are kept in --out and used again by --resume. Not with --mix")
      ->type_name("DIR");
}

void add_evaluation_flags(CLI::App* command, TrainArguments* flags) {
  const HelpGroup group(command, "Evaluation");
  EvaluationOptions& evaluation = flags->evaluation;
  command
      ->add_option(
          "--eval-data", flags->eval_data,
          "Rows that the run is not trained on, files as for --data: their loss by --objective, over "
          "all of them as over one step, goes to metrics.jsonl as records of its own. Not with --mix")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("FILE");
  command
      ->add_option("--eval-every", evaluation.every,
                   "Steps between evaluations (0: none but the one after the last step)")
      ->check(whole_from(0))
      ->capture_default_str();
  command->add_flag("--keep-best", evaluation.keep_best,
                    "Keep the checkpoint with the lowest evaluation loss as OUT/checkpoints/best");
  command
      ->add_option(
          "--early-stop", evaluation.early_stop,
          "End the run, saved as at its end, after so many evaluations in a row without a lower loss "
          "(0: never)")
      ->check(whole_from(0))
      ->capture_default_str();
}

void add_profile_flags(CLI::App* command, TrainArguments* flags) {
  const HelpGroup group(command, kOutputGroup);
  add_profile(command, &flags->profile, "one step");
  command
      ->add_option("--profile-step", flags->train.profile_step,
                   "Number of the step to profile (0: the second, or the only one, because the first also "
                   "allocates memory)")
      ->check(whole_from(0))
      ->capture_default_str();
}

void add_flags(CLI::App* command, TrainArguments* flags) {
  add_model(command, &flags->model)->required();
  flags->data.add(command, /*required=*/false);
  flags->mix.add(command);
  add_run_flags(command, flags);
  flags->objective.add(command);
  add_reference_model(command, flags);
  add_step_flags(command, flags);
  add_evaluation_flags(command, flags);
  flags->optimizer.add(command, /*schedules=*/true);
  flags->lora.add(command);
  flags->plan.add(command);
  flags->device.add(command, /*trains=*/true);
  add_dtype(command, &flags->dtype,
            "Precision of training (bfloat16: with float32 master weights and gradient sums)");
  add_freeze_pad_embedding(command, &flags->train.freeze_pad_embedding);
  add_threads(command);
  add_profile_flags(command, flags);
  add_config(command);
}

}  // namespace

void add_train(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model on trajectories; shared prefixes are encoded once");
  command->footer(
      "The last checkpoint is OUT/checkpoints/step_N, a Hugging Face folder; with --lora-rank a folder of "
      "PEFT, "
      "which `espalier merge` adds to the weights. On Ctrl-C (SIGINT), SIGTERM and "
      "SIGHUP the run finishes its step, saves and exits with status 3; a second Ctrl-C ends it at once. "
      "--resume continues from the newest checkpoint that is whole. After an error in a later step, the run "
      "saves what is done and exits with status 1.\n\nExample:\n"
      "  espalier train --model DIR --data rows.jsonl --out runs/a --steps 100 --batch-size 64 "
      "--memory-budget 16GiB");
  auto flags = std::make_shared<TrainArguments>();
  add_flags(command, flags.get());
  command->callback([flags, command, exit_code] { run_train(*flags, *command, exit_code); });
}

}  // namespace espalier::cli
