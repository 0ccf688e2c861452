// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/run_state.h"

#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/hash.h"
#include "espalier/base/json_file.h"
#include "espalier/data/trajectories.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/run/checkpoint.h"
#include "espalier/train/run/epochs.h"

namespace espalier {
namespace {

// Sources in order, each with its number of rows.
nlohmann::ordered_json mix_settings(const std::vector<MixSource>& mix) {
  auto sources = nlohmann::ordered_json::array();
  for (const MixSource& source : mix) {
    nlohmann::ordered_json settings = {
        {"name", source.name}, {"weight", source.weight}, {"rows", source.num_rows}};
    settings.update(objective_settings(source.objective));
    sources.push_back(std::move(settings));
  }
  return sources;
}

using Json = nlohmann::ordered_json;

// Incremented when the meaning of the file changes. The oldest files have no format.
constexpr int64_t kFormat = 5;  // 5: files of ranks beside it (model/weights/rank_files.h)

// An integer >= `least` that fits int64_t. nlohmann::json stores larger ones as unsigned and would convert
// them with wrap-around.
int64_t integer(const Json& json, const char* key, int64_t least, const std::string& file) {
  const Json value = json.contains(key) ? json[key] : Json();
  const bool fits =
      value.is_number_integer() &&
      !(value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) &&
      value.get<int64_t>() >= least;
  ESPALIER_CHECK(fits, "{}: {}: expected a whole number of at least {}, received {}", file, key, least,
                 value.dump());
  return value.get<int64_t>();
}

std::map<std::string, std::string> hashes(const Json& json, const char* key, const std::string& file) {
  std::map<std::string, std::string> result;
  if (!json.contains(key)) return result;
  ESPALIER_CHECK(json[key].is_object(), "{}: {}: expected an object, received {}", file, key,
                 json[key].dump());
  for (const auto& [field, value] : json[key].items()) {
    ESPALIER_CHECK(value.is_string(), "{}: {}.{}: expected text, received {}", file, key, field,
                   value.dump());
    result[field] = value.get<std::string>();
  }
  return result;
}

std::optional<RunSettings> settings(const Json& json, const std::string& file) {
  if (!json.contains("settings")) return std::nullopt;
  const auto object = [&](const char* key) {
    const Json value = json["settings"].is_object() ? json["settings"].value(key, Json()) : Json();
    ESPALIER_CHECK(value.is_object(), "{}: settings.{}: expected an object, received {}", file, key,
                   value.dump());
    return value;
  };
  return RunSettings{.fixed = object("fixed"), .adjustable = object("adjustable")};
}

std::optional<EvaluationState> evaluation(const Json& json, const std::string& file) {
  if (!json.contains("evaluation")) return std::nullopt;
  const Json& object = json["evaluation"];
  ESPALIER_CHECK(object.is_object(), "{}: evaluation: expected an object, received {}", file, object.dump());
  EvaluationState state;
  state.step = integer(object, "step", 0, file);
  state.best_step = integer(object, "best_step", 0, file);
  state.since_best = integer(object, "since_best", 0, file);
  const Json loss = object.value("best_loss", Json());
  ESPALIER_CHECK(loss.is_number(), "{}: evaluation.best_loss: expected a number, received {}", file,
                 loss.dump());
  state.best_loss = loss.get<double>();
  state.data_hashes = hashes(object, "data_hashes", file);
  return state;
}

}  // namespace

RunSettings run_settings(const TrainOptions& options) {
  TrainOptions copy = options;
  LoraOptions lora = options.lora.value_or(LoraOptions{});
  OptionList list;
  add_plan_options(&copy.plan, &list);
  add_lora_options(&lora, &list);
  add_freeze_pad_embedding(&list, &copy.freeze_pad_embedding);
  add_dtype(&list, "dtype", &copy.dtype, "");
  add_dtype(&list, "save-dtype", &copy.save_dtype, "");
  add_optimizer_options(&copy, &list, /*schedules=*/true);
  add_step_options(&copy, &list);
  nlohmann::ordered_json fixed = objective_settings(options.objective);
  if (!options.mix.empty()) fixed["mix"] = mix_settings(options.mix);
  fixed.update(list.settings());
  return {.fixed = std::move(fixed), .adjustable = {{"learning-rate", options.learning_rate}}};
}

RunState run_state_of(const Trajectories& trajectories, const TrainOptions& options) {
  RunState state{.step = 0,
                 .data_rows = trajectories.num_rows(),
                 .data_tokens = trajectories.num_tokens(),
                 .data_hashes = content_hashes(trajectories),
                 .settings = run_settings(options)};
  if (options.scheduler != SchedulerKind::kConstant) {
    state.settings->adjustable[kScheduledSteps] = total_steps(trajectories, options);
  }
  if (options.trains_adapter()) add_source(options, &state);
  if (!options.follow.empty()) state.taken.emplace();
  return state;
}

void add_source(const TrainOptions& options, RunState* state) {
  state->model_config = read_json_file<Json>(options.model / "config.json");
  state->file_hashes["model"] = weights_hash(options.model);
  if (options.adapter.empty()) return;
  state->file_hashes["adapter"] =
      hash_file(options.adapter / kAdapterConfigFile) + hash_file(options.adapter / kAdapterWeightsFile);
}

Json to_json(const RunState& state) {
  Json json = {{"format", kFormat},
               {"step", state.step},
               {"skipped_steps", state.skipped_steps},
               {"data_rows", state.data_rows},
               {"data_tokens", state.data_tokens},
               {"data_hashes", state.data_hashes}};
  if (state.settings) {
    json["settings"] = {{"fixed", state.settings->fixed}, {"adjustable", state.settings->adjustable}};
  }
  if (!state.model_config.is_null()) {
    json["model_config"] = state.model_config;
    json["file_hashes"] = state.file_hashes;
  }
  if (state.evaluation) {
    json["evaluation"] = {{"step", state.evaluation->step},
                          {"best_step", state.evaluation->best_step},
                          {"best_loss", state.evaluation->best_loss},
                          {"since_best", state.evaluation->since_best},
                          {"data_hashes", state.evaluation->data_hashes}};
  }
  if (state.taken) json["taken"] = nlohmann::json(*state.taken);
  return json;
}

RunState read_state_of_any_folder(const std::filesystem::path& checkpoint) {
  const std::string file = (checkpoint / kStateFile).string();
  return state_from_json(Json::parse(read_text(file), nullptr, /*allow_exceptions=*/false), file);
}

RunState state_from_json(const Json& json, const std::string& file) {
  ESPALIER_CHECK(json.is_object(), "{}: expected a JSON object", file);
  if (json.contains("format")) {
    const int64_t format = integer(json, "format", 1, file);
    if (format > kFormat) {
      throw NewerFormatError(
          fmt::format("{}: expected a format of at most {}, received {}: a newer Espalier wrote it", file,
                      kFormat, format));
    }
  }
  RunState state;
  state.step = integer(json, "step", 0, file);
  if (json.contains("skipped_steps")) state.skipped_steps = integer(json, "skipped_steps", 0, file);
  state.data_rows = integer(json, "data_rows", 0, file);
  state.data_tokens = integer(json, "data_tokens", 0, file);
  state.data_hashes = hashes(json, "data_hashes", file);
  state.settings = settings(json, file);
  state.file_hashes = hashes(json, "file_hashes", file);
  state.evaluation = evaluation(json, file);
  if (json.contains("taken")) state.taken = nlohmann::json(json["taken"]).get<TakenFiles>();
  state.model_config = json.value("model_config", Json());
  ESPALIER_CHECK(state.model_config.is_null() || state.model_config.is_object(),
                 "{}: model_config: expected an object, received {}", file, state.model_config.dump());
  return state;
}

RunState read_run_state(const std::filesystem::path& checkpoint) {
  RunState state = read_state_of_any_folder(checkpoint);
  const std::string file = (checkpoint / kStateFile).string();
  ESPALIER_CHECK(state.step >= 1, "{}: step: expected a whole number of at least 1, received {}", file,
                 state.step);
  ESPALIER_CHECK(step_of(checkpoint) == state.step, "{}: expected the step of the folder {}, received {}",
                 file, checkpoint.filename().string(), state.step);
  return state;
}

}  // namespace espalier
