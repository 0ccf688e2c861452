// Checkpoints of a run: RUN/checkpoints/step_N/, each a Hugging Face model folder with the optimiser's state.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "espalier/train/optimizer.h"

namespace espalier {

/// Files of a step folder beside the model: optimizer.safetensors and trainer_state.json. For models saved in
/// another dtype than they are trained in, resume.safetensors holds the exact weights.
struct CheckpointOptions {
  std::filesystem::path run_folder;
  std::filesystem::path source_model;  // folder that the run started from: names, sharding, tokenizer
  at::ScalarType save_dtype = at::kFloat;
};

/// Writes step_N beside its final name, makes it durable and renames it: a step folder is whole or absent.
std::filesystem::path save_checkpoint(const CheckpointOptions& options, int64_t step, const Decoder& decoder,
                                      const Optimizer& optimizer,
                                      const nlohmann::ordered_json& trainer_state);

/// The step folder with the highest N, if any. Unfinished temporaries are passed over.
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& run_folder);

/// trainer_state.json of a step folder; throws InputError when it is missing or not valid.
nlohmann::json read_trainer_state(const std::filesystem::path& checkpoint);

/// Weights and optimiser state as they were when the checkpoint was written, bit for bit.
void load_checkpoint(const std::filesystem::path& checkpoint, Decoder* decoder, Optimizer* optimizer);

}  // namespace espalier
