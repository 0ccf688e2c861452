// SPDX-License-Identifier: Apache-2.0
// Where a model is asked to run, and with how many threads. Nothing here needs LibTorch.
#pragma once

#include <functional>
#include <string>

#include "espalier/base/options.h"

namespace espalier {

inline constexpr const char* kAutomaticDevice = "auto";

struct DeviceFlags {
  std::string device = "cpu";
  bool deterministic = false;

  /// `trains`: --deterministic as well.
  void add(OptionList* list, bool trains);
};

/// --threads: `set` is called when it is set to more than 0.
void add_threads(OptionList* list, const std::function<void(int)>& set);

}  // namespace espalier
