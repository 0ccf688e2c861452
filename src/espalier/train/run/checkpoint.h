// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a run: RUN/checkpoints/step_N/, each a Hugging Face model folder, or of a run that trains an
// adapter a folder of PEFT, with the optimiser's state.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "espalier/model/weights/weights.h"
#include "espalier/train/optimizer/optimizer.h"
#include "espalier/train/run/run_state.h"

namespace espalier {

inline constexpr const char* kStateFile = "trainer_state.json";

/// What the manifest of a checkpoint after so many steps is called, and its folder in a run: "step_N".
std::string checkpoint_name(int64_t step);

struct CheckpointOptions {
  std::filesystem::path run_folder;  // of save_checkpoint
  SourceModel source;                // what the saved model takes over beside the weights
  at::ScalarType save_dtype = at::kFloat;
};

/// Writes step_N, N being state.step, beside its final name, makes it durable and renames it: a step folder
/// is whole or absent. Beside the model of `source` with the decoder's weights in `save_dtype`, or the
/// decoder's adapter alone (model/weights/adapter_folder.h), it holds optimizer.safetensors,
/// trainer_state.json and a manifest (base/manifest.h); where save_dtype is not the dtype of what is trained,
/// resume.safetensors has the exact values. Returns the folder. Throws NonFiniteError where weights or
/// optimiser hold values that are not finite, InputError where the folder cannot be written; nothing is left
/// behind then.
std::filesystem::path save_checkpoint(const CheckpointOptions& options, const Decoder& decoder,
                                      const Optimizer& optimizer, const RunState& state);

/// The same as a folder of any name, whose parent is made if absent.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options,
                      const Decoder& decoder, const Optimizer& optimizer, const RunState& state);

/// The same in the place of a folder that may be there already: what is at `folder` is always whole, the one
/// before or this one, but for a moment in which a killed process leaves the one before beside it
/// (sweep_unfinished_checkpoints).
void replace_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options,
                        const Decoder& decoder, const Optimizer& optimizer, const RunState& state);

/// RUN/checkpoints/step_N.
std::filesystem::path checkpoint_folder(const std::filesystem::path& run_folder, int64_t step);

/// RUN/checkpoints/best: the one with the lowest loss on held-out rows. It is none of checkpoints().
std::filesystem::path best_checkpoint_folder(const std::filesystem::path& run_folder);

/// The step folders of a run, highest N first. Unfinished temporaries are passed over.
std::vector<std::filesystem::path> checkpoints(const std::filesystem::path& run_folder);

/// N of a folder step_N; -1 of any other name.
int64_t step_of(const std::filesystem::path& folder);

/// Removes unfinished checkpoints of a run, and puts one back that was to be replaced. The caller holds the
/// run's lock. `all` is false on file systems without locks: then those of other hosts stay, because another
/// process may still be writing them.
void sweep_unfinished_checkpoints(const std::filesystem::path& run_folder, bool all);

/// Weights, or the adapter of a decoder that has one, and optimiser state as they were when the checkpoint
/// was written, bit for bit.
void load_checkpoint(const std::filesystem::path& checkpoint, Decoder* decoder, Optimizer* optimizer);

}  // namespace espalier
