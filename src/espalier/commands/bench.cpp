// SPDX-License-Identifier: Apache-2.0
// espalier bench: measures strategies against each other and reports the FLOP bound.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/config/config.h"
#include "espalier/measure/benchmark.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/gemm_rates.h"
#include "espalier/measure/product_decision.h"
#include "espalier/measure/workloads.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/progress.h"

namespace espalier {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SideResult, seconds, micro_batches, encoded_tokens, flops, plan_flops,
                                   loss, grad_norm, working_bytes, peak_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchmarkResult, flat_tokens, tree_tokens, append_only_tokens,
                                   packing_flops, append_only_flops)

namespace commands {
namespace {

nlohmann::json json_of(const std::string& data, const BenchmarkResult& result) {
  nlohmann::json json = result;
  json["data"] = data;
  for (const SideResult& side : result.sides) {
    nlohmann::json row = side;
    row["side"] = side.side.name;
    row["strategy"] = to_string(side.side.plan.strategy);
    row["token_budget"] = side.side.plan.token_budget;
    json["sides"].push_back(std::move(row));
  }
  return json;
}

struct MeasuredRates {
  std::string hardware;
  std::vector<ProductWay> ways;
  std::vector<GemmRates> rates;
  ProductDecision decision;
};

bool is_chosen(const ProductWay& way, const ProductChoice& choice) {
  if (way.dtype == at::kFloat) return way.choice.float32 == choice.float32;
  return way.choice.bfloat16 == choice.bfloat16 &&
         (choice.bfloat16 != Bfloat16Products::kUpcast || way.choice.float32 == choice.float32);
}

nlohmann::ordered_json json_of(const MeasuredRates& measured) {
  auto rows = nlohmann::ordered_json::array();
  for (const GemmRates& rates : measured.rates) {
    for (size_t way = 0; way < measured.ways.size(); ++way) {
      rows.push_back({{"map", rates.shape.name},
                      {"part", to_string(rates.part)},
                      {"rows", rates.shape.rows},
                      {"in", rates.shape.in},
                      {"out", rates.shape.out},
                      {"way", measured.ways[way].name()},
                      {"chosen", is_chosen(measured.ways[way], measured.decision.choice)},
                      {"gflops_per_second", rates.flops_per_second(way) / 1e9}});
    }
  }
  return {{"hardware", measured.hardware},
          {"products", to_string(measured.decision.choice)},
          {"reason", measured.decision.reason},
          {"rows", rows}};
}

// --gemm: the rates of the model's matrix products.
MeasuredRates measure_rates(const DecoderConfig& config, int64_t tokens, int64_t rounds) {
  Progress progress("bench");
  MeasuredRates measured;
  measured.hardware =
      fmt::format("{}, {}", device_name(at::kCPU), count_of(at::get_num_threads(), "thread", "threads"));
  const auto note = [&](const std::string& line) { progress.line(line); };
  measured.decision = decide_products(product_features(), cache_folder(), note);
  measured.ways = product_ways();
  measured.rates = measure_gemm_rates(linear_shapes(config, tokens), measured.ways, rounds);
  return measured;
}

// The default model: small, with the proportions of large ones.
constexpr const char* kSmallModel = R"({
  "model_type": "llama", "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 1408,
  "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
  "initializer_range": 0.02, "attention_bias": false, "mlp_bias": false
})";

struct BenchArguments {
  BenchmarkOptions benchmark;
  DeviceOptions device;
  DataFlags data;
  std::string model, profile;
  at::ScalarType dtype = at::kFloat;
  std::vector<double> ratios{1, 2, 4, 8, 16, 32, 64};
  int64_t tree_tokens = 2048;
  uint64_t seed = 0;
  int64_t token_budget = 0;
  Strategy strategy = Strategy::kTreePacking;
  CheckpointActivations checkpoint_activations = CheckpointActivations::kNone;
  bool tree_only = false;
  bool strategies = false;
  double budget_fraction = 0.25;
  double loss_rate = 0.25;
  bool gemm = false;
};

Decoder load_or_make(const BenchArguments& flags, at::Device device) {
  if (!flags.model.empty()) return load_decoder(flags.model, flags.dtype, device);
  return init_decoder(parse_config(nlohmann::json::parse(kSmallModel), "the model of bench"), /*seed=*/0,
                      flags.dtype, device);
}

/// By name.
std::vector<std::pair<std::string, Trajectories>> sets_of(const BenchArguments& flags, int64_t vocab_size) {
  if (!flags.data.data.empty()) {
    DataUse use = data_use_of("", flags.benchmark.objective);
    use.vocab_size = vocab_size;
    return {{flags.data.title(), flags.data.read(use)}};
  }
  std::vector<std::pair<std::string, Trajectories>> sets;
  for (const double ratio : flags.ratios) {
    sets.emplace_back(
        fmt::format("ratio {:g}", ratio),
        with_loss(forest_of_ratio(flags.tree_tokens, ratio, vocab_size, flags.seed), flags.loss_rate));
  }
  return sets;
}

std::vector<BenchmarkSide> sides_of(const BenchArguments& flags, const Forest& forest) {
  std::vector<BenchmarkSide> sides = flags.strategies ? strategy_sides(forest, flags.budget_fraction)
                                     : flags.tree_only
                                         ? std::vector{tree_side(forest, flags.strategy, flags.token_budget)}
                                         : tree_and_packing_sides(forest, flags.strategy, flags.token_budget);
  for (BenchmarkSide& side : sides) side.plan.checkpoint_activations = flags.checkpoint_activations;
  return sides;
}

// A description of the hardware for the report.
std::string hardware_of(const BenchArguments& flags, at::Device device) {
  const std::string gpu = device.is_cpu() ? ""
                                          : fmt::format("{} ({}){}, ", device_name(device), device.str(),
                                                        flags.device.deterministic ? ", deterministic" : "");
  return fmt::format("{}{}, {}, {}{}", gpu, device_name(at::kCPU),
                     count_of(at::get_num_threads(), "thread", "threads"), dtype_name(flags.dtype),
                     flags.benchmark.cpu_seconds ? ", CPU seconds" : "");
}

nlohmann::ordered_json run_bench(BenchArguments flags, const Caller& caller) {
  const auto [device, kernels] = flags.device.open();
  const KernelScope scope(kernels);
  ESPALIER_CHECK(device.is_cpu() || !flags.benchmark.cpu_seconds,
                 "--cpu-seconds: expected --device cpu, received {}", device.str());
  std::optional<Profiler> profiler;
  if (!flags.profile.empty())
    profiler.emplace(flags.profile, device, [&caller](const nlohmann::json& figures) {
      return caller.text_of("profile", figures.dump());
    });
  check_objective_options(flags.benchmark.objective);
  if (flags.gemm) {
    ESPALIER_CHECK(device.is_cpu(), "--gemm: expected --device cpu, received {}", device.str());
    const DecoderConfig config =
        flags.model.empty() ? load_or_make(flags, device).config() : read_config(flags.model);
    const MeasuredRates measured = measure_rates(config, flags.tree_tokens, flags.benchmark.repeats);
    return json_of(measured);
  }
  const Decoder decoder = load_or_make(flags, device);
  auto data_sets = nlohmann::ordered_json::array();
  Progress progress("bench");
  for (const auto& [name, trajectories] : sets_of(flags, decoder.config().vocab_size)) {
    const Forest forest = forest_of(trajectories, {});
    const std::vector<BenchmarkSide> sides = sides_of(flags, forest);
    const auto note = [&, &set = name](const std::string& text) { progress.line(set + ": " + text); };
    flags.benchmark.profiler = data_sets.empty() && profiler ? &*profiler : nullptr;
    data_sets.emplace_back(json_of(name, benchmark(decoder, trajectories, sides, flags.benchmark, note)));
  }
  return {{"hardware", hardware_of(flags, device)},
          {"device", device.str()},
          {"compares_strategies", flags.strategies},
          {"data_sets", data_sets}};
}

constexpr auto kStrategies = std::to_array<Word<Strategy>>(
    {{"partition", Strategy::kPartition}, {"tree-packing", Strategy::kTreePacking}});
constexpr auto kCheckpoints = std::to_array<Word<CheckpointActivations>>(
    {{"none", CheckpointActivations::kNone}, {"layer", CheckpointActivations::kLayer}});

void add_strategy_flags(OptionList* list, BenchArguments* flags) {
  list->group("Strategies");
  list->add("strategies", &flags->strategies,
            "Compare all strategies, at a token budget that is a fraction of the tree",
            {.excludes = "token-budget"});
  list->add("strategy", &flags->strategy, kStrategies,
            "How trees above the token budget are divided: partition encodes each token once, tree-packing "
            "repeats prefixes",
            {.excludes = "strategies"});
  list->add("tree-only", &flags->tree_only, "Measure only the tree, for comparisons with other software",
            {.excludes = "strategies"});
  list->add("budget-fraction", &flags->budget_fraction,
            "--strategies: token budget, as a fraction of the tree tokens", {.least = 0, .most = 1});
}

void add_measurement_flags(OptionList* list, BenchArguments* flags) {
  list->group("Measurement");
  list->add(
      "gemm", &flags->gemm,
      "Measure only the matrix products of the model, with --tree-tokens tokens in --repeats rounds, and "
      "mark the implementation that this machine uses (*)");
  list->add("checkpoint-activations", &flags->checkpoint_activations, kCheckpoints,
            "Activation checkpointing of all sides: layer recomputes every layer in the backward pass, none "
            "nothing");
  list->add("repeats", &flags->benchmark.repeats, "Measured rounds; each runs every side once", {.least = 1});
  list->add("warmup", &flags->benchmark.warmup, "Steps of the tree before the measured rounds", {.least = 0});
  list->add("cpu-seconds", &flags->benchmark.cpu_seconds,
            "Measure CPU seconds instead of wall seconds, for a busy machine with --threads 1");
}

}  // namespace

Command bench_command(const Caller& caller) {
  const auto flags = std::make_shared<BenchArguments>();
  Command command{.run = [flags, &caller](const OptionList&) { return Result{run_bench(*flags, caller)}; }};
  OptionList& list = command.options;
  add_model(&list, &flags->model, "Hugging Face model folder (default: a small random model)");
  flags->data.add(&list, /*required=*/false);
  list.group("Measurement");
  list.add("ratios", &flags->ratios, "Cached-token ratios of the random trees", {.has_commas = true});
  list.add("tree-tokens", &flags->tree_tokens, "Tree tokens of the random trees", {.least = 1});
  list.add("loss-rate", &flags->loss_rate,
           "The fraction of every random trajectory, at its end, that carries loss", {.least = 0, .most = 1});
  list.add("token-budget", &flags->token_budget,
           "Maximum tokens per micro-batch, on both sides (0: as many as the trees have)", {.least = 0});
  add_strategy_flags(&list, flags.get());
  add_measurement_flags(&list, flags.get());
  add_dtype(&list, "dtype", &flags->dtype, "Precision to measure in");
  flags->device.add(&list, /*trains=*/true);
  add_objective_options(&flags->benchmark.objective, &list);
  list.group("Measurement");
  list.add("seed", &flags->seed, "Seed of the random trees");
  add_profile(&list, &flags->profile,
              "one more step of the first side on the first data, after the measurements");
  add_threads(&list);
  return command;
}

}  // namespace commands
}  // namespace espalier
