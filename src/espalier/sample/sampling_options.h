// SPDX-License-Identifier: Apache-2.0
// Options of sampling, shared by the command line and Python.
#pragma once

#include <cstdint>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/sample/sampler.h"

namespace espalier {

struct SamplingOptions {
  SampleOptions options;  // stop_ids: as given by --stop-id
  bool ignore_stop_ids = false;
  bool whole_rows = false;

  /// --samples, --temperature and so on.
  void add_sampling(OptionList* list);
  /// --batch-size and --token-budget.
  void add_sizes(OptionList* list);

  /// The options with stop ids resolved: the given ones, otherwise `model_stop_ids` without ids outside the
  /// vocabulary, which can never be sampled.
  SampleOptions resolved(const std::vector<int32_t>& model_stop_ids, int64_t vocab_size) const;
};

}  // namespace espalier
