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

/// One row per data set: of tree_and_packing_sides, or of the tree alone. With `strategies`, one per side of
/// a data set.
nlohmann::ordered_json bench_rows(bool strategies, const std::vector<Measured>& all);

}  // namespace espalier::cli
