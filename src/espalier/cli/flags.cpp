#include "espalier/cli/flags.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/cli/progress.h"
#include "espalier/model/config.h"
#include "espalier/ops/device.h"
#include "espalier/train/calibrate.h"
#include "espalier/train/cost.h"

namespace espalier::cli {

void DataFlags::add(CLI::App* command) {
  command
      ->add_option("--data", data,
                   "Trajectories: JSONL (plain, .gz or .zst) or packed .safetensors; see docs/data-format.md")
      ->required();
  command->add_flag("--skip-bad-rows", skip_bad_rows,
                    "Count and report bad rows instead of stopping at the first");
  command->add_option("--limit", limit, "Use the first N trajectories only (0: all)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

Trajectories DataFlags::read(int64_t vocab_size) const {
  Progress progress("reading " + data);
  ReadReport report;
  ReadOptions options;
  options.vocab_size = vocab_size;
  options.skip_bad_rows = skip_bad_rows;
  options.max_rows = limit;
  options.progress = [&progress](double fraction) { progress.update(fraction); };
  Trajectories trajectories = read_trajectories(data, options, &report);
  if (report.rows_skipped > 0) {
    progress.line(fmt::format("{}: skipped {} bad rows of {}", data, with_commas(report.rows_skipped),
                              with_commas(report.rows_read + report.rows_skipped)));
    for (const std::string& error : report.first_errors) progress.line("  " + error);
  }
  return trajectories;
}

namespace {

// What is wrong with the text of a flag, as CLI11 wants it: the message of the InputError that `parse`
// throws.
template <class Parse>
std::function<std::string(const std::string&)> fault_of(Parse parse) {
  return [parse](const std::string& text) {
    try {
      parse(text);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
}

}  // namespace

void DeviceFlags::add(CLI::App* command, bool trains) {
  command
      ->add_option(
          "--device", device,
          "Where the model runs: cpu, cuda (the first GPU that is visible) or cuda:N; needs a LibTorch "
          "and a build with CUDA")
      ->check(fault_of(parse_device), "cpu|cuda|cuda:N")
      ->capture_default_str();
  if (!trains) return;
  command->add_flag(
      "--deterministic", deterministic,
      "CUDA: the same bits in every run on the same GPU, by slower ways of summing gradients (sorted instead "
      "of atomic). Without it gradients may differ from run to run in their last bits. "
      "The CPU is always deterministic");
}

at::Device DeviceFlags::open() const {
  const at::Device parsed = parse_device(device);
  open_device(parsed, deterministic);
  return parsed;
}

void PlanFlags::add(CLI::App* command) {
  command
      ->add_option("--strategy", strategy,
                   "partition: trees are cut into pieces, each token encoded once; tree-packing: whole trees "
                   "share a micro-batch, those over the budget are split and repeat their prefixes; "
                   "sequence-packing: every trajectory on its own (the baseline); auto: the one predicted to "
                   "be fastest")
      ->check(CLI::IsMember({"auto", "partition", "tree-packing", "sequence-packing"}))
      ->capture_default_str();
  command
      ->add_option("--token-budget", token_budget,
                   fmt::format("Most tokens in one micro-batch. 0: {}, or the longest trajectory if that is "
                               "longer; with --memory-budget: no limit",
                               kDefaultTokenBudget))
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option(
          "--memory-budget", memory_budget,
          "Most memory for weights, gradients, optimiser and activations, such as 8GiB or 500MB; the "
          "plan is the fastest that fits (0: no limit)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->default_str("0");
  command
      ->add_option(
          "--checkpoint-activations", checkpoint_activations,
          "Compute activations again in the backward pass instead of keeping them: layer (inside every "
          "layer), piece (of micro-batches that others descend from; strategy partition), none, or auto "
          "(what lets the fastest plan fit the memory budget; none without one)")
      ->check(CLI::IsMember({"auto", "none", "layer", "piece"}))
      ->capture_default_str();
  command->add_flag(
      "--offload-context", offload_context,
      "With --checkpoint-activations piece: keep the context between micro-batches in host memory");
  command->add_flag("--no-calibration", no_calibration,
                    "Compare plans by assumed rates; do not measure this machine or GPU");
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

PlanCosts PlanFlags::costs(const ModelUse& use, const std::function<void(const std::string&)>& note) const {
  return {no_calibration ? assumed_times(use.config, use.device)
                         : cached_calibration(use.config, use.dtype, use.device, cache_folder(), note),
          memory_model(use.config, use.dtype, use.optimizer, use.objective, use.device)};
}

void PlanFlags::judge_calibration(const ModelUse& use, double predicted_seconds, double measured_seconds,
                                  const std::function<void(const std::string&)>& note) const {
  constexpr double kMostOff = 1.5, kLeastSeconds = 0.25;  // shorter steps are mostly fixed costs
  if (no_calibration || std::max(predicted_seconds, measured_seconds) < kLeastSeconds) return;
  if (measured_seconds < kMostOff * predicted_seconds && predicted_seconds < kMostOff * measured_seconds)
    return;
  if (!forget_calibration(use.config, use.dtype, use.device, cache_folder())) return;
  note(fmt::format(
      "micro-batches took {:.2f} s, predicted were {:.2f} s: the machine is measured again by the next run",
      measured_seconds, predicted_seconds));
}

void ObjectiveFlags::add(CLI::App* command) {
  command->add_option("--objective", objective, "sft: cross-entropy; grpo: clipped policy gradient")
      ->check(CLI::IsMember({"sft", "grpo"}))
      ->capture_default_str();
  command
      ->add_option("--shared-targets", shared_targets,
                   "A target token that several trajectories share and train on: sum keeps every "
                   "trajectory's term, once "
                   "keeps the first one's")
      ->check(CLI::IsMember({"sum", "once"}))
      ->capture_default_str();
  command
      ->add_option("--normalize", normalize,
                   "Loss per token, per sequence, or divided by a NUMBER; over the whole optimiser step")
      ->check(fault_of([](const std::string& text) {
                ObjectiveOptions unused;
                parse_normalize(text, &unused);
              }),
              "token|sequence|NUMBER")
      ->capture_default_str();
  command->add_option("--clip-low", clip_low, "grpo: the ratio is clipped at 1 - this")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--clip-high", clip_high, "grpo: the ratio is clipped at 1 + this")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--scale-rewards", scale_rewards,
                   "grpo: advantages from rewards are divided by their group's standard deviation (group) or "
                   "not (none)")
      ->check(CLI::IsMember({"group", "none"}))
      ->capture_default_str();
}

ObjectiveOptions ObjectiveFlags::options() const {
  ObjectiveOptions options;
  options.kind = parse_objective(objective);
  options.shared_targets = parse_shared_targets(shared_targets);
  parse_normalize(normalize, &options);
  options.clip_low = clip_low;
  options.clip_high = clip_high;
  options.scale_rewards = scale_rewards == "group";
  return options;
}

CLI::Option* add_model(CLI::App* command, std::string* model, const std::string& help) {
  return command->add_option("--model", *model, help);
}

CLI::Option* add_dtype(CLI::App* command, std::string* dtype, const std::string& help) {
  return command->add_option("--dtype", *dtype, help)
      ->check(CLI::IsMember({"float64", "float32", "bfloat16"}))
      ->capture_default_str();
}

void add_config(CLI::App* command) {
  command->add_option("--config", "TOML file with these flags as keys; flags on the command line win")
      ->type_name("FILE");
}

void add_threads(CLI::App* command) {
  command
      ->add_option_function<int>(
          "--threads",
          [](int threads) {
            if (threads > 0) at::set_num_threads(threads);
          },
          "CPU threads (0: all cores)")
      ->check(CLI::NonNegativeNumber)
      ->default_str("0");
}

CLI::Option* add_profile(CLI::App* command, std::string* trace, const std::string& which) {
  return command
      ->add_option(
          "--profile", *trace,
          "Profile " + which +
              ": write a trace to this file, for chrome://tracing or ui.perfetto.dev, and print which "
              "kinds of work took how long, and how near to the rate of a plain matrix product")
      ->type_name("FILE");
}

int64_t vocab_size_of(const std::string& model) {
  return model.empty() ? 0 : read_config(model).vocab_size;
}

}  // namespace espalier::cli
