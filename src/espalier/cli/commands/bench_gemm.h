// SPDX-License-Identifier: Apache-2.0
// espalier bench --gemm: rates of the model's matrix products on this machine, and which implementation it
// chooses.
#pragma once

#include <cstdint>
#include <string>

#include "espalier/config/config.h"

namespace espalier::cli {

struct GemmFlags {
  int64_t rows;    // tokens
  int64_t rounds;  // measured rounds
  bool json;
};

/// Measures and prints a table (or JSON) with a row per linear map and part of it, and the choice with its
/// reason. Returns the table as text.
std::string bench_gemm(const DecoderConfig& config, const GemmFlags& flags);

}  // namespace espalier::cli
