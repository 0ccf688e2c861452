// SPDX-License-Identifier: Apache-2.0
// Results of `espalier bench` as JSON, of which the Python package makes tables (python/espalier/printed).
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/measure/benchmark.h"

namespace espalier::cli {

/// A data set and the measurements on it.
struct Measured {
  std::string name;
  BenchmarkResult result;
};

/// The measured sides: those of tree_and_packing_sides, of strategy_sides, or tree_side alone.
enum class BenchSides { kTreeAndPacking, kStrategies, kTree };

/// One row per data set; with kStrategies one per side of a data set.
nlohmann::ordered_json bench_rows(BenchSides sides, const std::vector<Measured>& all);

}  // namespace espalier::cli
