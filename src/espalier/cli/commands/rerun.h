// SPDX-License-Identifier: Apache-2.0
// run.json in the folder of a run: what a repetition needs beside config.toml.
#pragma once

#include <filesystem>
#include <string>

#include "espalier/train/run/run_state.h"
#include "espalier/train/train_options.h"

namespace espalier::cli {

inline constexpr const char* kRunFile = "run.json";

/// The text of run.json: the program (`version`, the text of --version), the current folder, to which paths
/// in config.toml are relative, and `state`, that of the run before its first step.
std::string run_record(const std::string& version, const RunState& state);

/// check_repeats with the state in run.json of `run`.
void check_repeats_run(const std::filesystem::path& run, const RunState& state, const TrainOptions& options);

}  // namespace espalier::cli
