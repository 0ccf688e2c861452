// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/run_settings.h"

#include <utility>
#include <vector>

#include "espalier/model/weights/tensor_bytes.h"

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

}  // namespace espalier
