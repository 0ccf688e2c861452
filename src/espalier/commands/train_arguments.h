// SPDX-License-Identifier: Apache-2.0
// What `espalier train` is called with.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/options.h"
#include "espalier/commands/data_flags.h"
#include "espalier/commands/mix_flags.h"
#include "espalier/measure/device_options.h"
#include "espalier/measure/planning.h"
#include "espalier/train/flags.h"
#include "espalier/train/run/evaluation.h"
#include "espalier/train/train_options.h"

namespace espalier::commands {

struct TrainArguments {
  DataFlags data;
  MixFlags mix;
  Planning planning;
  DeviceOptions device;
  LoraFlags lora;
  TrainOptions train;
  std::optional<at::ScalarType> save_dtype;
  std::string model, reference_model, profile;
  std::string repeats;                 // folder of the run that this one repeats; "": none
  std::vector<std::string> eval_data;  // names and patterns
  EvaluationOptions evaluation;
  int64_t context_parallel = 1;
  bool dry_run = false;

  /// Adds all of them.
  void add(OptionList* list);

  /// The flags of --data applied to the files of --eval-data.
  DataFlags held_out_data() const {
    DataFlags flags = data;
    flags.data = eval_data;
    flags.limit = 0;
    return flags;
  }
};

}  // namespace espalier::commands
