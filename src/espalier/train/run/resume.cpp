// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/resume.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"
#include "espalier/base/manifest.h"
#include "espalier/base/units.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/optimizer/diagnosis.h"
#include "espalier/train/run/checkpoint.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Note = std::function<void(const std::string&)>;

template <typename Names>
bool is_one_of(const std::string& name, const Names& names) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Calls differs(name, before, now) for each setting whose value has changed; a missing value is null.
// `defaults`: of settings that older checkpoints do not have. A mix comes first, because it replaces settings
// of the objective.
template <class Differs>
void compare(const Json& before, const Json& now, const Json& defaults, const Differs& differs) {
  std::vector<std::string> names = {"mix"};
  for (const Json* settings : {&before, &now}) {
    for (const auto& [name, value] : settings->items()) {
      if (!is_one_of(name, names)) names.push_back(name);
    }
  }
  for (const std::string& name : names) {
    const Json old = before.value(name, defaults.value(name, Json())), value = now.value(name, Json());
    if (old != value) differs(name, old, value);
  }
}

// How refusals begin, and what they advise.
struct Words {
  const char* title;
  const char* advice;
};
constexpr Words kResume{"--resume", "resume with the same, or start a new run in another --out"};
constexpr Words kRepeat{"rerun",
                        "bring back what the run had, or start a new one with its config.toml as --config"};

constexpr const char* kNewSchedule =
    ": the learning rate continues as in a run of so many steps, and falls to 0 at the last one";

std::string shown(const Json& value, const Json& other) {
  if (value.is_null()) return "none";
  // Compared with no mix, only the number of sources is of interest.
  if (value.is_array() && other.is_null()) return count_of(std::ssize(value), "source", "sources");
  return value.dump();
}

void check_settings(const Words& words, const RunState& saved, const RunState& now, const Note& note) {
  if (!saved.settings) {
    note("the checkpoint has no settings of its run (an older Espalier wrote it): they are not compared");
    return;
  }
  const RunSettings defaults = run_settings(TrainOptions{});
  const auto refuse = [&](const std::string& name, const Json& was, const Json& is) {
    throw InputError(fmt::format("{}: {} was {} in the run, received {}; {}", words.title, name,
                                 shown(was, is), shown(is, was), words.advice));
  };
  compare(saved.settings->fixed, now.settings->fixed, defaults.fixed, refuse);
  compare(saved.settings->adjustable, now.settings->adjustable, defaults.adjustable,
          [&](const std::string& name, const Json& was, const Json& is) {
            if (was.is_null() || is.is_null()) return;  // not written by an older Espalier
            note(fmt::format("{} was {}, and is {} from here on{}", name, was.dump(), is.dump(),
                             name == kScheduledSteps ? kNewSchedule : ""));
          });
}

// Keys of config.json that do not affect what the model computes.
constexpr std::string_view kFreeInConfig[] = {"torch_dtype", "dtype", "transformers_version", "_name_or_path",
                                              "use_cache"};

void check_model(const Words& words, const Json& saved, const Json& now) {
  const auto difference = config_difference(saved, now);
  if (!difference) return;
  throw InputError(
      fmt::format("{}: the run has another model: {} is {} in its config.json, in that of --model {}; {}",
                  words.title, difference->key, difference->before, difference->now, words.advice));
}

void check_files(const Words& words, const RunState& saved, const RunState& now) {
  for (const char* flag : {"model", "adapter"}) {
    const auto before = saved.file_hashes.find(flag), after = now.file_hashes.find(flag);
    const bool had = before != saved.file_hashes.end(), has = after != now.file_hashes.end();
    ESPALIER_CHECK(had == has && (!had || before->second == after->second),
                   "{}: the run began with {} --{}; {}", words.title,
                   !had  ? "no"
                   : has ? "other files in"
                         : "an",
                   flag, words.advice);
  }
}

// The columns that a run with these options reads.
std::vector<std::string> used_columns(const TrainOptions& options) {
  std::vector<std::string> columns = {"input_ids", "loss_weights", "routed_experts"};
  std::vector<ObjectiveOptions> objectives;
  for (const MixSource& source : options.mix) objectives.push_back(source.objective);
  if (objectives.empty()) objectives.push_back(options.objective);
  for (const ObjectiveOptions& objective : objectives) {
    for (const std::string& field : data_fields(*make_objective(objective))) {
      const bool is_new = std::find(columns.begin(), columns.end(), field) == columns.end();
      // The field `advantage` is stored in the column `advantages`.
      if (is_new && field != "advantage") columns.push_back(field);
    }
  }
  const bool has_groups = std::find(columns.begin(), columns.end(), "group_id") != columns.end();
  if (!has_groups && options.shuffle == Shuffle::kGroups) columns.emplace_back("group_id");
  return columns;
}

void check_data(const Words& words, const RunState& saved, const RunState& now, const TrainOptions& options,
                const Note& note) {
  ESPALIER_CHECK(saved.taken.has_value() == now.taken.has_value(), "{}: the run began with {} --follow; {}",
                 words.title, now.taken ? "no" : "a", words.advice);
  if (now.taken) return;  // its rows are compared when they are read again
  ESPALIER_CHECK(saved.data_rows == now.data_rows && saved.data_tokens == now.data_tokens,
                 "{}: the run was on {} trajectories with {} tokens, the data has {} with {}", words.title,
                 saved.data_rows, saved.data_tokens, now.data_rows, now.data_tokens);
  if (saved.data_hashes.empty()) {
    note(
        "the checkpoint has no hashes of its data (an older Espalier wrote it): only sizes are "
        "compared");
    return;
  }
  for (const std::string& column : used_columns(options)) {
    const auto before = saved.data_hashes.find(column), after = now.data_hashes.find(column);
    const bool had = before != saved.data_hashes.end(), has = after != now.data_hashes.end();
    ESPALIER_CHECK(had == has && (!had || before->second == after->second), "{}: the data's {} {}; {}",
                   words.title, column,
                   had && has ? "are not those that the run was trained on"
                   : had      ? "are missing, and the run was trained on some"
                              : "were not there when the run began",
                   words.advice);
  }
}

/// Loads checkpoints until one is intact.
class Resuming {
 public:
  Resuming(const RunNow& now, Decoder* decoder, Optimizer* optimizer, const Note& note)
      : now_(now), decoder_(decoder), optimizer_(optimizer), note_(note) {}

  /// Returns the fault of the checkpoint; "" if it was loaded. Throws InputError if it belongs to another
  /// run.
  std::string load(const fs::path& folder) const {
    std::string fault = manifest_fault(folder, folder.filename().string(), note_);
    if (!fault.empty()) return fault;
    RunState saved;
    Json config;
    try {
      saved = read_run_state(folder);
      config =
          saved.model_config.is_null() ? read_json_file<Json>(folder / "config.json") : saved.model_config;
    } catch (const NewerFormatError&) {
      throw;  // not damaged: that Espalier can continue it
    } catch (const InputError& error) {
      return error.what();
    }
    check_model(kResume, config, now_.source.config());
    check_settings(kResume, saved, now_.state, note_);
    check_files(kResume, saved, now_.state);
    check_data(kResume, saved, now_.state, now_.options, note_);
    try {
      load_checkpoint(folder, decoder_, optimizer_);
    } catch (const InputError& error) {
      return error.what();
    }
    return nonfinite_parameters(*decoder_);
  }

 private:
  const RunNow& now_;
  Decoder* decoder_;
  Optimizer* optimizer_;
  const Note& note_;
};

// Renames a damaged checkpoint, so that its step can be written again. Kept, since the user may need it.
fs::path set_aside(const fs::path& folder) {
  fs::path aside = folder.string() + ".damaged";
  for (int copy = 2; fs::exists(aside); ++copy) aside = fmt::format("{}.damaged-{}", folder.string(), copy);
  std::error_code error;
  fs::rename(folder, aside, error);
  ESPALIER_CHECK(!error, "cannot rename {} to {}: {}", folder.string(), aside.string(), error.message());
  return aside;
}

// The checkpoints of a run and those that went to its rescue folder, newest first.
std::vector<fs::path> all_checkpoints(const TrainOptions& options) {
  std::vector<fs::path> folders = checkpoints(options.out);
  if (options.rescue_dir.empty()) return folders;
  const std::vector<fs::path> rescued = checkpoints(options.rescue_dir);
  folders.insert(folders.end(), rescued.begin(), rescued.end());
  std::ranges::stable_sort(folders, std::ranges::greater{}, step_of);
  return folders;
}

}  // namespace

std::optional<ConfigDifference> config_difference(const Json& saved, const Json& now) {
  std::vector<std::string> keys;
  for (const Json* config : {&saved, &now}) {
    for (const auto& [key, value] : config->items()) keys.push_back(key);
  }
  for (const std::string& key : keys) {
    if (is_one_of(key, kFreeInConfig)) continue;
    const Json before = saved.contains(key) ? saved[key] : Json(),
               after = now.contains(key) ? now[key] : Json();
    // Compare regardless of the order of nested keys.
    if (nlohmann::json(before) != nlohmann::json(after))
      return ConfigDifference{key, before.dump(), after.dump()};
  }
  return std::nullopt;
}

void check_repeats(const RunState& saved, const RunState& now, const TrainOptions& options) {
  const Note no_note = [](const std::string&) {};
  check_model(kRepeat, saved.model_config, now.model_config);
  check_files(kRepeat, saved, now);
  check_settings(kRepeat, saved, now, no_note);
  check_data(kRepeat, saved, now, options, no_note);
  const auto held_out = [](const RunState& state) {
    return state.evaluation ? state.evaluation->data_hashes : std::map<std::string, std::string>{};
  };
  ESPALIER_CHECK(held_out(saved) == held_out(now), "{}: the rows of --eval-data have changed; {}",
                 kRepeat.title, kRepeat.advice);
}

void check_not_begun(const TrainOptions& options) {
  if (options.resume) return;
  const std::vector<fs::path> folders = all_checkpoints(options);
  if (folders.empty()) return;
  const fs::path newest = folders.front();
  throw InputError(fmt::format(
      "{} holds a run already (newest checkpoint {}): pass --resume to continue it or choose another --{}",
      newest.parent_path().parent_path().string(), newest.filename().string(),
      newest == checkpoint_folder(options.out, step_of(newest)) ? "out" : "rescue-dir"));
}

std::string trained_column_hash(const fs::path& run_folder, const std::string& column) {
  for (const fs::path& folder : checkpoints(run_folder)) {
    try {
      const RunState state = read_run_state(folder);
      const auto found = state.data_hashes.find(column);
      return found == state.data_hashes.end() ? "" : found->second;
    } catch (const InputError&) {
      continue;  // damaged: resume() reports it
    }
  }
  return "";
}

fs::path resume(const RunNow& now, Decoder* decoder, Optimizer* optimizer, const Note& maybe_note) {
  const TrainOptions& options = now.options;
  const Note note = maybe_note ? maybe_note : [](const std::string&) {};
  check_not_begun(options);
  if (!options.resume) return {};
  const std::vector<fs::path> folders = all_checkpoints(options);
  if (folders.empty()) {
    note(fmt::format("no checkpoint in {}: starting from the model", options.out.string()));
    return {};
  }
  const Resuming resuming(now, decoder, optimizer, note);
  std::vector<std::string> faults;
  for (const fs::path& folder : folders) {
    std::string fault = resuming.load(folder);
    if (!fault.empty()) {
      faults.push_back(std::move(fault));
      continue;
    }
    for (size_t i = 0; i < faults.size(); ++i) {
      note(fmt::format("warning: {} cannot be used: {}; it is kept as {}", folders[i].string(), faults[i],
                       set_aside(folders[i]).filename().string()));
    }
    if (!faults.empty()) note(fmt::format("falling back to {}", folder.string()));
    return folder;
  }
  throw InputError(fmt::format(
      "--resume: no checkpoint of {} is intact: {} cannot be used: {}{}", options.out.string(),
      folders.front().filename().string(), faults.front(),
      faults.size() > 1 ? fmt::format("; neither can the {} before it", faults.size() - 1) : std::string()));
}

}  // namespace espalier
