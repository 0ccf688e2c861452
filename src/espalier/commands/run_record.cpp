// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/run_record.h"

#include <filesystem>
#include <sstream>

#include "espalier/base/json_file.h"
#include "espalier/train/run/resume.h"
#include "espalier/train/run/run_state.h"

namespace espalier::commands {
namespace {

constexpr const char* kRunFile = "run.json";

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

RunFile run_record(const RunStart& start, const std::string& repeats, const std::string& version) {
  RunState state = run_state_of(start.trajectories, start.options);
  if (!start.options.trains_adapter()) add_source(start.options, &state);
  if (start.held_out != nullptr)
    state.evaluation = EvaluationState{.data_hashes = content_hashes(start.held_out->trajectories)};
  if (!repeats.empty()) {
    const std::filesystem::path file = std::filesystem::path(repeats) / kRunFile;
    const auto before = read_json_file<nlohmann::ordered_json>(file);
    check_repeats(state_from_json(before.at("state"), file.string()), state, start.options);
  }
  const nlohmann::ordered_json record = {{"program", lines_of(version)},
                                         {"processes", start.options.group->size()},
                                         {"folder", std::filesystem::current_path().string()},
                                         {"state", to_json(state)}};
  return {kRunFile, record.dump(2) + "\n"};
}

}  // namespace espalier::commands
