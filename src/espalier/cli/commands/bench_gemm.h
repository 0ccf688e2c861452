// SPDX-License-Identifier: Apache-2.0
// espalier bench --gemm: how fast this machine multiplies the model's matrices, and which products it takes.
#pragma once

#include <cstdint>
#include <string>

#include "espalier/config/config.h"

namespace espalier::cli {

struct GemmFlags {
  int64_t rows;    // tokens
  int64_t rounds;  // of the measurement
  bool json;
};

/// Measures and prints a table with a row for each linear map and part of it, and the choice with its reason.
/// Returns the table as text, whatever is printed.
std::string bench_gemm(const DecoderConfig& config, const GemmFlags& flags);

}  // namespace espalier::cli
