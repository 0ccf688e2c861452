// espalier bench: strategies against each other, with the FLOP bound beside what was measured.
#include "espalier/train/benchmark.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/rng.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/progress.h"
#include "espalier/model/init.h"
#include "espalier/model/weights.h"
#include "espalier/ops/device.h"
#include "espalier/tree/synth.h"

namespace espalier::cli {
namespace {

// The model that is measured when none is given: small, but with the proportions of its large relatives.
constexpr const char* kSmallModel = R"({
  "model_type": "llama", "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 1408,
  "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
  "initializer_range": 0.02, "attention_bias": false, "mlp_bias": false
})";

struct Flags {
  BenchmarkOptions benchmark;
  ObjectiveFlags objective;
  DeviceFlags device;
  std::string model, data, dtype = "float32", out, profile;
  std::vector<double> ratios{1, 2, 4, 8, 16, 32, 64};
  int64_t tree_tokens = 2048;
  int64_t token_budget = 0;
  std::string strategy = "tree-packing";
  std::string checkpoint_activations = "none";
  bool tree_only = false;
  bool strategies = false;
  double budget_fraction = 0.25;
  std::vector<double> pors{0.2, 0.35, 0.5, 0.65, 0.8, 0.92};
  int64_t flat_tokens = 24'000;
  int64_t leaves = 32;
  int64_t agent_tokens = 6'000;
  double loss_rate = 0.25;
  uint64_t seed = 0;
  int64_t limit = 0;
  bool json = false;
};

Decoder load_or_make(const Flags& flags, at::Device device) {
  const at::ScalarType dtype = parse_dtype(flags.dtype);
  if (!flags.model.empty()) return load_decoder(flags.model, dtype, device);
  std::string pattern = (std::filesystem::temp_directory_path() / "espalier-bench-XXXXXX").string();
  ESPALIER_CHECK(mkdtemp(pattern.data()) != nullptr, "{}: cannot make a temporary folder", pattern);
  const std::filesystem::path folder = pattern;
  write_text(folder / "config.json", kSmallModel);
  InitOptions init;
  init.config = folder / "config.json";
  init.out = folder / "model";
  init_model(init);
  Decoder decoder = load_decoder(init.out, dtype, device);
  std::filesystem::remove_all(folder);
  return decoder;
}

struct DataSet {
  std::string name;
  Trajectories trajectories;
};

// Loss on the last part of every trajectory, as on an agent's own turn.
Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate) {
  Trajectories trajectories;
  trajectories.offsets = Column<int64_t>(sequences.offsets);
  trajectories.input_ids = Column<int32_t>(sequences.values);
  std::vector<uint8_t> mask(sequences.values.size());
  for (int64_t r = 0; r < sequences.num_rows(); ++r) {
    const int64_t size = sequences.row_size(r);
    const int64_t trained = std::max<int64_t>(1, static_cast<int64_t>(loss_rate * static_cast<double>(size)));
    for (int64_t t = size - trained; t < size; ++t) mask[sequences.offsets[r] + t] = 1;
  }
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  return trajectories;
}

// A tree of about tree_tokens tokens whose flat / tree is near `ratio`. 1: four unrelated chains. Else three
// levels, as of agent rollouts, while nodes keep eight tokens on average; beyond that a group: one prompt
// with many responses.
Csr<int32_t> forest_of_ratio(const Flags& flags, double ratio, int64_t vocab_size) {
  SynthOptions synth;
  synth.vocab_size = vocab_size;
  synth.seed = flags.seed;
  int64_t nodes = 0;
  if (ratio <= 1) {
    synth.num_trees = 4;
    synth.depth = 1;
    nodes = 4;
  } else {
    // With equal inner nodes three levels reach 2 b^2 / (1 + b), two levels b; a quarter more leaves room for
    // leaves.
    synth.depth = 3;
    synth.branching = static_cast<int64_t>(std::ceil(0.75 * ratio)) + 1;
    nodes = 1 + synth.branching + synth.branching * synth.branching;
    if (nodes * 8 > flags.tree_tokens) {
      synth.depth = 2;
      synth.branching = static_cast<int64_t>(std::ceil(2 * ratio));
      nodes = 1 + synth.branching;
    }
    synth.target_cached_token_ratio = ratio;
  }
  synth.node_length = std::max<int64_t>(2, flags.tree_tokens / nodes);
  return synthesize(synth);
}

// One prompt with flags.leaves responses, flags.flat_tokens tokens in all, whatever the POR: the sweep of
// "Tree Training" (arXiv 2511.00413), section 3.1.
Csr<int32_t> forest_of_por(const Flags& flags, double por, int64_t vocab_size) {
  SynthOptions synth;
  synth.depth = 2;
  synth.branching = flags.leaves;
  const double tree_tokens = static_cast<double>(flags.flat_tokens) * (1 - por);
  synth.node_length = std::max<int64_t>(2, std::llround(tree_tokens / static_cast<double>(1 + flags.leaves)));
  synth.fixed_node_length = true;
  synth.vocab_size = vocab_size;
  synth.target_por = por;
  synth.seed = flags.seed;
  return synthesize(synth);
}

// A complete tree of about flags.agent_tokens tokens: rollouts that branch at every turn.
Csr<int32_t> branching_rollouts(const Flags& flags, int64_t depth, int64_t branching, int64_t vocab_size) {
  SynthOptions synth;
  synth.depth = depth;
  synth.branching = branching;
  int64_t nodes = 0;
  for (int64_t level = 0, width = 1; level < depth; ++level, width *= branching) nodes += width;
  synth.node_length = std::max<int64_t>(2, flags.agent_tokens / nodes);
  synth.end_inside = 0.5;
  synth.vocab_size = vocab_size;
  synth.seed = flags.seed;
  return synthesize(synth);
}

// One long conversation of about flags.agent_tokens tokens with two answers at each of its turns, of which
// the second goes on: every answer ends a trajectory.
Csr<int32_t> conversation(const Flags& flags, int64_t vocab_size) {
  constexpr int64_t kTurns = 12;
  Rng rng(flags.seed, 0xc0);
  const int64_t length = std::max<int64_t>(2, flags.agent_tokens / (3 * kTurns));
  std::vector<int32_t> path;
  const auto extend = [&](std::vector<int32_t> tokens, int64_t first_token) {
    tokens.push_back(static_cast<int32_t>(first_token));
    for (int64_t t = 1; t < length; ++t) tokens.push_back(static_cast<int32_t>(rng.below(vocab_size)));
    return tokens;
  };
  Csr<int32_t> rows;
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    path = extend(std::move(path), rng.below(vocab_size));
    rows.push_row(extend(path, 0));
    path = extend(std::move(path), 1);
    rows.push_row(path);
  }
  return rows;
}

std::vector<DataSet> data_sets(const Flags& flags, int64_t vocab_size) {
  std::vector<DataSet> sets;
  const auto add = [&](const std::string& name, const Csr<int32_t>& sequences) {
    sets.push_back({name, with_loss(sequences, flags.loss_rate)});
  };
  if (!flags.data.empty()) {
    ReadOptions read;
    read.vocab_size = vocab_size;
    read.max_rows = flags.limit;
    const std::string name = std::filesystem::path(flags.data).filename();
    sets.push_back({name, read_trajectories(flags.data, read)});
  } else if (!flags.strategies) {
    for (const double ratio : flags.ratios) {
      add(fmt::format("ratio {:g}", ratio), forest_of_ratio(flags, ratio, vocab_size));
    }
  } else {
    for (const double por : flags.pors) {
      add(fmt::format("POR {:g}", por), forest_of_por(flags, por, vocab_size));
    }
    add("rollouts, 3 ways x 4 turns", branching_rollouts(flags, 4, 3, vocab_size));
    add("rollouts, 2 ways x 6 turns", branching_rollouts(flags, 6, 2, vocab_size));
    add("conversation, 12 turns", conversation(flags, vocab_size));
  }
  return sets;
}

struct Measured {
  std::string name;
  BenchmarkResult result;
};

// Of tree_and_packing_sides.
std::string ratio_table(const std::vector<Measured>& all) {
  std::string text =
      "| flat tokens | tree tokens | flat / tree | tree s | packing s | speed-up | low .. high | bound | "
      "share of bound | tree TFLOP/s "
      "| packing TFLOP/s |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const auto& [name, result] : all) {
    const SideResult &tree = result.sides.front(), &packing = result.sides.back();
    text += fmt::format(
        "| {} | {} | {:.2f} | {:.3f} | {:.3f} | {:.2f} | {:.2f} .. {:.2f} | {:.2f} | {:.3f} | {:.3f} | "
        "{:.3f} |\n",
        with_commas(result.flat_tokens), with_commas(result.tree_tokens), result.cached_token_ratio,
        tree.seconds, packing.seconds, tree.speedup, tree.speedup_low, tree.speedup_high, tree.bound,
        tree.share_of_bound, tree.tflops_per_second, packing.tflops_per_second);
  }
  return text;
}

// Is the budget above what was asked for because a trajectory is longer?
bool is_raised(const Measured& measured, const SideResult& side) {
  const std::vector<SideResult>& sides = measured.result.sides;
  const auto partition = std::find_if(sides.begin(), sides.end(), [](const SideResult& other) {
    return other.side.plan.strategy == Strategy::kPartition;
  });
  return &side != &sides.front() && partition != sides.end() &&
         side.side.plan.token_budget > partition->side.plan.token_budget;
}

// Of strategy_sides.
std::string strategy_table(const std::vector<Measured>& all) {
  std::string text =
      "| data | POR | flat tokens | tree tokens | strategy | token budget | micro-batches | encoded tokens | "
      "ERR | seconds | speed-up over packing | low .. high | bound of the plan | share of it | bound of the "
      "whole tree | speed / whole tree | working memory | peak memory |\n"
      "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  bool raised = false;
  for (const Measured& measured : all) {
    const BenchmarkResult& result = measured.result;
    for (const SideResult& side : result.sides) {
      const bool mark = is_raised(measured, side);
      raised |= mark;
      text += fmt::format(
          "| {} | {:.2f} | {} | {} | {} | {}{} | {} | {} | {:.2f} | {:.3f} | {:.2f} | {:.2f} .. {:.2f} | "
          "{:.2f} "
          "| {:.2f} | {:.2f} | {:.3f} | {} | {} |\n",
          measured.name, result.por, with_commas(result.flat_tokens), with_commas(result.tree_tokens),
          side.side.name, with_commas(side.side.plan.token_budget), mark ? "*" : "",
          with_commas(side.micro_batches), with_commas(side.encoded_tokens), side.err, side.seconds,
          side.speedup, side.speedup_low, side.speedup_high, side.bound, side.share_of_bound,
          result.sides.front().bound, side.relative_speed,
          human_bytes(static_cast<double>(side.working_bytes)),
          human_bytes(static_cast<double>(side.peak_bytes)));
    }
  }
  if (raised) {
    text +=
        "\n\\* The longest trajectory: neither tree packing nor sequence packing can run at the budget of "
        "partition.\n";
  }
  return text;
}

// Of tree_side alone.
std::string tree_table(const std::vector<Measured>& all) {
  std::string text =
      "| flat tokens | tree tokens | flat / tree | micro-batches | encoded tokens | tree s | bound | tree "
      "TFLOP/s | loss |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const auto& [name, result] : all) {
    const SideResult& tree = result.sides.front();
    text += fmt::format("| {} | {} | {:.2f} | {} | {} | {:.3f} | {:.2f} | {:.3f} | {:.6f} |\n",
                        with_commas(result.flat_tokens), with_commas(result.tree_tokens),
                        result.cached_token_ratio, with_commas(tree.micro_batches),
                        with_commas(tree.encoded_tokens), tree.seconds, tree.bound, tree.tflops_per_second,
                        tree.loss);
  }
  return text;
}

nlohmann::ordered_json tree_json(const Measured& measured) {
  const BenchmarkResult& result = measured.result;
  const SideResult& tree = result.sides.front();
  return {{"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"cached_token_ratio", result.cached_token_ratio},
          {"micro_batches", tree.micro_batches},
          {"encoded_tokens", tree.encoded_tokens},
          {"tree_seconds", tree.seconds},
          {"bound", tree.bound},
          {"tree_tflops_per_second", tree.tflops_per_second},
          {"loss", tree.loss},
          {"grad_norm", tree.grad_norm}};
}

nlohmann::ordered_json ratio_json(const Measured& measured) {
  const BenchmarkResult& result = measured.result;
  const SideResult &tree = result.sides.front(), &packing = result.sides.back();
  return {{"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"cached_token_ratio", result.cached_token_ratio},
          {"tree_seconds", tree.seconds},
          {"packing_seconds", packing.seconds},
          {"speedup", tree.speedup},
          {"speedup_low", tree.speedup_low},
          {"speedup_high", tree.speedup_high},
          {"bound", tree.bound},
          {"share_of_bound", tree.share_of_bound},
          {"tree_tflops_per_second", tree.tflops_per_second},
          {"packing_tflops_per_second", packing.tflops_per_second},
          {"loss", tree.loss},
          {"grad_norm", tree.grad_norm}};
}

nlohmann::ordered_json strategy_json(const Measured& measured, const SideResult& side) {
  const BenchmarkResult& result = measured.result;
  return {{"data", measured.name},
          {"por", result.por},
          {"flat_tokens", result.flat_tokens},
          {"tree_tokens", result.tree_tokens},
          {"longest_trajectory", result.longest_trajectory},
          {"side", side.side.name},
          {"strategy", to_string(side.side.plan.strategy)},
          {"token_budget", side.side.plan.token_budget},
          {"micro_batches", side.micro_batches},
          {"encoded_tokens", side.encoded_tokens},
          {"err", side.err},
          {"seconds", side.seconds},
          {"speedup", side.speedup},
          {"speedup_low", side.speedup_low},
          {"speedup_high", side.speedup_high},
          {"bound", side.bound},
          {"share_of_bound", side.share_of_bound},
          {"whole_tree_bound", result.sides.front().bound},
          {"relative_speed", side.relative_speed},
          {"working_bytes", side.working_bytes},
          {"peak_bytes", side.peak_bytes}};
}

std::vector<BenchmarkSide> plain_sides(const Flags& flags, const Forest& forest) {
  if (flags.strategies) return strategy_sides(forest, flags.budget_fraction);
  const Strategy strategy = parse_strategy(flags.strategy);
  if (flags.tree_only) return {tree_side(forest, strategy, flags.token_budget)};
  return tree_and_packing_sides(forest, strategy, flags.token_budget);
}

std::vector<BenchmarkSide> sides_of(const Flags& flags, const Forest& forest) {
  std::vector<BenchmarkSide> sides = plain_sides(flags, forest);
  for (BenchmarkSide& side : sides)
    side.plan.checkpoint_activations = parse_checkpoint_activations(flags.checkpoint_activations);
  return sides;
}

std::string table_of(const Flags& flags, const std::vector<Measured>& all) {
  return flags.strategies ? strategy_table(all) : flags.tree_only ? tree_table(all) : ratio_table(all);
}

nlohmann::ordered_json rows_of(const Flags& flags, const std::vector<Measured>& all) {
  auto rows = nlohmann::ordered_json::array();
  for (const Measured& measured : all) {
    if (!flags.strategies) rows.push_back(flags.tree_only ? tree_json(measured) : ratio_json(measured));
    for (const SideResult& side : measured.result.sides) {
      if (flags.strategies) rows.push_back(strategy_json(measured, side));
    }
  }
  return rows;
}

// What was measured on.
std::string hardware_of(const Flags& flags, at::Device device) {
  const std::string gpu = device.is_cpu() ? ""
                                          : fmt::format("{} ({}){}, ", device_name(device), device.str(),
                                                        flags.device.deterministic ? ", deterministic" : "");
  return fmt::format("{}{}, {} threads, {}{}", gpu, device_name(at::kCPU), at::get_num_threads(), flags.dtype,
                     flags.benchmark.cpu_seconds ? ", CPU seconds" : "");
}

void run(Flags flags) {
  const at::Device device = flags.device.open();
  ESPALIER_CHECK(device.is_cpu() || !flags.benchmark.cpu_seconds,
                 "--cpu-seconds: expected --device cpu, received {}", device.str());
  std::optional<Profiler> profiler;
  if (!flags.profile.empty()) profiler.emplace(flags.profile, device);
  flags.benchmark.objective = flags.objective.options();
  const Decoder decoder = load_or_make(flags, device);
  std::vector<Measured> all;
  Progress progress("bench");
  for (const DataSet& set : data_sets(flags, decoder.config().vocab_size)) {
    const Forest forest = forest_of(set.trajectories, {});
    const std::vector<BenchmarkSide> sides = sides_of(flags, forest);
    const auto note = [&](const std::string& text) { progress.line(fmt::format("{}: {}", set.name, text)); };
    flags.benchmark.profiler = all.empty() && profiler ? &*profiler : nullptr;
    all.push_back({set.name, benchmark(decoder, set.trajectories, sides, flags.benchmark, note)});
  }
  const std::string hardware = hardware_of(flags, device);
  const std::string text = fmt::format("{}\n\n{}", hardware, table_of(flags, all));
  if (!flags.out.empty()) write_text(flags.out, text);
  if (!flags.json) {
    fmt::print("{}", text);
    return;
  }
  const nlohmann::ordered_json json = {
      {"hardware", hardware}, {"device", device.str()}, {"rows", rows_of(flags, all)}};
  fmt::print("{}\n", json.dump(2));
}

void add_strategy_flags(CLI::App* command, Flags* flags, CLI::Option* token_budget) {
  auto* strategies = command->add_flag("--strategies", flags->strategies,
                                       "Compare all strategies at a part of the tree's tokens");
  strategies->excludes(token_budget);
  command
      ->add_option("--strategy", flags->strategy,
                   "How trees over the token budget are cut: partition encodes each token once, tree-packing "
                   "repeats prefixes")
      ->check(CLI::IsMember({"partition", "tree-packing"}))
      ->capture_default_str()
      ->excludes(strategies);
  command
      ->add_flag("--tree-only", flags->tree_only,
                 "Measure the tree alone, for comparisons with something else than sequence packing")
      ->excludes(strategies);
  command
      ->add_option("--budget-fraction", flags->budget_fraction,
                   "--strategies: token budget, as a part of the tree tokens")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--pors", flags->pors, "--strategies: potential overlap ratios of trees of one prompt")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("0.2,0.35,0.5,0.65,0.8,0.92");
  command->add_option("--flat-tokens", flags->flat_tokens, "--strategies: flat tokens of these trees")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--leaves", flags->leaves, "--strategies: trajectories of these trees")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--agent-tokens", flags->agent_tokens,
                   "--strategies: tree tokens of the trees that branch at every turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

}  // namespace

void add_bench(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure strategies against sequence packing, interleaved, with the FLOP bound");
  command->footer(
      "All sides run the same engine on the same trajectories, forward and backward, in turns; figures are "
      "medians. The bound is FLOPs(flat) / FLOPs(plan). Without --data, random trees are measured; without "
      "--model, a small random llama.\n"
      "By default trees against sequence packing at each of --ratios; with --tree-only, without sequence "
      "packing. With --strategies, the whole tree in one micro-batch, partition and tree packing against "
      "sequence packing, at a token budget that is a part of the tree.");
  auto flags = std::make_shared<Flags>();
  add_model(command, &flags->model, "Hugging Face model folder (default: a small random model)");
  command->add_option("--data", flags->data, "Trajectories to measure on, instead of random trees");
  command->add_option("--ratios", flags->ratios, "Cached-token ratios of the random trees")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("1,2,4,8,16,32,64");
  command->add_option("--limit", flags->limit, "Use the first N trajectories of --data only (0: all)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--tree-tokens", flags->tree_tokens, "Tree tokens of the random trees")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--loss-rate", flags->loss_rate, "Last part of every random trajectory that carries loss")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  auto* token_budget =
      command
          ->add_option("--token-budget", flags->token_budget,
                       "Most tokens in one micro-batch, on both sides (0: as many as the trees have)")
          ->check(CLI::NonNegativeNumber)
          ->capture_default_str();
  add_strategy_flags(command, flags.get(), token_budget);
  command
      ->add_option(
          "--checkpoint-activations", flags->checkpoint_activations,
          "Compute activations inside every layer again in the backward pass, on all sides: layer, or none")
      ->check(CLI::IsMember({"none", "layer"}))
      ->capture_default_str();
  command->add_option("--repeats", flags->benchmark.repeats, "Measured rounds: every side once")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--warmup", flags->benchmark.warmup, "Steps of the tree before them")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--cpu-seconds", flags->benchmark.cpu_seconds,
                    "Measure CPU seconds instead of wall seconds: for a busy machine, with --threads 1");
  add_dtype(command, &flags->dtype, "Precision to measure in");
  flags->device.add(command, /*trains=*/true);
  flags->objective.add(command);
  command->add_option("--seed", flags->seed, "Of the random trees")->capture_default_str();
  command->add_option("-o,--out", flags->out, "Also write the table to this file");
  add_profile(command, &flags->profile,
              "one more step of the first side on the first data, after what is measured");
  command->add_flag("--json", flags->json, "Print JSON");
  add_threads(command);
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
