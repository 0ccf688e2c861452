// SPDX-License-Identifier: Apache-2.0
// What `espalier bench` measured, as Markdown tables and as JSON.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/measure/benchmark.h"

namespace espalier::cli {

/// A data set by its name, and what was measured on it.
struct Measured {
  std::string name;
  BenchmarkResult result;
};

/// Which sides were measured: those of tree_and_packing_sides, of strategy_sides, or of tree_side alone.
enum class BenchSides { kTreeAndPacking, kStrategies, kTree };

std::string bench_table(BenchSides sides, const std::vector<Measured>& all);

/// A row for each data set; with kStrategies for each of its sides.
nlohmann::ordered_json bench_rows(BenchSides sides, const std::vector<Measured>& all);

}  // namespace espalier::cli
