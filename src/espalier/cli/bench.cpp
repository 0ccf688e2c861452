// espalier bench: tree training against sequence packing, with the FLOP bound beside it.
#include "espalier/train/benchmark.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/cli/commands.h"
#include "espalier/cli/flags.h"
#include "espalier/cli/progress.h"
#include "espalier/model/init.h"
#include "espalier/model/weights.h"
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
  std::string model, data, dtype = "float32", out;
  std::vector<double> ratios{1, 2, 4, 8, 16, 32, 64};
  int64_t tree_tokens = 2048;
  double loss_rate = 0.25;
  uint64_t seed = 0;
  bool json = false;
};

Decoder load_or_make(const Flags& flags) {
  const at::ScalarType dtype = parse_dtype(flags.dtype);
  if (!flags.model.empty()) return load_decoder(flags.model, dtype);
  std::string pattern = (std::filesystem::temp_directory_path() / "espalier-bench-XXXXXX").string();
  ESPALIER_CHECK(mkdtemp(pattern.data()) != nullptr, "{}: cannot make a temporary folder", pattern);
  const std::filesystem::path folder = pattern;
  write_text(folder / "config.json", kSmallModel);
  InitOptions init;
  init.config = folder / "config.json";
  init.out = folder / "model";
  init_model(init);
  Decoder decoder = load_decoder(init.out, dtype);
  std::filesystem::remove_all(folder);
  return decoder;
}

// A tree of about tree_tokens tokens whose flat / tree is near `ratio`. 1: four unrelated chains. Else three
// levels, as of agent rollouts, while nodes keep eight tokens on average; beyond that a group: one prompt
// with many responses.
Trajectories forest_of_ratio(const Flags& flags, double ratio, int64_t vocab_size) {
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
  const Csr<int32_t> sequences = synthesize(synth);
  Trajectories trajectories;
  trajectories.offsets = Column<int64_t>(sequences.offsets);
  trajectories.input_ids = Column<int32_t>(sequences.values);
  // Loss on the last part of every trajectory, as on an agent's own turn.
  std::vector<uint8_t> mask(sequences.values.size());
  for (int64_t r = 0; r < sequences.num_rows(); ++r) {
    const int64_t size = sequences.row_size(r);
    const int64_t with_loss =
        std::max<int64_t>(1, static_cast<int64_t>(flags.loss_rate * static_cast<double>(size)));
    for (int64_t t = size - with_loss; t < size; ++t) mask[sequences.offsets[r] + t] = 1;
  }
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  return trajectories;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

std::string table(const std::vector<BenchmarkRow>& rows) {
  std::string text =
      "| flat tokens | tree tokens | flat / tree | tree s | packing s | speed-up | low .. high | bound | "
      "share of bound | tree TFLOP/s "
      "| packing TFLOP/s |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
  for (const BenchmarkRow& row : rows) {
    text += fmt::format(
        "| {} | {} | {:.2f} | {:.3f} | {:.3f} | {:.2f} | {:.2f} .. {:.2f} | {:.2f} | {:.3f} | {:.3f} | "
        "{:.3f} |\n",
        with_commas(row.flat_tokens), with_commas(row.tree_tokens), row.cached_token_ratio, row.tree_seconds,
        row.packing_seconds, row.speedup, row.speedup_low, row.speedup_high, row.bound, row.share_of_bound,
        row.tree_tflops_per_second, row.packing_tflops_per_second);
  }
  return text;
}

nlohmann::ordered_json to_json(const BenchmarkRow& row) {
  return {{"flat_tokens", row.flat_tokens},
          {"tree_tokens", row.tree_tokens},
          {"cached_token_ratio", row.cached_token_ratio},
          {"tree_seconds", row.tree_seconds},
          {"packing_seconds", row.packing_seconds},
          {"speedup", row.speedup},
          {"speedup_low", row.speedup_low},
          {"speedup_high", row.speedup_high},
          {"bound", row.bound},
          {"share_of_bound", row.share_of_bound},
          {"tree_tflops_per_second", row.tree_tflops_per_second},
          {"packing_tflops_per_second", row.packing_tflops_per_second}};
}

void run(Flags flags) {
  flags.benchmark.objective = flags.objective.options();
  const Decoder decoder = load_or_make(flags);
  std::vector<BenchmarkRow> rows;
  Progress progress("bench");
  const auto measure = [&](const std::string& name, const Trajectories& trajectories) {
    rows.push_back(benchmark(decoder, trajectories, flags.benchmark, [&](const std::string& text) {
      progress.line(fmt::format("{}: {}", name, text));
    }));
  };
  if (!flags.data.empty()) {
    ReadOptions read;
    read.vocab_size = decoder.config().vocab_size;
    measure(flags.data, read_trajectories(flags.data, read));
  } else {
    for (const double ratio : flags.ratios) {
      measure(fmt::format("ratio {:g}", ratio), forest_of_ratio(flags, ratio, decoder.config().vocab_size));
    }
  }
  const std::string hardware =
      fmt::format("{}, {} threads, {}", cpu_name(), at::get_num_threads(), flags.dtype);
  const std::string text = fmt::format("{}\n\n{}", hardware, table(rows));
  if (!flags.out.empty()) write_text(flags.out, text);
  if (!flags.json) {
    fmt::print("{}", text);
    return;
  }
  nlohmann::ordered_json json = {{"hardware", hardware}, {"rows", nlohmann::ordered_json::array()}};
  for (const BenchmarkRow& row : rows) json["rows"].push_back(to_json(row));
  fmt::print("{}\n", json.dump(2));
}

}  // namespace

void add_bench(CLI::App& app, int*) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure tree training against sequence packing, interleaved, with the FLOP bound");
  command->footer(
      "Both sides run the same engine on the same trajectories, forward and backward, in turns; figures are "
      "medians. The "
      "bound is FLOPs(packing) / FLOPs(tree). Without --data, random trees at each of --ratios are measured; "
      "without "
      "--model, a small random llama.");
  auto flags = std::make_shared<Flags>();
  add_model(command, &flags->model, "Hugging Face model folder (default: a small random model)");
  command->add_option("--data", flags->data, "Trajectories to measure on, instead of random trees");
  command->add_option("--ratios", flags->ratios, "Cached-token ratios of the random trees")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("1,2,4,8,16,32,64");
  command->add_option("--tree-tokens", flags->tree_tokens, "Tree tokens of the random trees")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--loss-rate", flags->loss_rate, "Last part of every random trajectory that carries loss")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command
      ->add_option("--token-budget", flags->benchmark.token_budget,
                   "Most tokens in one micro-batch, on both sides (0: as many as the trees have)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--repeats", flags->benchmark.repeats, "Measured rounds")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--warmup", flags->benchmark.warmup, "Tree steps before them")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add_dtype(command, &flags->dtype, "Precision to measure in");
  flags->objective.add(command);
  command->add_option("--seed", flags->seed, "Of the random trees")->capture_default_str();
  command->add_option("-o,--out", flags->out, "Also write the table to this file");
  command->add_flag("--json", flags->json, "Print JSON");
  add_threads(command);
  add_config(command);
  command->callback([flags] { run(*flags); });
}

}  // namespace espalier::cli
