// SPDX-License-Identifier: Apache-2.0
// Options of sampling, the same in the command and in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/sample/sampler.h"

namespace espalier {

struct SamplingOptions {
  SampleOptions options;  // of which --stop-id is what was given
  bool ignore_stop_ids = false;
  bool whole_rows = false;

  /// --samples, --temperature and so on.
  void add_sampling(OptionList* list);
  /// --batch-size and --token-budget.
  void add_sizes(OptionList* list);

  /// With the stop ids that count: those that were given, or else `of_model` without those that are outside
  /// of the vocabulary, since they are never chosen.
  SampleOptions resolved(const std::vector<int32_t>& of_model, int64_t vocab_size) const;
};

}  // namespace espalier
