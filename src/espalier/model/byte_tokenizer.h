// SPDX-License-Identifier: Apache-2.0
// A byte-level tokenizer, for models without a tokenizer.
#pragma once

#include <cstdint>
#include <filesystem>

namespace espalier {

/// The byte-level tokenizer: token id = byte value (ids 0..255), then <|endoftext|>, <|im_start|>, <|im_end|>
/// (256, 257, 258), as the files tokenizer.json, tokenizer_config.json and chat_template.jinja of
/// Transformers. vocab_size must be at least 259.
void write_byte_tokenizer(const std::filesystem::path& folder, int64_t vocab_size);

}  // namespace espalier
