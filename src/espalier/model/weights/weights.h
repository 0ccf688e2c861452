// SPDX-License-Identifier: Apache-2.0
// Hugging Face model folders: safetensors in and out.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/model/decoder.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier {

/// Reads config.json and model.safetensors, or the shards of model.safetensors.index.json (plain file names
/// inside the folder only), converts to `dtype` on `device`. Missing parameters, wrong shapes, wrong dtypes
/// and values that are not finite in `dtype` throw InputError naming file and tensor, and so do tensors that
/// look like the decoder's own and are not in its config (model/weights/extra_tensors.h), and a head that
/// differs from the embedding that config.json ties it to. Other tensors are left for SourceModel to copy
/// (carried_tensors).
Decoder load_decoder(const std::filesystem::path& model_folder, at::ScalarType dtype,
                     at::Device device = at::kCPU);

/// The names of the tensors in a model's files that the decoder does not have and that SourceModel carries
/// along, sorted. Throws what load_decoder throws about missing and extra tensors, without reading the rest.
std::vector<std::string> carried_tensors(const std::filesystem::path& model_folder);

/// The hash (base/hash.h) of the names and contents of a model's files of weights. Reads all of them.
std::string weights_hash(const std::filesystem::path& model_folder);

/// What a saved model takes over from the folder that it was loaded from: names, order and sharding of the
/// tensors, those that the decoder does not know, config.json, tokenizer and generation files. All of it is
/// read once: a run still saves whole checkpoints when the folder has been moved or deleted meanwhile. Up to
/// 64 MiB of a file or tensor are kept in memory; larger ones stay mapped, which outlives their deletion but
/// not their being overwritten in place.
class SourceModel {
 public:
  /// Throws InputError where `folder` is not a model, or holds a file that would be refused later.
  explicit SourceModel(const std::filesystem::path& folder);

  /// config.json as it stands there.
  const nlohmann::ordered_json& config() const;

  /// Writes a model folder `out` (made if absent; the caller makes the whole folder atomic): the tensors of
  /// the source, parameters replaced by the decoder's values in `dtype`, unknown tensors copied as they are,
  /// config.json with its dtype key set to `dtype`, and the other files. Throws NonFiniteError before the
  /// file of a parameter that is not finite in `dtype`.
  void save(const Decoder& decoder, const std::filesystem::path& out, at::ScalarType dtype) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace espalier
