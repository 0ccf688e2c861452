// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a training run, RUN/checkpoints/step_N/: a Hugging Face model folder, or a PEFT folder if an
// adapter is trained, plus the optimiser's state.
#pragma once

#include <ATen/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/file.h"
#include "espalier/distributed/group.h"
#include "espalier/model/weights/weights.h"
#include "espalier/train/optimizer/optimizer.h"
#include "espalier/train/run/run_state.h"

namespace espalier {

inline constexpr const char* kStateFile = "trainer_state.json";

/// "step_N": the name of a checkpoint's folder and in its manifest.
std::string checkpoint_name(int64_t step);

struct CheckpointOptions {
  SourceModel source;  // files that the saved model takes over
  at::ScalarType save_dtype = at::kFloat;
  const Group* group = &alone();  // the ranks that write it together
};

/// Writes a checkpoint atomically: under a temporary name, synced and then renamed. It contains the model of
/// `source` with the decoder's weights in `save_dtype`, or only the decoder's adapter
/// (model/weights/adapter_folder.h), and optimizer.safetensors, trainer_state.json and a manifest
/// (base/manifest.h); a frozen decoder has no optimizer.safetensors. If save_dtype differs from the trained
/// dtype, resume.safetensors has the exact values. Of several ranks each writes its part of weights and
/// optimiser state (model/weights/rank_files.h) at the same time; the first alone writes adapters and all
/// other files. Where a rank does not see the folder of the first one, that one gathers the state and writes
/// all.
///
/// The constructor, start() and finish() are collectives. They throw on all ranks what they throw on one
/// (Group::together): NonFiniteError if weights or optimiser state are not finite, InputError if files cannot
/// be written. Unless finish() has succeeded the destructor, which waits for the thread, leaves no files.
class CheckpointWriter {
 public:
  /// Makes the temporary folder beside `folder`, and their parent if necessary.
  CheckpointWriter(const std::filesystem::path& folder, const CheckpointOptions& options);

  /// Whether every rank sees the folder, and writes its part.
  bool is_seen_by_all() const { return is_seen_by_all_; }

  /// `in_background`: copies what this rank writes to host memory, and writes it in a thread. Else finish()
  /// writes it.
  void start(const Decoder& decoder, const Optimizer& optimizer, const RunState& state,
             bool in_background = false);

  /// Whether the thread has written what this rank writes. Not a collective.
  bool is_done() const { return written_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  int64_t step() const { return state_.step; }

  /// Once all ranks have written: completes the folder and renames it. `replaces`: in place of an existing
  /// one. The folder is always complete, either old or new, except for a short time in which a killed process
  /// leaves the old one under another name (see sweep_unfinished_checkpoints).
  void finish(bool replaces = false);

 private:
  std::string write(const Decoder& decoder, const NamedValues& weights, const OptimizerState& optimizer,
                    const OptimizerState& exact) const;

  std::filesystem::path folder_, path_;
  CheckpointOptions options_;
  bool is_seen_by_all_ = false;
  Share share_;
  RunState state_;
  std::optional<PartialFolder> partial_;  // of the first rank
  std::future<std::string> written_;      // entries of the manifest
};

/// Bytes of moments and master weights per element of a trained parameter of this dtype on a rank of
/// options.group, and on a CPU those of its copies of them and of weights for options.save_in_background.
double state_bytes(const TrainOptions& options, at::ScalarType dtype, at::Device device);

/// A decoder with a copy of the adapter, on its device, and the same frozen weights.
Decoder copy_of(const Decoder& decoder);

/// Writes the weights or the adapter of `decoder`, without training state, as PARENT/step_N for other
/// programs, with a manifest. Replaces a folder of that name as CheckpointWriter does, and removes all but
/// the newest two and what killed processes have left. Returns the folder. Throws like CheckpointWriter.
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
