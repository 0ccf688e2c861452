// SPDX-License-Identifier: Apache-2.0
// espalier train.
#include <functional>
#include <memory>
#include <optional>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/folder_lock.h"
#include "espalier/base/json_file.h"
#include "espalier/base/messages.h"
#include "espalier/base/units.h"
#include "espalier/commands/command.h"
#include "espalier/commands/config_text.h"
#include "espalier/commands/data_flags.h"
#include "espalier/commands/mix_flags.h"
#include "espalier/commands/plan_summary.h"
#include "espalier/commands/plan_table.h"
#include "espalier/commands/run_record.h"
#include "espalier/commands/train_arguments.h"
#include "espalier/engine/order.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/model_use.h"
#include "espalier/measure/planning.h"
#include "espalier/measure/product_decision.h"
#include "espalier/model/adapter.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/objective/signal.h"
#include "espalier/plan/time_model.h"
#include "espalier/runtime/progress.h"
#include "espalier/train/flags.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/epochs.h"
#include "espalier/train/run/reference.h"
#include "espalier/train/run/resume.h"
#include "espalier/train/run/trainer.h"

namespace espalier::commands {
namespace {

// Distinct from failure (1) and wrong usage (2), so that a scheduler can restart a preempted run.
constexpr int kStoppedExitCode = 3;

constexpr const char* kMixFile = "mix.toml";  // in the run's folder

ModelUse use_of(const TrainArguments& flags, const MixedData& data, at::Device device) {
  const DecoderConfig config = read_config(flags.model);
  const std::optional<LoraOptions> lora = flags.lora.trained(config);
  const at::ScalarType dtype = flags.train.dtype;
  return {.config = config,
          .dtype = dtype,
          .device = device,
          .optimizer_bytes = state_bytes(flags.train, trained_dtype(dtype, lora.has_value()), device),
          .objective = flags.train.objective,
          .mix = data.sources,
          .lora = lora,
          .demand = head_demand(data.trajectories),
          .context_parallel = flags.context_parallel};
}

/// The cost model stored by a run that is resumed or repeated; nullopt if there is none.
std::optional<std::filesystem::path> kept_cost_model(const TrainArguments& flags) {
  if (!flags.train.resume && flags.repeats.empty()) return std::nullopt;
  const std::filesystem::path run = flags.train.resume ? flags.train.out.string() : flags.repeats;
  const std::filesystem::path file = run / kCostModelFile;
  return std::filesystem::exists(file) ? std::optional(file) : std::nullopt;
}

/// Which command reads the files of a run.
const char* reader_of(const TrainArguments& flags) {
  return flags.train.resume ? "--resume" : "rerun";
}

/// The result of `read`. Throws InputError with a remedy if the file is damaged.
template <class Read>
auto read_kept(const char* command, const std::filesystem::path& file, const Read& read) {
  try {
    ESPALIER_CHECK(nlohmann::json::accept(read_text(file)), "{}: expected JSON, received a damaged file",
                   file.string());
    return read(file);
  } catch (const InputError& error) {
    throw InputError(fmt::format(
        "{}: {}; the run stores there the rates and matrix products that it uses: restore the file, or "
        "remove it to use those of the flags and this machine, which may change the last bits of the weights",
        command, error.what()));
  }
}

// A resumed run keeps its implementation of matrix products, because others give different bits.
void restore_products(const TrainArguments& flags, Machine* machine) {
  const auto kept = kept_cost_model(flags);
  if (!kept || !machine->device.is_cpu()) return;
  const auto products = read_kept(reader_of(flags), *kept, read_products);
  if (!products) return;
  const ProductChoice own = machine->kernels.products, stored = with_environment(*products);
  if (stored != own) {
    log_line("matrix products: {}, as when the run began; this machine would choose {}", to_string(stored),
             to_string(own));
  }
  machine->kernels.products = stored;
}

TrainOptions options_of(const TrainArguments& flags, const MixedData& data, const ModelUse& use) {
  TrainOptions options = flags.train;
  options.device = use.device;
  options.model = flags.model;
  options.lora = flags.lora.options();
  options.adapter = flags.lora.adapter;
  const at::ScalarType trained = trained_dtype(options.dtype, options.trains_adapter());
  options.save_dtype = flags.save_dtype.value_or(trained);
  options.mix = data.sources;
  options.plan = flags.planning.options(data.trajectories);
  options.costs = flags.planning.costs(use);
  if (const auto kept = kept_cost_model(flags)) {
    TimeModel time = read_kept(reader_of(flags), *kept,
                               [&](const auto& file) { return read_cost_model(file, use.cost()); });
    const std::string& given = flags.planning.cost_model;
    if (!given.empty() && time.seconds != options.costs->time.seconds) {
      log_line(
          "note: --cost-model {} is not used: the run continues with the rates that it began with, those of "
          "{}",
          given, kept->string());
    }
    options.costs->time = std::move(time);
  }
  // Rank 0 chooses how work is divided and which plans are taken.
  TimeFeatures& seconds = options.costs->time.seconds;
  std::ranges::copy(options.group->from_first(std::vector<double>(seconds.begin(), seconds.end())),
                    seconds.begin());
  options.predicted_costs =
      flags.planning.measured_costs(use, [](const std::string& text) { log_line("{}", text); });
  options.predicted_costs->time = time_of_rank(options.predicted_costs->time, flags.context_parallel);
  return options;
}

// The flags that reproduce the run when given as --config, without those of one invocation.
std::string config_of_the_run(const TrainArguments& flags, const OptionList& list) {
  nlohmann::ordered_json config = resolved_options(list);
  if (flags.mix.file.empty()) {
    if (!flags.data.data.empty()) config["data"] = flags.data.resolved();
    if (!flags.eval_data.empty()) config["eval-data"] = flags.held_out_data().resolved();
  } else {
    config["shuffle"] = list.at("shuffle").value();
    config["mix"] = (flags.train.out / kMixFile).string();
    for (const std::string& name : objective_option_names()) config.erase(name);
  }
  for (const char* flag : {"resume", "dry-run", "repeats"}) config.erase(flag);
  return to_toml(config);
}

/// The files that the run stores in its folder.
std::vector<RunFile> files_of_the_run(const TrainOptions& options, const std::string& config,
                                      const std::string& mix) {
  std::vector<RunFile> files{{"config.toml", config}};
  if (!mix.empty()) files.push_back({kMixFile, mix});
  nlohmann::ordered_json cost_model = cost_model_json(options.costs->time);
  if (options.device.is_cpu()) add_products(product_choice(), &cost_model);
  files.push_back({kCostModelFile, cost_model.dump(2) + "\n"});
  return files;
}

/// What --dry-run says of the first epoch (python/espalier/printed/dry_run.py).
nlohmann::ordered_json epoch_json(const TrainOptions& options, const Trajectories& trajectories) {
  const PlanCosts& costs = *options.predicted_costs;
  const auto batches = epoch_batches(trajectories, options, 0);
  double seconds = 0, largest = 0;
  StepFlops flops;
  nlohmann::ordered_json table;
  const Loss loss = make_loss(trajectories, options.objective, options.mix);
  for (const std::vector<int64_t>& rows : batches) {
    const Step step = make_step(
        trajectories, rows,
        {.plan = options.plan, .objective = options.objective, .costs = &*options.costs, .mix = options.mix});
    const StepPrediction prediction =
        predict_step(costs, step, needs_logprob_pass(step, loss) || needs_routing_pass(step, loss));
    if (table.empty()) table = table_json(step, &prediction, /*measured=*/nullptr, /*max_rows=*/20);
    seconds += prediction.total_seconds();
    largest = std::max(largest, prediction.largest_peak_bytes());
    flops.add(costs.time.cost, step);
  }
  const Gains gains = flops.gains();
  return {{"steps", total_steps(trajectories, options)},
          {"trajectories", batches.front().size()},
          {"first_step", table},
          {"seconds", seconds},
          {"calibrated", costs.time.calibrated},
          {"peak_bytes", largest},
          {"resident_bytes", resident_bytes(costs.memory)},
          {"flops", {flops.plan, flops.append_only, flops.sequence_packing}},
          {"prediction_counts", "FLOPs"},
          {"predicted_speedup_over_sequence_packing", gains.over_packing},
          {"predicted_speedup_over_append_only", gains.over_append_only}};
}

nlohmann::ordered_json evaluation_json(const HeldOut& held_out, const TrainOptions& options) {
  const Evaluator evaluator(held_out, options);
  const Step& step = evaluator.step();
  return {{"every", held_out.options.every},
          {"trajectories", held_out.trajectories.num_rows()},
          {"flat_tokens", step.flat_tokens()},
          {"encoded_tokens", step.plan.num_tokens()},
          {"micro_batches", step.plan.micro_batches.size()}};
}

void note_router_losses(const TrainArguments& flags) {
  const auto config = read_json_file<nlohmann::json>(std::filesystem::path(flags.model) / "config.json");
  if (config.value("output_router_logits", nlohmann::json()) != true ||
      flags.train.objective.router_aux_loss_coef != 0)
    return;
  log_line(
      "note: config.json sets output_router_logits, for which Transformers adds the load-balancing loss; "
      "Espalier adds it with --router-aux-loss-coef {}",
      config.value("router_aux_loss_coef", nlohmann::json(0.001)).dump());
}

void warn_of_warmup(const TrainOptions& options, int64_t steps) {
  if (options.warmup_steps < steps) return;
  log_line(
      "warning: --warmup-steps {} is not less than the {} of the run: the learning rate never reaches {}",
      options.warmup_steps, count_of(steps, "step", "steps"), options.learning_rate);
}

void check_evaluation_flags(const TrainArguments& flags) {
  const EvaluationOptions& evaluation = flags.evaluation;
  const char* without_rows = !flags.eval_data.empty()    ? nullptr
                             : evaluation.every > 0      ? "eval-every"
                             : evaluation.keep_best      ? "keep-best"
                             : evaluation.early_stop > 0 ? "early-stop"
                                                         : nullptr;
  ESPALIER_CHECK(without_rows == nullptr, "--{}: requires --eval-data FILE", without_rows);
  ESPALIER_CHECK(flags.eval_data.empty() || flags.mix.file.empty(),
                 "--eval-data: cannot be combined with --mix, because evaluation uses a single --objective");
  ESPALIER_CHECK(evaluation.early_stop == 0 || evaluation.every > 0,
                 "--early-stop {}: requires --eval-every N; without it the only evaluation is at the end",
                 evaluation.early_stop);
}

void check_follow_flags(const TrainArguments& flags, const OptionList& list) {
  for (const char* other : {"data", "mix", "reference-model", "dry-run", "repeats"})
    ESPALIER_CHECK(!list.at(other).is_given(), "--follow: cannot be combined with --{}", other);
  ESPALIER_CHECK(flags.train.steps > 0, "--follow: requires --steps N, the most that the run takes");
  ESPALIER_CHECK(std::filesystem::is_directory(flags.train.follow),
                 "--follow: expected a folder, received {}", flags.train.follow.string());
}

/// With a reference model, the objective checks the rows after ref_logprobs are added.
DataUse use_of_rows(const TrainArguments& flags) {
  const DataUse use = data_use_of(flags.model, flags.train.objective);
  return flags.reference_model.empty() ? use : data_use_of(flags.model);
}

/// The rows of --eval-data, if given.
std::optional<HeldOut> read_held_out(const TrainArguments& flags) {
  if (flags.eval_data.empty()) return std::nullopt;
  return HeldOut{flags.held_out_data().read(use_of_rows(flags)), flags.evaluation};
}

/// Checks, before the reference's log-probabilities are computed, that the objective needs nothing else.
/// Throws InputError if it does. Sets ref_logprobs to zeros.
void check_with_reference(const Reference& reference, const TrainArguments& flags, const DataFlags& data,
                          Trajectories* rows) {
  const ObjectiveOptions objective = flags.train.objective;
  check_reference(reference, read_config(flags.model), objective, *rows, data.title());
  rows->ref_logprobs = {RealColumn(Column<float>(std::vector<float>(rows->num_tokens()))), {}};
  const Loss loss(*rows, objective);
}

void compute_reference(const Reference& reference, const KeptReference& kept, const TrainOptions& options,
                       Trajectories* rows) {
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
                             rows, *options.group);
  progress.line(fmt::format("reference: log-probabilities of {} {} {}",
                            count_of(rows->num_rows(), "trajectory", "trajectories"),
                            was_kept ? "from" : "computed, stored in", kept.file.string()));
  for (const std::string& text : signal_warnings(Loss(*rows, options.objective)))
    progress.line("warning: " + text);
}

/// One invocation of the command, from its flags to the end of training.
class TrainRun {
 public:
  TrainRun(const TrainArguments& flags, const OptionList& list, const Caller& caller)
      : flags_(flags), list_(list), caller_(caller) {}

  Result run();

 private:
  void check_flags() const;
  void open_device();
  void divide_ranks();
  void read_rows();
  void choose_options();
  void make_room();
  void add_reference();
  nlohmann::ordered_json plan_json() const;
  bool train();

  TrainEvents events();
  void on_start(int64_t total, int64_t resumed_step);
  void on_micro_batch(int64_t step, int64_t done, int64_t count);
  void on_step(int64_t step, const nlohmann::ordered_json& metrics);
  void on_evaluating(int64_t step, int64_t done, int64_t count);
  void on_prediction(const Step& step, const StepPrediction& prediction, const StepResult& result);
  void write_plan(const std::function<std::string()>& text);
  std::filesystem::path plan_file() const { return options_.out / "plan.txt"; }
  const Group& group() const { return *flags_.train.group; }
  void note(const std::string& text) { progress_->line(text); }
  StopRequest& stop() { return caller_.stop != nullptr ? *caller_.stop : own_stop_; }
  /// Called after `step` or its evaluation. From now on a signal lets the next step finish.
  void finish(int64_t step) {
    if (step < total_ && !stop().requested) stop().step = step + 1;
  }

  const TrainArguments& flags_;
  const OptionList& list_;
  const Caller& caller_;
  StopRequest own_stop_;  // without one of the caller
  at::Device device_ = at::kCPU;
  std::optional<KernelScope> kernels_;
  std::optional<Profiler> profiler_;
  std::unique_ptr<Group> context_group_;
  MixedData data_;
  std::optional<HeldOut> held_out_;
  std::string mix_;             // the content of kMixFile
  std::vector<RunFile> files_;  // the config first
  std::string plan_;            // of the first step, once it is done
  TrainOptions options_;
  std::optional<ModelUse> use_;
  std::optional<Progress> progress_;
  int64_t total_ = 0, first_ = 0;  // steps of the run, and steps done before it was resumed
  bool saved_ = false;
};

Result TrainRun::run() {
  check_flags();
  open_device();
  divide_ranks();
  read_rows();
  choose_options();
  if (!flags_.reference_model.empty()) add_reference();
  make_room();
  if (flags_.dry_run) return {plan_json()};
  files_.push_back(run_record({options_, data_.trajectories, held_out_ ? &*held_out_ : nullptr},
                              flags_.repeats, caller_.version));
  std::filesystem::create_directories(options_.out);
  stop().step = 0;
  progress_.emplace("train");
  if (train()) return {};
  note(fmt::format("stopped by a signal {}; continue with --resume",
                   saved_ ? "after saving" : "before the first step was done"));
  return {.status = kStoppedExitCode};
}

void TrainRun::check_flags() const {
  ESPALIER_CHECK(flags_.train.profile_step == 0 || !flags_.profile.empty(),
                 "--profile-step {}: requires --profile FILE", flags_.train.profile_step);
  if (flags_.train.follow.empty()) {
    flags_.mix.check(list_, flags_.data);
  } else {
    check_follow_flags(flags_, list_);
  }
  check_evaluation_flags(flags_);
  ESPALIER_CHECK(
      flags_.reference_model.empty() || flags_.mix.file.empty(),
      "--reference-model: cannot be combined with --mix; add `ref_logprobs` to the rows of its sources "
      "(docs/objectives.md)");
  check_objective_options(flags_.train.objective);
}

void TrainRun::open_device() {
  Machine machine = flags_.device.open(group());
  restore_products(flags_, &machine);
  device_ = machine.device;
  kernels_.emplace(machine.kernels);
  if (!flags_.profile.empty() && !flags_.dry_run && group().is_first())
    profiler_.emplace(flags_.profile, device_, [this](const nlohmann::json& figures) {
      return caller_.text_of("profile", figures.dump());
    });
}

/// Joins the ranks that compute every micro-batch together.
void TrainRun::divide_ranks() {
  const int64_t together = flags_.context_parallel, ranks = group().size();
  if (together == 1) return;
  ESPALIER_CHECK(ranks % together == 0 || (flags_.dry_run && ranks == 1),
                 "--context-parallel {}: expected a divisor of the number of processes, received {} of them "
                 "(--processes N or torchrun)",
                 together, ranks);
  ESPALIER_CHECK(model_cost(read_config(flags_.model)).recurrence() == 0,
                 "--context-parallel {}: expected a model whose layers are attention, received one with "
                 "recurrent layers, {}; espalier.distributed.Ranks divides patched models of this kind",
                 together, flags_.model);
  context_group_ = group().split(together);
}

void TrainRun::read_rows() {
  if (flags_.mix.file.empty()) {
    if (!flags_.data.data.empty()) data_.trajectories = flags_.data.read(use_of_rows(flags_));
  } else {
    data_ = flags_.mix.read(flags_.model, flags_.data, caller_);
    mix_ = flags_.mix.resolved(caller_);
  }
  held_out_ = read_held_out(flags_);
}

void TrainRun::choose_options() {
  note_carried_tensors(flags_.model);
  use_ = use_of(flags_, data_, device_);
  options_ = options_of(flags_, data_, *use_);
  options_.context_group = context_group_.get();
  options_.profiler = profiler_ ? &*profiler_ : nullptr;
  warn_of_warmup(options_, total_steps(data_.trajectories, options_));
  files_ = files_of_the_run(options_, config_of_the_run(flags_, list_), mix_);
  note_router_losses(flags_);
  const std::string uneven = uneven_steps_note(data_.trajectories, options_);
  if (!uneven.empty()) log_line("{}", uneven);
}

/// Turns --save-in-background off if a step fits --memory-budget only without its copy.
void TrainRun::make_room() {
  const Trajectories& rows = data_.trajectories;
  if (!options_.save_in_background || options_.plan.memory_budget == 0 || rows.num_rows() == 0) return;
  TrainOptions waiting = options_;
  waiting.save_in_background = false;
  const double copy = use_->optimizer_bytes -
                      state_bytes(waiting, trained_dtype(use_->dtype, use_->lora.has_value()), device_);
  waiting.costs->memory.optimizer_bytes_per_parameter -= copy;
  waiting.predicted_costs->memory.optimizer_bytes_per_parameter -= copy;
  const Loss loss = make_loss(rows, options_.objective, options_.mix);
  const auto fits = [&](const TrainOptions& options) {
    try {
      Steps(loss, options).try_longest(0, total_steps(rows, options));
    } catch (const InputError&) {
      return false;  // said before the first step
    }
    return true;
  };
  if (copy == 0 || fits(options_) || !fits(waiting)) return;
  log_line(
      "note: --save-in-background is off, because --memory-budget has no room for a copy of weights and "
      "optimiser: the run waits while a checkpoint is written");
  options_ = waiting;
  use_->optimizer_bytes -= copy;
}

/// Adds the log-probabilities of --reference-model to the rows and the held-out rows.
void TrainRun::add_reference() {
  const Reference reference{flags_.reference_model, options_.dtype, options_.device, options_.plan};
  Trajectories* held_out = held_out_ ? &held_out_->trajectories : nullptr;
  check_with_reference(reference, flags_, flags_.data, &data_.trajectories);
  if (held_out != nullptr) check_with_reference(reference, flags_, flags_.held_out_data(), held_out);
  if (flags_.dry_run) return;
  std::filesystem::create_directories(options_.out);
  std::optional<FolderLock> lock;  // another run may be using the folder
  if (group().is_first()) lock.emplace(options_.out, nullptr);
  check_not_begun(options_);
  stop().step = 0;
  compute_reference(reference,
                    {.file = options_.out / "ref_logprobs.safetensors",
                     .trained_hash = trained_column_hash(options_.out, "ref_logprobs")},
                    options_, &data_.trajectories);
  if (held_out == nullptr) return;
  compute_reference(reference, {.file = options_.out / "ref_logprobs_eval.safetensors"}, options_, held_out);
}

nlohmann::ordered_json TrainRun::plan_json() const {
  nlohmann::ordered_json plan{
      {"mix", mix_}, {"config", files_.front().text}, {"epoch", epoch_json(options_, data_.trajectories)}};
  if (held_out_) plan["evaluation"] = evaluation_json(*held_out_, options_);
  return plan;
}

/// Returns whether training was completed.
bool TrainRun::train() {
  return espalier::train(data_.trajectories, options_, events(), &stop().requested,
                         held_out_ ? &*held_out_ : nullptr);
}

TrainEvents TrainRun::events() {
  TrainEvents events;
  events.files = files_;
  events.note = [this](const std::string& text) { note(text); };
  events.started = std::bind_front(&TrainRun::on_start, this);
  events.micro_batch = std::bind_front(&TrainRun::on_micro_batch, this);
  events.step = std::bind_front(&TrainRun::on_step, this);
  events.evaluating = std::bind_front(&TrainRun::on_evaluating, this);
  events.evaluated = [this](int64_t step, const auto& values, const EvaluationState& state) {
    const nlohmann::ordered_json line = {{"step", step},
                                         {"total", total_},
                                         {"values", values},
                                         {"best_step", state.best_step},
                                         {"best_loss", state.best_loss}};
    note(caller_.text_of("evaluation_line", line.dump()));
    finish(step);
  };
  events.read = [this](const std::vector<std::string>& names) {
    DataFlags files = flags_.data;
    for (const std::string& name : names) files.data.push_back((flags_.train.follow / name).string());
    return files.read(use_of_rows(flags_));
  };
  events.predicted = std::bind_front(&TrainRun::on_prediction, this);
  events.saved = [this](const std::filesystem::path& folder) {
    saved_ = true;
    note("saved " + folder.string());
  };
  return events;
}

void TrainRun::on_start(int64_t total, int64_t resumed_step) {
  total_ = total;
  first_ = resumed_step;
  if (first_ > 0) note(fmt::format("resuming after step {}", first_));
  finish(first_);
}

void TrainRun::on_micro_batch(int64_t step, int64_t done, int64_t count) {
  const double steps_done =
      static_cast<double>(step - 1 - first_) + static_cast<double>(done) / static_cast<double>(count);
  progress_->update(steps_done / static_cast<double>(total_ - first_),
                    fmt::format("step {}/{}, micro-batch {}/{}", step, total_, done, count));
}

void TrainRun::on_step(int64_t step, const nlohmann::ordered_json& metrics) {
  if (!plan_.empty() && !std::filesystem::exists(plan_file())) write_plan([this] { return plan_; });
  const nlohmann::ordered_json line = {{"step", step}, {"total", total_}, {"metrics", metrics}};
  note(caller_.text_of("step_line", line.dump()));
  finish(step);
  if (step != first_ + 2) return;  // the first step is slower
  flags_.planning.judge_calibration(*use_, metrics["predicted_seconds"], metrics["micro_batch_seconds"],
                                    [this](const std::string& text) { note(text); });
}

void TrainRun::on_evaluating(int64_t step, int64_t done, int64_t count) {
  if (!stop().requested) stop().step = step;  // a signal aborts an evaluation
  progress_->update(
      static_cast<double>(step - first_) / static_cast<double>(std::max<int64_t>(1, total_ - first_)),
      fmt::format("evaluation after step {}/{}, micro-batch {}/{}", step, total_, done, count));
}

void TrainRun::write_plan(const std::function<std::string()>& text) {
  try {
    plan_ = text();
    write_text(plan_file(), plan_);
  } catch (const InputError& error) {  // the file is informative only
    plan_.clear();
    note(fmt::format("warning: {}", error.what()));
  }
}

void TrainRun::on_prediction(const Step& step, const StepPrediction& prediction, const StepResult& result) {
  if (!group().is_first()) return;
  write_plan([&] {
    const nlohmann::ordered_json table = {{"table", table_json(step, &prediction, &result)}};
    return caller_.text_of("table", table.dump());
  });
  note(fmt::format("micro-batches: predicted {:.2f} s and {}, measured {:.2f} s and {}; see {}",
                   prediction.total_seconds(), human_bytes(prediction.largest_peak_bytes()),
                   result.measured_seconds(), human_bytes(static_cast<double>(result.measured_peak_bytes())),
                   plan_file().string()));
}

}  // namespace

Command train_command(const Caller& caller) {
  const auto flags = std::make_shared<TrainArguments>();
  if (caller.group != nullptr) flags->train.group = caller.group;
  Command command{.run = [flags, &caller](const OptionList& list) {
    // By default, the steps of a mix contain rows of all sources.
    if (!flags->mix.file.empty() && !list.at("shuffle").is_given()) flags->train.shuffle = Shuffle::kGroups;
    return TrainRun(*flags, list, caller).run();
  }};
  flags->add(&command.options);
  return command;
}

}  // namespace espalier::commands
