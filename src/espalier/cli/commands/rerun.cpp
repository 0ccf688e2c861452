// SPDX-License-Identifier: Apache-2.0
// espalier rerun.
#include "espalier/cli/commands/rerun.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"
#include "espalier/base/output.h"
#include "espalier/base/units.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/toml_config.h"
#include "espalier/train/run/resume.h"
#include "espalier/train/run/run_state.h"

namespace espalier::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRunFile = "run.json";

using Json = nlohmann::ordered_json;

// Flags of a run that would write where the run itself has written.
constexpr auto kNotRepeated = std::to_array<std::string_view>(
    {"out", "rescue-dir", "publish", "publish-every", "publish-command", "profile", "profile-step"});

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

Json read_record(const fs::path& run) {
  const fs::path file = run / kRunFile;
  ESPALIER_CHECK(fs::exists(file),
                 "rerun: {}: expected a run, whose folder has {}; found none (older versions wrote none)",
                 run.string(), kRunFile);
  Json record = read_json_file<Json>(file);
  ESPALIER_CHECK(record.is_object() && record.contains("state") && record.contains("program") &&
                     record["program"].is_array() && record.contains("folder") &&
                     record["folder"].is_string(),
                 "{}: expected program, folder and state of a run", file.string());
  return record;
}

// Names the first property of the program that differs.
void check_program(const Json& record, const std::string& version, bool may_differ) {
  const Json &before = record["program"], now = lines_of(version);
  for (size_t i = 0; i < std::max(before.size(), now.size()); ++i) {
    const std::string was = i < before.size() ? before[i].dump() : "none",
                      is = i < now.size() ? now[i].dump() : "none";
    if (was == is) continue;
    ESPALIER_CHECK(may_differ,
                   "rerun: the run was made by a program with {}, this one has {}; use that one, or pass "
                   "--other-program for a run that may differ in its last bits",
                   was, is);
    log_line("note: the run was made by a program with {}, this one has {}", was, is);
  }
}

// Older versions recorded none.
int64_t processes_of(const Json& record) {
  return record.value("processes", int64_t{1});
}

struct RerunArguments {
  std::string run, out;
  bool other_program = false;
  const Group* group = nullptr;  // nullptr: one process
};

int rerun(const RerunArguments& flags, const std::function<std::string()>& version) {
  const fs::path run = fs::absolute(flags.run), out = fs::absolute(flags.out);
  const Json record = read_record(run);
  check_program(record, version(), flags.other_program);
  const int64_t before = processes_of(record), now = flags.group == nullptr ? 1 : flags.group->size();
  ESPALIER_CHECK(before == now,
                 "rerun: the run was made by {}, this is one of {}: expected as many, or `espalier rerun`, "
                 "which starts them",
                 count_of(before, "process", "processes"), now);
  Command train = train_command(version, flags.group);
  NamedTexts texts = read_config_file(train, (run / "config.toml").string());
  const fs::path mix = run / "mix.toml";
  std::erase_if(texts, [&](const auto& flag) {
    return std::ranges::find(kNotRepeated, flag.first) != kNotRepeated.end() ||
           (flag.first == "mix" && fs::exists(mix));
  });
  texts.emplace_back("out", out.string());
  texts.emplace_back("repeats", run.string());
  if (fs::exists(mix)) texts.emplace_back("mix", mix.string());
  std::error_code error;
  fs::current_path(record["folder"].get<std::string>(), error);
  ESPALIER_CHECK(!error, "rerun: the folder in which the run was started, {}: {}",
                 record["folder"].get<std::string>(), error.message());
  train.options.set(texts);
  return train.run(train.options);
}

}  // namespace

RunFile run_record(const RunStart& start, const std::string& repeats, const std::string& version) {
  RunState state = run_state_of(start.trajectories, start.options);
  if (!start.options.trains_adapter()) add_source(start.options, &state);
  if (start.held_out != nullptr)
    state.evaluation = EvaluationState{.data_hashes = content_hashes(start.held_out->trajectories)};
  if (!repeats.empty()) {
    const std::string file = (fs::path(repeats) / kRunFile).string();
    check_repeats(state_from_json(read_record(repeats)["state"], file), state, start.options);
  }
  const Json record = {{"program", lines_of(version)},
                       {"processes", start.options.group->size()},
                       {"folder", fs::current_path().string()},
                       {"state", to_json(state)}};
  return {kRunFile, record.dump(2) + "\n"};
}

Command rerun_command(const std::function<std::string()>& version, const Group* group) {
  const auto flags = std::make_shared<RerunArguments>();
  flags->group = group;
  Command command{
      .name = "rerun",
      .summary = kSummaryOfRerun,
      .closing =
          "The flags are those of the run's config.toml, without --rescue-dir, --publish and "
          "--profile; rates and matrix products are those of its cost_model.json. Rows, model, "
          "adapter and this program are compared with its run.json: what has changed is named, "
          "and nothing is run. A run of several processes is repeated by as many. On a machine "
          "with the same instruction set and number of threads the checkpoints are the same to the "
          "bit.\n\nExample:\n"
          "  espalier rerun runs/a --out runs/a-again",
      .run = [flags, version](const OptionList&) { return rerun(*flags, version); },
      .has_config = false,
      .hand_over =
          [flags](const std::vector<std::string>& arguments) {
            const int64_t processes = processes_of(read_record(flags->run));
            if (processes > 1) start_processes(processes, "rerun", arguments);
          }};
  OptionList& list = command.options;
  list.group(kDataGroup);
  list.add("RUN", &flags->run, "Folder of the run to repeat",
           {.path = PathKind::kFolder, .required = true, .stands_alone = true});
  list.add("out", &flags->out, "Folder of the new run",
           {.letter = 'o', .path = PathKind::kFolder, .group = kOutputGroup, .required = true});
  list.add(
      "other-program", &flags->other_program,
      "Run even if version, commit, LibTorch or instruction set of the program differ; says what differs");
  return command;
}

}  // namespace espalier::cli
