// SPDX-License-Identifier: Apache-2.0
// Reading trajectories: JSONL (plain, gzip, zstd) and packed safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "espalier/data/field_tally.h"
#include "espalier/data/trajectories.h"

namespace espalier {

/// Enough for a row of more than 40 million tokens. The limit refuses a file that never ends, or that
/// decompresses from kilobytes to terabytes, before it fills the memory.
inline constexpr int64_t kDefaultLineBytes = int64_t{1} << 28;

/// The JSON parser uses 32-bit sizes.
inline constexpr uint64_t kMostLineBytes = (uint64_t{1} << 32) - 4096;

struct ReadOptions {
  int64_t vocab_size = 0;                         // ids must be in [0, vocab_size); 0: in [0, 2^31)
  bool skip_bad_rows = false;                     // count and report instead of throwing
  int64_t max_rows = 0;                           // stop after this many good rows; 0: all
  int64_t max_line_bytes = kDefaultLineBytes;     // JSONL: a longer row is bad
  std::function<void(double fraction)> progress;  // called with the fraction of the file read; may be empty
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
/// the rows of all files, and files after max_rows rows are not read. A single packed file stays mapped;
/// several are copied into memory.
Trajectories read_trajectories(std::span<const std::filesystem::path> paths, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

/// Expands file names and patterns in the given order. The matches of one pattern are sorted bytewise. A
/// pattern contains `*`, `?` or `[...]` as in a shell; the name of an existing file is never a pattern.
/// Throws InputError for a pattern without matches, an empty name, or a missing file.
std::vector<std::filesystem::path> expand_file_patterns(std::span<const std::string> patterns);

}  // namespace espalier
