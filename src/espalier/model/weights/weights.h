// SPDX-License-Identifier: Apache-2.0
// Loading and saving Hugging Face model folders.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/model/decoder.h"
#include "espalier/model/weights/rank_files.h"
#include "espalier/model/weights/tensor_bytes.h"

namespace espalier {

/// Reads config.json and model.safetensors, or the shards of model.safetensors.index.json (plain file names
/// inside the folder only), converts to `dtype` on `device`. Throws InputError naming file and tensor for
/// missing parameters, wrong shapes or dtypes, values that are not finite in `dtype`, tensors that look like
/// part of the decoder but are not in its config, and a head that differs from the embedding it is tied to.
/// Other tensors are copied by SourceModel (carried_tensors).
Decoder load_decoder(const std::filesystem::path& model_folder, at::ScalarType dtype,
                     at::Device device = at::kCPU);

/// Sorted names of the tensors that are not parameters of the decoder and that SourceModel copies. Throws
/// like load_decoder for missing and extra tensors, without reading values.
std::vector<std::string> carried_tensors(const std::filesystem::path& model_folder);

/// Hash (base/hash.h) of names and contents of a model's weight files.
std::string weights_hash(const std::filesystem::path& model_folder);

/// Tensors by name.
using NamedValues = std::map<std::string, at::Tensor>;

/// The parts that a saved model takes over from its source folder: names, order and sharding of tensors,
/// tensors unknown to the decoder, config.json, tokenizer and generation files. Read once, so that
/// checkpoints can be saved after the folder has been moved or deleted. Files or tensors up to 64 MiB are
/// kept in memory; larger ones stay mapped, which survives deletion but not overwriting in place.
class SourceModel {
 public:
  /// Throws InputError if `folder` is not a model, or contains a file that cannot be copied.
  explicit SourceModel(const std::filesystem::path& folder);

  /// The contents of config.json.
  const nlohmann::ordered_json& config() const;

  /// Writes a model folder `out` (created if necessary; the caller makes the whole folder atomic): the
  /// tensors of the source with parameters replaced by the decoder's values in `dtype`, config.json with its
  /// dtype key set to `dtype`, and the other files. Throws NonFiniteError before writing a file with a
  /// parameter that is not finite in `dtype`.
  void save(const Decoder& decoder, const std::filesystem::path& out, at::ScalarType dtype) const {
    save(values_of(decoder), out, dtype, {});
  }

  /// The same with values of values_of or copies_of. Of several ranks each writes one shard, of about equal
  /// size, in place of the files of the source, and the first one all else.
  void save(const NamedValues& values, const std::filesystem::path& out, at::ScalarType dtype,
            const Share& share) const;
  static NamedValues values_of(const Decoder& decoder);
  /// Copies in host memory, in `dtype`, of what `share` writes.
  NamedValues copies_of(const Decoder& decoder, at::ScalarType dtype, const Share& share) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace espalier
