// SPDX-License-Identifier: Apache-2.0
// Reading trajectories: JSONL (plain, gzip, zstd) and packed safetensors.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/builder.h"
#include "espalier/data/fields.h"
#include "espalier/data/trajectories.h"

namespace espalier {

/// Enough for a row of more than 40 million tokens. The limit refuses a file that never ends, or that
/// decompresses from kilobytes to terabytes, before it fills the memory.
inline constexpr int64_t kDefaultLineBytes = int64_t{1} << 28;

/// The JSON parser uses 32-bit sizes.
inline constexpr uint64_t kMostLineBytes = (uint64_t{1} << 32) - 4096;

struct ReadOptions {
  int64_t vocab_size = 0;                          // ids must be in [0, vocab_size); 0: in [0, 2^31)
  bool skip_bad_rows = false;                      // count and report instead of throwing
  int64_t max_rows = 0;                            // stop after this many good rows; 0: all
  int64_t max_line_bytes = kDefaultLineBytes;      // JSONL: a longer row is bad
  std::function<void(double fraction)> progress;   // called with the fraction of the file read; may be empty
  RowStore store{};                                // with memory > 0: see read_trajectories
  std::filesystem::path row_cache{};               // folder of the index; empty: that of the first file
  std::function<void(const std::string&)> note{};  // called with what users should know; may be empty
};

/// A field that is not part of the format.
struct IgnoredField {
  std::string name;  // as in the file: print it through printable()
  int64_t rows = 0;
  int64_t per_token_rows = 0;  // rows in which it is a list with one entry per token

  /// Whether it is a per-token field in most rows, so that the lengths do not match by chance.
  bool is_per_token() const { return per_token_rows > 0 && 2 * per_token_rows >= rows; }
};

/// Counts over the good rows.
struct FieldTally {
  static constexpr size_t kMostIgnored = 1000;  // limit of stored names, because keys may be arbitrary data

  int64_t tokens = 0;
  int64_t loss_tokens = 0;                     // tokens of weight above 0, except the first of each row
  int64_t rows_without_mask = 0;               // rows in which every token carries loss
  std::array<int64_t, kNumFieldNames> rows{};  // rows that have kFieldNames[i]
  std::array<int64_t, kNumFieldNames> number_rows{};  // of these, rows in which the id is a number, not text
  std::vector<IgnoredField> ignored;                  // in order of first appearance
  bool more_ignored = false;                          // there were more than kMostIgnored

  /// Rows that have the field under any name. A row with two names of the field counts twice.
  int64_t rows_with(Field field) const;

  /// Adds `rows` rows with an unknown field.
  void ignore(std::string_view name, int64_t rows, int64_t per_token_rows);
  void add(const FieldTally& other);

 private:
  size_t next_ = 0;  // where to look first: rows mostly have the same fields in the same order
};

struct ReadReport {
  int64_t rows_read = 0;
  int64_t rows_skipped = 0;
  std::vector<std::string> first_errors;  // at most 10 messages of skipped rows
  FieldTally fields;                      // of the good rows
};

/// Reads one file: packed safetensors if the name ends in .safetensors, otherwise JSONL, decompressed if it
/// starts with the gzip or zstd magic number. A bad row throws InputError "FILE:LINE: field `F`: expected E,
/// received R" (packed form: "FILE: row N: ..."); with skip_bad_rows it is counted. A file without a good row
/// throws. Blank lines are skipped.
Trajectories read_trajectories(const std::filesystem::path& path, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

/// Reads the rows of several files (at least one), one file after the other. max_rows and the report count
/// the rows of all files, and files after max_rows rows are not read. A single packed file stays mapped.
///
/// If the rows take more than store.memory bytes, they go through an index: a packed file
/// `.NAME.espalier-index.safetensors` of all rows, which is then mapped. Later calls with the same options
/// map it at once, as long as no file has changed. Processes that need the same index wait for the one that
/// writes it. Rows stay in memory if a file is a pipe, or if the index cannot be written, which is noted.
Trajectories read_trajectories(std::span<const std::filesystem::path> paths, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

/// read_trajectories without an index.
Trajectories read_files(std::span<const std::filesystem::path> paths, const ReadOptions& options,
                        ReadReport* report);

/// Expands file names and patterns in the given order. The matches of one pattern are sorted bytewise. A
/// pattern contains `*`, `?` or `[...]` as in a shell; the name of an existing file is never a pattern. `-`
/// is standard input. Throws InputError for a pattern without matches, an empty name, or a missing file.
std::vector<std::filesystem::path> expand_file_patterns(std::span<const std::string> patterns);

/// The first `count` names, sorted bytewise, of files of trajectories (.jsonl, .jsonl.gz, .jsonl.zst or
/// .safetensors, no dot in front) in `folder` that are not in `taken`. Empty if there are fewer. Once it has
/// a file `stop`: what is left, and then nullopt.
std::optional<std::vector<std::string>> next_files(const std::filesystem::path& folder,
                                                   const std::set<std::string>& taken, int64_t count);

/// Like read_trajectories, for a file that holds JSONL (plain, gzip or zstd), whatever its name. A field that
/// is null counts as absent. Fields that are not part of the format are ignored.
Trajectories read_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report);

/// Appends the rows of such a file.
void append_jsonl(const std::filesystem::path& path, const ReadOptions& options, ReadReport* report,
                  TrajectoriesBuilder* builder);

}  // namespace espalier
