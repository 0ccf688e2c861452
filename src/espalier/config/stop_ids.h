// SPDX-License-Identifier: Apache-2.0
// The tokens that end a generated text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier {

/// Reads eos_token_id, a number or a list, from a model folder's generation_config.json, or else from its
/// config.json (for a composite model also from text_config). Ascending, without duplicates; empty if absent.
/// Throws InputError naming the file for other values.
std::vector<int32_t> read_stop_ids(const std::filesystem::path& model_folder);

/// Likewise from the content of one such file; `file` is its name for messages.
std::vector<int32_t> parse_stop_ids(const nlohmann::json& json, const std::string& file);

}  // namespace espalier
