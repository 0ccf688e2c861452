// SPDX-License-Identifier: Apache-2.0
// Recognises data in other formats and names the command that converts it to rows of trajectories.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace espalier {

/// Describes a row without `input_ids` by the names of its fields: "chats (`messages`): run `espalier prepare
/// --model DIR FILE -o rows.jsonl` first". Lists the fields if the format is not recognised. `file` is the
/// file of the row.
std::string describe_foreign_row(std::span<const std::string_view> fields, const std::filesystem::path& file);

/// Describes a line that is not a JSON object: "the start of a JSON list: ...", with a command. "" if it is
/// not recognised.
std::string describe_foreign_line(std::string_view line, const std::filesystem::path& file);

/// Throws InputError if `path` is a folder, or a regular file whose first bytes are those of an unsupported
/// format (Parquet, Arrow, pickle, archives, ...).
void refuse_foreign_file(const std::filesystem::path& path);

/// Whether a regular file has records that only `espalier prepare` reads: it is Parquet or one JSON document,
/// or its first record has no token ids or has them in batches. Later records count if the ones before are no
/// JSON and skip_bad_rows is set. False for what nothing reads, and for standard input. Throws InputError for
/// damaged compression.
bool needs_conversion(const std::filesystem::path& path, int64_t max_line_bytes, bool skip_bad_rows);

}  // namespace espalier
