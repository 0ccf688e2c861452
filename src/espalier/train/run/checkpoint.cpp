// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
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

namespace {

fs::path path_before(const fs::path& folder) {
  return folder.parent_path() / fmt::format(".{}{}", folder.filename().string(), kBeforeSuffix);
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

CheckpointWriter::CheckpointWriter(const fs::path& folder, const CheckpointOptions& options)
    : folder_(folder), options_(options) {
  const Group& group = *options.group;
  std::error_code error;
  const std::string made = group.together([&] {
    if (!group.is_first()) return std::string();
    partial_.emplace(folder);
    fs::create_directory(partial_->path(), error);
    ESPALIER_CHECK(!error, "cannot make {}: {}", partial_->path().string(), error.message());
    return partial_->path().string();
  });
  path_ = group.gather(made).front();
  // Its name has host and process in it, so that no rank mistakes another folder for it.
  is_seen_by_all_ = !group.any(!fs::is_directory(path_, error));
  if (is_seen_by_all_) share_ = {group.rank(), group.size()};
}

void CheckpointWriter::start(const Decoder& decoder, const Optimizer& optimizer, const RunState& state,
                             bool in_background) {
  const at::NoGradGuard no_grad;
  OptimizerState moments = optimizer.state(/*gathers=*/!is_seen_by_all_);
  state_ = state;
  options_.group->together([&] {
    const auto policy = in_background ? std::launch::async : std::launch::deferred;
    if (!is_seen_by_all_ && !partial_) {
      written_ = std::async(policy, [] { return std::string("{}"); });
      return true;
    }
    const auto host = [&](const at::Tensor& tensor) {
      return tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false, in_background);
    };
    // One after the other, so that tensors that were made for it go at once.
    for (Parameter& entry : moments) entry.value = host(entry.value);
    OptimizerState exact;
    for (const auto& [name, value] : decoder.parameters()) {
      if (value.scalar_type() == options_.save_dtype) continue;
      exact.push_back({name, host(is_seen_by_all_ ? options_.group->part(value.detach()) : value)});
    }
    NamedValues weights;
    if (!decoder.has_adapter()) {
      weights = in_background ? options_.source.copies_of(decoder, options_.save_dtype, share_)
                              : SourceModel::values_of(decoder);
    }
    const bool copies_adapter = in_background && decoder.has_adapter() && share_.rank == 0;
    written_ =
        std::async(policy, [this, adapted = copies_adapter ? copy_of(decoder) : decoder,
                            weights = std::move(weights), moments = std::move(moments),
                            exact = std::move(exact)] { return write(adapted, weights, moments, exact); });
    return true;
  });
}

std::string CheckpointWriter::write(const Decoder& decoder, const NamedValues& weights,
                                    const OptimizerState& optimizer, const OptimizerState& exact) const {
  const at::NoGradGuard no_grad;
  if (!decoder.has_adapter()) {
    options_.source.save(weights, path_, options_.save_dtype, share_);
  } else if (share_.rank == 0) {
    save_adapter(decoder.config(), decoder.adapter(), path_, options_.save_dtype);
  }
  if (!decoder.is_frozen()) save_state(optimizer, rank_file(path_ / kOptimizerFile, share_));
  // bfloat16 models resume from their float32 masters instead.
  if (!exact.empty()) save_state(exact, rank_file(path_ / kWeightsFile, share_));
  // The first rank reads its own when it writes the manifest.
  return share_.rank == 0 ? "{}"
                          : manifest_entries(path_, rank_file("x.safetensors", share_).string().substr(1));
}

void CheckpointWriter::finish(bool replaces) {
  const Group& group = *options_.group;
  const std::vector<std::string> entries = group.gather(group.together([&] { return written_.get(); }));
  group.together([&] {
    if (!partial_) return true;
    write_text(path_ / kStateFile, to_json(state_).dump(2) + "\n");
    write_manifest(path_, checkpoint_name(state_.step), entries);
    if (replaces) {
      commit_over(&*partial_, folder_);
    } else {
      partial_->commit();
    }
    return true;
  });
}

double state_bytes(const TrainOptions& options, at::ScalarType dtype, at::Device device) {
  const auto ranks = static_cast<double>(options.group->size());
  const double own = optimizer_bytes(options.optimizer.kind, dtype, options.group->size());
  if (!options.save_in_background || !device.is_cpu()) return own;
  const auto saved = static_cast<double>(c10::elementSize(options.save_dtype));
  const double exact = options.save_dtype == dtype ? 0 : static_cast<double>(c10::elementSize(dtype));
  return 2 * own + (options.trains_adapter() ? saved : saved / ranks) + exact / ranks;
}

Decoder copy_of(const Decoder& decoder) {
  Adapter adapter = decoder.adapter();
  for (Parameter& parameter : adapter.parameters) parameter.value = parameter.value.detach().clone();
  return Decoder(decoder.config(), decoder.weights(), decoder.buffers(), std::move(adapter));
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
    std::error_code not_empty;
    if (fs::remove(folders[i], not_empty)) continue;
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
  if (decoder.has_adapter()) {
    save_adapter(decoder.config(), decoder.adapter(), partial.path(), options.save_dtype);
  } else {
    options.source.save(decoder, partial.path(), options.save_dtype);
  }
  write_manifest(partial.path(), checkpoint_name(step));
  commit_over(&partial, folder);
  remove_older(parent, /*keep_last=*/2, /*keep_every=*/0);
  return folder;
}

void load_checkpoint(const fs::path& checkpoint, Decoder* decoder, Optimizer* optimizer) {
  const at::NoGradGuard no_grad;
  if (const std::vector<SafetensorsFile> files = open_rank_files(checkpoint / kWeightsFile); !files.empty()) {
    for (const auto& [name, value] : decoder->parameters()) {
      const at::Tensor exact = at::empty(value.sizes(), value.options().device(at::kCPU));
      read_part(files, name, value.sizes(), /*begin=*/0, exact);
      value.detach().copy_(exact);
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
