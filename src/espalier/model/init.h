// SPDX-License-Identifier: Apache-2.0
// Random models, for tests, benchmarks and training from scratch.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "espalier/config/config.h"
#include "espalier/model/decoder.h"

namespace espalier {

struct InitOptions {
  std::filesystem::path config;  // a config.json
  std::filesystem::path out;     // folder to create; must not exist or must be empty
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  std::map<std::string, std::string> files = {};  // more files of the folder: texts by name
  int64_t least_tokens = 0;                       // the vocab_size must not be smaller: of a tokenizer
};

/// Writes a model folder with weights initialised as in Transformers: normal(0, initializer_range) for
/// matrices and embeddings, 1 for norms (0 where 1 is added), 0 for biases; decay rates of gated delta rules
/// uniform in [0.01, 16), of state spaces 1, 2, ...; steps, convolutions and output projections of mamba2
/// likewise. Each tensor has its own random stream, so a value depends only on seed, checkpoint name and
/// index. Returns the number of parameters.
int64_t init_model(const InitOptions& options);

/// The same model in memory, as load_decoder would load it from float32.
Decoder init_decoder(DecoderConfig config, uint64_t seed, at::ScalarType dtype, at::Device device = at::kCPU);

/// Adapters of `maps`, initialised as in PEFT: A uniform in [-1 / sqrt(in), 1 / sqrt(in)), B = 0. Random
/// streams as in init_model.
Adapter init_adapter(const std::vector<LinearMap>& maps, const LoraOptions& options, uint64_t seed,
                     at::ScalarType dtype, at::Device device = at::kCPU);

}  // namespace espalier
