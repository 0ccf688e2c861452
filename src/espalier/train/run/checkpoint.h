// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a training run, RUN/checkpoints/step_N/: a Hugging Face model folder, or a PEFT folder if an
// adapter is trained, plus the optimiser's state.
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

/// "step_N": the name of a checkpoint's folder and in its manifest.
std::string checkpoint_name(int64_t step);

struct CheckpointOptions {
  std::filesystem::path run_folder;  // used by save_checkpoint
  SourceModel source;                // files that the saved model takes over
  at::ScalarType save_dtype = at::kFloat;
};

/// Writes step_N, with N = state.step, atomically: under a temporary name, synced and then renamed. It
/// contains the model of `source` with the decoder's weights in `save_dtype`, or only the decoder's adapter
/// (model/weights/adapter_folder.h), and optimizer.safetensors, trainer_state.json and a manifest
/// (base/manifest.h); a frozen decoder has no optimizer.safetensors. If save_dtype differs from the trained
/// dtype, resume.safetensors has the exact values. Returns the folder. Throws NonFiniteError if weights or
/// optimiser state are not finite, InputError if the folder cannot be written; then no files are left.
std::filesystem::path save_checkpoint(const CheckpointOptions& options, const Decoder& decoder,
                                      const OptimizerState& optimizer, const RunState& state);

/// The same for a folder of any name. Creates its parent if necessary.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options,
                      const Decoder& decoder, const OptimizerState& optimizer, const RunState& state);

/// The same, replacing an existing folder. `folder` is always complete, either old or new, except for a short
/// time in which a killed process leaves the old one under another name (see sweep_unfinished_checkpoints).
void replace_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options,
                        const Decoder& decoder, const OptimizerState& optimizer, const RunState& state);

/// Writes the weights or the adapter of `decoder`, without training state, as PARENT/step_N for other
/// programs, with a manifest. Replaces a folder of that name (replace_checkpoint), and removes all but the
/// newest two and what killed processes have left. Returns the folder. Throws like save_checkpoint.
std::filesystem::path publish_weights(const std::filesystem::path& parent, const CheckpointOptions& options,
                                      const Decoder& decoder, int64_t step);

/// RUN/checkpoints/step_N.
std::filesystem::path checkpoint_folder(const std::filesystem::path& run_folder, int64_t step);

/// RUN/checkpoints/best: the checkpoint with the lowest loss on held-out rows. Not among checkpoints().
std::filesystem::path best_checkpoint_folder(const std::filesystem::path& run_folder);

/// The step folders of a run, highest N first, without unfinished ones.
std::vector<std::filesystem::path> checkpoints(const std::filesystem::path& run_folder);

/// Removes the checkpoints of a run except its newest `keep_last` (0: keeps all) and those of steps that are
/// multiples of `keep_every` (0: none). Each is renamed before it is removed, so a killed process leaves no
/// part of it under its name (see sweep_unfinished_checkpoints).
void remove_old_checkpoints(const std::filesystem::path& run_folder, int64_t keep_last, int64_t keep_every);

/// N of a folder named step_N; -1 for any other name.
int64_t step_of(const std::filesystem::path& folder);

/// Removes unfinished checkpoints of a run, and restores one whose replacement was interrupted. The caller
/// holds the run's lock. `all` is false on file systems without locks: then checkpoints of other hosts are
/// kept, since another process may still be writing them.
void sweep_unfinished_checkpoints(const std::filesystem::path& run_folder, bool all);

/// Loads the weights, or the adapter of a decoder that has one, and the optimiser state (null: none), bitwise
/// as they were saved.
void load_checkpoint(const std::filesystem::path& checkpoint, Decoder* decoder, Optimizer* optimizer);

}  // namespace espalier
