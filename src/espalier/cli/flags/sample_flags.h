// SPDX-License-Identifier: Apache-2.0
// Flags of sampling, the same in the command and in Python.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <vector>

#include "espalier/sample/sampler.h"

namespace espalier::cli {

struct SampleFlags {
  SampleOptions options;  // of which --stop-id is what was given
  bool ignore_stop_ids = false;
  bool whole_rows = false;

  /// --samples, --temperature and so on.
  void add_sampling(CLI::App* command);
  /// --batch-size and --token-budget.
  void add_sizes(CLI::App* command);

  /// With the stop ids that count: those that were given, or else `of_model` without those that are outside
  /// of the vocabulary, since they are never chosen.
  SampleOptions resolved(const std::vector<int32_t>& of_model, int64_t vocab_size) const;
};

}  // namespace espalier::cli
