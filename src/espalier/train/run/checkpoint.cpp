// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/manifest.h"
#include "espalier/base/temporaries.h"
#include "espalier/model/weights/adapter_folder.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "checkpoints";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kWeightsFile = "resume.safetensors";
constexpr const char* kBestFolder = "best";
// Unfinished checkpoints are named .NAME.TAG.partial. While one is replaced, the old one is named
// .NAME.before.
constexpr std::string_view kPartialPrefix = ".", kPartialSuffix = ".partial", kBeforeSuffix = ".before";

// Saves trained parameters in their own dtype. bfloat16 models resume from their float32 masters instead.
void save_exact_weights(const fs::path& file, const Decoder& decoder) {
  std::vector<at::Tensor> keep;
  std::vector<TensorView> views;
  for (const Parameter& parameter : decoder.parameters()) {
    keep.push_back(parameter.value.detach().cpu());
    views.push_back(view_tensor(parameter.name, keep.back()));
  }
  write_safetensors(file, views);
}

// Whether ".NAME.TAG.partial" is an unfinished checkpoint of a process of this host that has ended.
bool is_left_over(std::string_view name) {
  name.remove_prefix(kPartialPrefix.size());
  name.remove_suffix(kPartialSuffix.size());
  const size_t dot = name.find('.');
  return dot != std::string_view::npos && names_ended_process(name.substr(dot + 1));
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  return fmt::format("step_{}", step);
}

fs::path checkpoint_folder(const fs::path& run_folder, int64_t step) {
  return run_folder / kFolder / checkpoint_name(step);
}

fs::path save_checkpoint(const CheckpointOptions& options, const Decoder& decoder,
                         const OptimizerState& optimizer, const RunState& state) {
  fs::path folder = checkpoint_folder(options.run_folder, state.step);
  write_checkpoint(folder, options, decoder, optimizer, state);
  return folder;
}

namespace {

fs::path path_before(const fs::path& folder) {
  return folder.parent_path() / fmt::format(".{}{}", folder.filename().string(), kBeforeSuffix);
}

void write_weights(const fs::path& folder, const CheckpointOptions& options, const Decoder& decoder) {
  if (decoder.has_adapter()) {
    save_adapter(decoder.config(), decoder.adapter(), folder, options.save_dtype);
  } else {
    options.source.save(decoder, folder, options.save_dtype);
  }
}

void fill_checkpoint(const fs::path& folder, const CheckpointOptions& options, const Decoder& decoder,
                     const OptimizerState& optimizer, const RunState& state) {
  write_weights(folder, options, decoder);
  if (!decoder.is_frozen()) {
    save_state(optimizer, folder / kOptimizerFile);
    const at::ScalarType dtype = decoder.parameters().front().value.scalar_type();
    if (options.save_dtype != dtype) save_exact_weights(folder / kWeightsFile, decoder);
  }
  write_text(folder / kStateFile, to_json(state).dump(2) + "\n");
  write_manifest(folder, checkpoint_name(state.step));
}

// Renames `partial` to `folder`, replacing what is there.
void commit_over(PartialFolder* partial, const fs::path& folder) {
  const fs::path before = path_before(folder);
  const bool replaces = fs::exists(folder);
  if (replaces) {
    fs::remove_all(before);
    fs::rename(folder, before);
  }
  std::error_code ignored;
  try {
    partial->commit();
  } catch (...) {
    if (replaces) fs::rename(before, folder, ignored);
    throw;
  }
  if (replaces) fs::remove_all(before, ignored);
}

}  // namespace

void write_checkpoint(const fs::path& folder, const CheckpointOptions& options, const Decoder& decoder,
                      const OptimizerState& optimizer, const RunState& state) {
  PartialFolder partial(folder);
  fill_checkpoint(partial.path(), options, decoder, optimizer, state);
  partial.commit();
}

void replace_checkpoint(const fs::path& folder, const CheckpointOptions& options, const Decoder& decoder,
                        const OptimizerState& optimizer, const RunState& state) {
  PartialFolder partial(folder);
  fill_checkpoint(partial.path(), options, decoder, optimizer, state);
  commit_over(&partial, folder);
}

fs::path best_checkpoint_folder(const fs::path& run_folder) {
  return run_folder / kFolder / kBestFolder;
}

int64_t step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  constexpr std::string_view kPrefix = "step_";
  int64_t step = -1;
  if (!name.starts_with(kPrefix)) return -1;
  const char* end = name.data() + name.size();
  const auto [last, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  // Reject names such as "step_007" and "step_-7".
  const bool plain = error == std::errc() && last == end && name == fmt::format("{}{}", kPrefix, step);
  return plain && step >= 0 ? step : -1;
}

namespace {

// The step folders in `parent`, highest step first.
std::vector<fs::path> step_folders(const fs::path& parent) {
  std::vector<fs::path> folders;
  if (!fs::is_directory(parent)) return folders;
  for (const auto& entry : fs::directory_iterator(parent)) {
    if (entry.is_directory() && step_of(entry.path()) >= 0) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end(),
            [](const fs::path& a, const fs::path& b) { return step_of(a) > step_of(b); });
  return folders;
}

void remove_older(const fs::path& parent, int64_t keep_last, int64_t keep_every) {
  const std::vector<fs::path> folders = step_folders(parent);
  for (auto i = static_cast<size_t>(keep_last); i < folders.size(); ++i) {
    if (keep_every > 0 && step_of(folders[i]) % keep_every == 0) continue;
    const PartialFolder removed(folders[i]);
    fs::rename(folders[i], removed.path());
  }
}

/// Restores a checkpoint that a killed process was replacing, or removes it if the new one is in place.
void put_back_replaced(const fs::path& parent) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with('.') && name.ends_with(kBeforeSuffix)) found.push_back(entry->path());
  }
  for (const fs::path& before : found) {
    const std::string name = before.filename().string();
    const fs::path folder = parent / name.substr(1, name.size() - 1 - kBeforeSuffix.size());
    if (fs::exists(folder)) {
      fs::remove_all(before, error);
    } else {
      fs::rename(before, folder, error);
    }
  }
}

void sweep_unfinished(const fs::path& parent, bool all) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool partial = name.size() > kPartialPrefix.size() + kPartialSuffix.size() &&
                         name.starts_with(kPartialPrefix) && name.ends_with(kPartialSuffix);
    if (partial && (all || is_left_over(name))) found.push_back(entry->path());
  }
  for (const fs::path& folder : found) fs::remove_all(folder, error);
  if (all) put_back_replaced(parent);
}

}  // namespace

std::vector<fs::path> checkpoints(const fs::path& run_folder) {
  return step_folders(run_folder / kFolder);
}

void remove_old_checkpoints(const fs::path& run_folder, int64_t keep_last, int64_t keep_every) {
  if (keep_last > 0) remove_older(run_folder / kFolder, keep_last, keep_every);
}

void sweep_unfinished_checkpoints(const fs::path& run_folder, bool all) {
  sweep_unfinished(run_folder / kFolder, all);
}

fs::path publish_weights(const fs::path& parent, const CheckpointOptions& options, const Decoder& decoder,
                         int64_t step) {
  fs::path folder = parent / checkpoint_name(step);
  sweep_unfinished(parent, /*all=*/false);
  PartialFolder partial(folder);
  write_weights(partial.path(), options, decoder);
  write_manifest(partial.path(), checkpoint_name(step));
  commit_over(&partial, folder);
  remove_older(parent, /*keep_last=*/2, /*keep_every=*/0);
  return folder;
}

void load_checkpoint(const fs::path& checkpoint, Decoder* decoder, Optimizer* optimizer) {
  const at::NoGradGuard no_grad;
  const bool exact_weights = fs::exists(checkpoint / kWeightsFile);
  if (exact_weights) {
    const SafetensorsFile file(checkpoint / kWeightsFile);
    for (const Parameter& parameter : decoder->parameters()) {
      read_tensor(file, parameter.name, parameter.value.detach());
    }
  } else {
    const std::vector<Parameter> saved =
        decoder->has_adapter()
            ? load_adapter(checkpoint, decoder->config(), decoder->dtype()).adapter.parameters
            : load_decoder(checkpoint, decoder->dtype()).weights();
    ESPALIER_CHECK(saved.size() == decoder->parameters().size(), "{}: expected {} tensors, received {}",
                   checkpoint.string(), decoder->parameters().size(), saved.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      const Parameter& parameter = decoder->parameters()[i];
      ESPALIER_CHECK(saved[i].name == parameter.name && saved[i].value.sizes() == parameter.value.sizes(),
                     "{}: expected tensor `{}`, received `{}` or one of another shape", checkpoint.string(),
                     parameter.name, saved[i].name);
      parameter.value.detach().copy_(saved[i].value);
    }
  }
  if (optimizer != nullptr) optimizer->load(checkpoint / kOptimizerFile);
}

}  // namespace espalier
