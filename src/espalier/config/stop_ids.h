// SPDX-License-Identifier: Apache-2.0
// The tokens that end what a model says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier {

/// eos_token_id, a number or a list of them, of a model folder's generation_config.json; where that has none,
/// of its config.json (of a composite model, also in text_config). Ascending, each once; none where nothing
/// is said. Throws InputError naming the file where it is something else.
std::vector<int32_t> read_stop_ids(const std::filesystem::path& model_folder);

/// The same of one such file's content; `file` is its name, for messages.
std::vector<int32_t> parse_stop_ids(const nlohmann::json& json, const std::string& file);

}  // namespace espalier
