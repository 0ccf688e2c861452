// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/printable.h"
#include "espalier/cli/help_format.h"
#include "espalier/cli/kernel_check.h"
#include "espalier/cli/output.h"
#include "espalier/cli/progress.h"
#include "espalier/cli/validators.h"
#include "espalier/engine/cost.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/product_decision.h"
#include "espalier/model/weights.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/plan/adapter_cost.h"
#include "espalier/plan/cost_model_file.h"
#include "espalier/runtime/cuda_software.h"
#include "espalier/runtime/device.h"

namespace espalier::cli {

namespace {

constexpr const char* kAutomatic = "auto";

void known_device(const std::string& name) {
  if (name == kAutomatic) return;
  try {
    parse_device(name);
  } catch (const InputError&) {
    throw InputError(fmt::format("device: expected auto, cpu, cuda or cuda:N, received `{}`", name));
  }
}

at::Device chosen_device(const std::string& name) {
  if (name != kAutomatic) return parse_device(name);
  const AutomaticDevice automatic = automatic_device(cuda_driver(), libtorch_cuda());
  log_line("espalier: --device auto: {} ({})", automatic.device.str(), automatic.reason);
  return automatic.device;
}

}  // namespace

void DeviceFlags::add(CLI::App* command, bool trains) {
  const HelpGroup group(command, kMachineGroup);
  command
      ->add_option("--device", device,
                   "Where the model runs: cpu, cuda (the first visible GPU), cuda:N, or auto (the first GPU "
                   "that can be used, else the CPU; `espalier device` says why). CUDA needs a LibTorch and a "
                   "build with CUDA")
      ->check(fault_of(known_device), "cpu|cuda|cuda:N|auto")
      ->capture_default_str();
  if (!trains) return;
  command->add_flag("--deterministic", deterministic,
                    "CUDA: make every run on the same GPU bitwise identical, by slower ways of accumulating "
                    "gradients (sorted instead of atomic). Without it, gradients may differ in their last "
                    "bits from run to run. The CPU is always deterministic");
}

at::Device DeviceFlags::open() const {
  const at::Device parsed = chosen_device(device);
  if (parsed.is_cuda()) prove_kernels(parsed.index());
  open_device(parsed, deterministic);
  if (parsed.is_cpu()) {
    const auto note = [](const std::string& text) { fmt::print(stderr, "espalier: {}\n", text); };
    set_product_choice(decide_products(product_features(), cache_folder(), note).choice);
  }
  return parsed;
}

// Somebody who writes --memory-budget 8 means gigabytes, and there is no model in so few bytes.
constexpr int64_t kFewestBareBytes = 65'536;

void PlanFlags::add(CLI::App* command) {
  const HelpGroup group(command, kPlanGroup);
  command
      ->add_option("--strategy", strategy,
                   "partition: cut trees into pieces and encode each token once; tree-packing: put whole "
                   "trees into micro-batches, and split those over the budget, which repeats their prefixes; "
                   "sequence-packing: encode every trajectory on its own (the baseline); auto: take the one "
                   "that is predicted to be fastest")
      ->check(CLI::IsMember(strategy_names()))
      ->capture_default_str();
  command
      ->add_option("--token-budget", token_budget,
                   fmt::format("Most tokens in one micro-batch. 0: {}, or the longest trajectory if that is "
                               "longer; with --memory-budget: no limit",
                               kDefaultTokenBudget))
      ->check(whole_from(0))
      ->capture_default_str();
  command
      ->add_option("--memory-budget", memory_budget,
                   "Most memory for weights, gradients, optimiser and activations, such as 8GiB or 500MB. "
                   "The fastest plan that fits is taken (0: no limit)")
      ->transform(byte_size(kFewestBareBytes))
      ->default_str("0");
  command
      ->add_option(
          "--checkpoint-activations", checkpoint_activations,
          "Compute activations again in the backward pass instead of keeping them: layer (inside every "
          "layer), piece (all of a micro-batch that has descendants; strategy partition), none, or auto "
          "(whatever lets the fastest plan fit the memory budget; none without a budget)")
      ->check(CLI::IsMember(checkpoint_activations_names()))
      ->capture_default_str();
  command->add_flag(
      "--offload-context", offload_context,
      "With --checkpoint-activations piece: keep the context between micro-batches in host memory");
  command->add_flag("--no-calibration", no_calibration,
                    "Predict times by built-in rates, without measuring this machine or GPU");
  command
      ->add_option(
          "--cost-model", cost_model,
          "Compare plans by the rates in this file instead of built-in ones. `plan --save-cost-model` writes "
          "such a file, and a run keeps one as cost_model.json, by which --resume goes on. Plans never "
          "depend "
          "on what is measured in the run, so runs with equal flags and data are bitwise identical")
      ->type_name("FILE");
}

PlanOptions PlanFlags::options(const Trajectories& trajectories) const {
  PlanOptions options;
  options.strategy = parse_strategy(strategy);
  options.token_budget = token_budget;
  options.memory_budget = static_cast<int64_t>(memory_budget);
  options.checkpoint_activations = parse_checkpoint_activations(checkpoint_activations);
  options.offload_context = offload_context;
  if (token_budget == 0 && memory_budget == 0) {
    options.token_budget = kDefaultTokenBudget;
    for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
      options.token_budget = std::max(options.token_budget, trajectories.row_size(row));
    }
  }
  return options;
}

ModelCost ModelUse::cost() const {
  return lora ? with_adapters(model_cost(config), config, *lora) : model_cost(config);
}

namespace {

/// Of the objective, or of the objectives of a mix.
MemoryModel memory_of(const ModelUse& use) {
  std::vector<std::shared_ptr<const Objective>> objectives;
  for (const MixSource& source : use.mix) objectives.push_back(make_objective(source.objective));
  if (objectives.empty()) objectives.push_back(make_objective(use.objective));
  std::vector<MemoryModel> models;
  for (const auto& objective : objectives) {
    models.push_back(memory_model(use.config, use.dtype, *objective, use.device, use.ref_topk));
  }
  MemoryModel memory = largest(models);
  if (use.optimizer) memory.optimizer_bytes_per_parameter = optimizer_bytes(*use.optimizer, use.dtype);
  return memory;
}

}  // namespace

PlanCosts PlanFlags::costs(const ModelUse& use) const {
  PlanCosts costs{cost_model.empty() ? assumed_times(use.config, use.device)
                                     : read_cost_model(cost_model, model_cost(use.config)),
                  memory_of(use)};
  if (!use.lora) return costs;
  return with_adapters(std::move(costs), use.config, *use.lora);
}

PlanCosts PlanFlags::measured_costs(const ModelUse& use,
                                    const std::function<void(const std::string&)>& note) const {
  PlanCosts costs = this->costs(use);
  if (!no_calibration) {
    costs.time = cached_calibration(use.config, use.dtype, use.device, cache_folder(), note);
    costs.time.cost = use.cost();
  }
  return costs;
}

void PlanFlags::judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                                  const std::function<void(const std::string&)>& note) const {
  constexpr double kMostOff = 1.5, kLeastSeconds = 0.25;  // shorter steps are mostly fixed costs
  if (no_calibration || std::max(predicted_seconds, measured_seconds) < kLeastSeconds) return;
  if (measured_seconds < kMostOff * predicted_seconds && predicted_seconds < kMostOff * measured_seconds)
    return;
  if (!forget_calibration(use.config, use.dtype, use.device, cache_folder())) return;
  note(
      fmt::format("micro-batches took {:.2f} s, but {:.2f} s were predicted: the machine is measured again "
                  "by the next run",
                  measured_seconds, predicted_seconds));
}

void OptimizerFlags::add(CLI::App* command, bool schedules) {
  const HelpGroup group(command, "Optimiser");
  command->add_option("--optimizer", optimizer, "adamw or sgd (plain, no momentum)")
      ->check(CLI::IsMember(optimizer_names()))
      ->capture_default_str();
  command->add_option("--learning-rate", learning_rate, "Peak learning rate")
      ->check(real_from(0, kLargestLearningRate))
      ->capture_default_str();
  if (schedules) {
    command->add_option("--scheduler", scheduler, "constant, linear or cosine (the latter two fall to 0)")
        ->check(CLI::IsMember(scheduler_names()))
        ->capture_default_str();
    command->add_option("--warmup-steps", warmup_steps, "Steps over which the learning rate rises")
        ->check(whole_from(0))
        ->capture_default_str();
  }
  command
      ->add_option("--weight-decay", rest.weight_decay,
                   "Weight decay of matrices (norms and biases have none)")
      ->check(real_from(0))
      ->capture_default_str();
  command->add_option("--max-grad-norm", rest.max_grad_norm, "Clip the global gradient norm (0: off)")
      ->check(real_from(0))
      ->capture_default_str();
  if (schedules) {
    command->add_flag("--log-grad-norms", log_grad_norms,
                      "Report the gradient norm of each kind of module as well, before clipping: "
                      "grad_norm/self_attn, grad_norm/mlp and so on");
  }
  command->add_option("--beta1", rest.beta1, "adamw: decay of the mean of gradients")
      ->check(real_below(0, 1))
      ->capture_default_str();
  command->add_option("--beta2", rest.beta2, "adamw: decay of the mean of their squares")
      ->check(real_below(0, 1))
      ->capture_default_str();
  command->add_option("--eps", rest.eps, "adamw: added to the denominator, above 0")
      ->check(real_from(std::numeric_limits<double>::denorm_min()))
      ->capture_default_str();
}

OptimizerOptions OptimizerFlags::options() const {
  OptimizerOptions options = rest;
  options.kind = parse_optimizer(optimizer);
  return options;
}

void OptimizerFlags::apply_to(TrainOptions* options) const {
  options->optimizer = this->options();
  options->learning_rate = learning_rate;
  options->scheduler = parse_scheduler(scheduler);
  options->warmup_steps = warmup_steps;
  options->log_grad_norms = log_grad_norms;
}

CLI::Option* add_model(CLI::App* command, std::string* model, const std::string& help) {
  const HelpGroup group(command, kDataGroup);
  return command->add_option("--model", *model, help)->type_name("DIR");
}

CLI::Option* add_dtype(CLI::App* command, std::string* dtype, const std::string& help) {
  const HelpGroup group(command, kMachineGroup);
  return command->add_option("--dtype", *dtype, help)
      ->check(CLI::IsMember(dtype_names()))
      ->capture_default_str();
}

CLI::Option* add_freeze_pad_embedding(CLI::App* command, bool* freeze) {
  const HelpGroup group(command, kMachineGroup);
  return command->add_flag(
      "--freeze-pad-embedding", *freeze,
      "Give the input embedding of config.json's pad_token_id no gradient, as Transformers does; a tied LM "
      "head still trains it. Without this flag it is trained like any other, because trajectories have no "
      "padding and the token may be a real one, such as the end of a turn");
}

void add_config(CLI::App* command) {
  const HelpGroup group(command, kOtherGroup);
  command
      ->add_option("--config",
                   "TOML file with these flags as keys. Flags on the command line take precedence")
      ->type_name("FILE");
}

namespace {

// Enough to try what more threads than cores do; a number that is a slip would start a million of them.
int most_threads() {
  return std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

void add_threads(CLI::App* command) {
  const HelpGroup group(command, kMachineGroup);
  command
      ->add_option_function<int>(
          "--threads",
          [](int threads) {
            if (threads > 0) at::set_num_threads(threads);
          },
          "CPU threads (0: all cores)")
      ->check(CLI::Range(0, most_threads()))
      ->default_str("0");
}

void note_carried_tensors(const std::string& model) {
  const std::vector<std::string> names = carried_tensors(model);
  if (names.empty()) return;
  constexpr size_t kMost = 5;
  std::string list;
  for (size_t i = 0; i < std::min(kMost, names.size()); ++i)
    list += (i > 0 ? ", " : "") + shortened(names[i]);
  if (names.size() > kMost) list += fmt::format(" and {} more", names.size() - kMost);
  log_line("{}: tensors that the model does not use and checkpoints carry unchanged: {}", printable(model),
           list);
}

CLI::Option* add_profile(CLI::App* command, std::string* trace, const std::string& which) {
  const HelpGroup group(command, kOutputGroup);
  return command
      ->add_option("--profile", *trace,
                   "Profile " + which +
                       ": write a trace to this file, for chrome://tracing or ui.perfetto.dev, and print how "
                       "long each kind of work took, beside the rate of a plain matrix product")
      ->type_name("FILE");
}

}  // namespace espalier::cli
