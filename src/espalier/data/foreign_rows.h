// SPDX-License-Identifier: Apache-2.0
// Data that is not rows of trajectories but something else that people have: what it is, and the command that
// makes rows of it.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace espalier {

/// What a row without `input_ids` is, judged by the names of its fields: "chats (`messages`): run `espalier
/// prepare --model DIR FILE -o rows.jsonl` first". Lists the fields where nothing is recognised. `file` is
/// the file that holds the row.
std::string describe_foreign_row(std::span<const std::string_view> fields, const std::filesystem::path& file);

/// What a line that is not a JSON object is part of: "a line of a JSON list of all rows: ...", with a
/// command.
/// "" where nothing is recognised.
std::string describe_foreign_line(std::string_view line, const std::filesystem::path& file);

/// Throws InputError where `path` is a folder, or a regular file whose first bytes are those of a format that
/// is not read here (Parquet, Arrow, pickle, archives, ...).
void refuse_foreign_file(const std::filesystem::path& path);

}  // namespace espalier
