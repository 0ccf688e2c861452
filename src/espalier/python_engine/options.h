// SPDX-License-Identifier: Apache-2.0
// The options of the Engine, shared with the command line: same names, values, checks and defaults.
#pragma once

#include "espalier/measure/device_options.h"
#include "espalier/measure/planning.h"
#include "espalier/python_engine/engine.h"
#include "espalier/sample/sampler.h"
#include "espalier/train/flags.h"
#include "espalier/train/train_options.h"

namespace espalier::python_engine {

struct EngineOptions {
  TrainOptions train;
  Planning planning;
  DeviceOptions device;
  int64_t prefix_cache = 0;  // bytes
  LoraFlags lora;            // of which `train` has what they ask for, once they are parsed

  void add(OptionList* list);
};

/// All throw InputError for an unknown option, listing the known ones, or an invalid value, with expected and
/// received. `threads` takes effect immediately.
EngineOptions parse_engine_options(const NamedTexts& texts);
ObjectiveOptions parse_objective_options(const NamedTexts& texts);
SamplingFlags parse_sampling_options(const NamedTexts& texts);

}  // namespace espalier::python_engine
