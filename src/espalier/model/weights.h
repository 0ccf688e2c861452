// Hugging Face model folders: safetensors in and out.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>

#include "espalier/model/decoder.h"

namespace espalier {

/// "float64" | "float32" | "bfloat16"; throws InputError naming the accepted words.
at::ScalarType parse_dtype(const std::string& name);
std::string dtype_name(at::ScalarType dtype);

/// Reads config.json and model.safetensors, or the shards of model.safetensors.index.json (plain file names
/// inside the folder only), converts to `dtype` on `device`. Missing parameters, wrong shapes and wrong
/// dtypes throw InputError naming file and tensor. Tensors that the decoder does not know are left for
/// save_decoder to copy.
Decoder load_decoder(const std::filesystem::path& model_folder, at::ScalarType dtype,
                     at::Device device = at::kCPU);

/// Writes a model folder `out` (made if absent; the caller makes the whole folder atomic): the tensors of
/// `source` with their names, sharding and order, parameters replaced by the decoder's values in `dtype`,
/// unknown tensors copied as they are, config.json with its dtype key set to `dtype`, tokenizer and
/// generation files copied.
void save_decoder(const Decoder& decoder, const std::filesystem::path& source,
                  const std::filesystem::path& out, at::ScalarType dtype);

}  // namespace espalier
