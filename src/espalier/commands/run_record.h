// SPDX-License-Identifier: Apache-2.0
// run.json in the folder of a run: what a repetition needs beside config.toml.
#pragma once

#include <string>

#include "espalier/train/run/evaluation.h"
#include "espalier/train/run/run_folder.h"
#include "espalier/train/train_options.h"

namespace espalier::commands {

/// What a run starts with.
struct RunStart {
  const TrainOptions& options;
  const Trajectories& trajectories;
  const HeldOut* held_out;  // nullptr: none
};

/// run.json: the program (`version`, the text of --version), the number of processes, the current folder, to
/// which paths in config.toml are relative, and the state before the first step. Throws InputError if the run
/// differs from that in the folder `repeats` (check_repeats), unless that is empty.
RunFile run_record(const RunStart& start, const std::string& repeats, const std::string& version);

}  // namespace espalier::commands
