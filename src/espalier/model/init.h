// Random models, for tests, benchmarks and training from scratch.
#pragma once

#include <ATen/core/ScalarType.h>

#include <cstdint>
#include <filesystem>

namespace espalier {

struct InitOptions {
  std::filesystem::path config;  // a config.json
  std::filesystem::path out;     // folder to make; must not exist or be empty
  uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;
  bool byte_tokenizer = false;  // also write a byte-level tokenizer with the ChatML template
};

/// Writes a model folder with weights drawn as Transformers does: normal(0, initializer_range) for matrices
/// and embeddings, 1 for norms, 0 for biases. Each tensor has its own random stream, named by its checkpoint
/// name, so a value depends on seed, name and index only.
void init_model(const InitOptions& options);

/// The byte-level tokenizer: token id = byte value (ids 0..255), then <|endoftext|>, <|im_start|>, <|im_end|>
/// (256, 257, 258), as tokenizer.json, tokenizer_config.json and chat_template.jinja that Transformers loads.
/// vocab_size must be at least 259.
void write_byte_tokenizer(const std::filesystem::path& folder, int64_t vocab_size);

}  // namespace espalier
