// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/bench_gemm.h"

#include <ATen/Parallel.h>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/measure/calibrate.h"
#include "espalier/measure/gemm_rates.h"
#include "espalier/measure/product_decision.h"
#include "espalier/runtime/device.h"
#include "espalier/runtime/progress.h"

namespace espalier::cli {
namespace {

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

// FLOP/s over all parts of all maps, each once.
double whole_rate(const MeasuredRates& measured, size_t way) {
  double flops = 0, seconds = 0;
  for (const GemmRates& rates : measured.rates) {
    const LinearShape& shape = rates.shape;
    const double part = 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.in * shape.out);
    flops += part;
    seconds += part / rates.flops_per_second(way);
  }
  return flops / seconds;
}

std::string table_of(const MeasuredRates& measured) {
  std::string text = "| GFLOP/s | rows x in x out |", line = "|---|---:|";
  for (const ProductWay& way : measured.ways) {
    text += fmt::format(" {}{} |", way.name(), is_chosen(way, measured.decision.choice) ? " *" : "");
    line += "---:|";
  }
  text += "\n" + line + "\n";
  for (const GemmRates& rates : measured.rates) {
    text += fmt::format("| {}, {} | {} x {} x {} |", rates.shape.name, to_string(rates.part),
                        rates.shape.rows, rates.shape.in, rates.shape.out);
    for (size_t way = 0; way < measured.ways.size(); ++way) {
      text += fmt::format(" {:.1f} |", rates.flops_per_second(way) / 1e9);
    }
    text += "\n";
  }
  text += "| all | |";
  for (size_t way = 0; way < measured.ways.size(); ++way)
    text += fmt::format(" {:.1f} |", whole_rate(measured, way) / 1e9);
  return text + fmt::format("\n\n\\* This machine's choice: {} ({})\n", to_string(measured.decision.choice),
                            measured.decision.reason);
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

}  // namespace

std::string bench_gemm(const DecoderConfig& config, const GemmFlags& flags) {
  Progress progress("bench");
  MeasuredRates measured;
  measured.hardware =
      fmt::format("{}, {}", device_name(at::kCPU), count_of(at::get_num_threads(), "thread", "threads"));
  const auto note = [&](const std::string& line) { progress.line(line); };
  measured.decision = decide_products(product_features(), cache_folder(), note);
  measured.ways = product_ways();
  measured.rates = measure_gemm_rates(linear_shapes(config, flags.rows), measured.ways, flags.rounds);
  const std::string text = fmt::format("{}\n\n{}", measured.hardware, table_of(measured));
  fmt::print("{}", flags.json ? json_of(measured).dump(2) + "\n" : text);
  return text;
}

}  // namespace espalier::cli
