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

/// This has room for a row of more than 40 million tokens. A file that never ends or decompresses from
/// kilobytes to terabytes is refused before it fills the machine's memory.
inline constexpr int64_t kDefaultLineBytes = int64_t{1} << 28;

/// The parser of JSON counts in 32 bits.
inline constexpr uint64_t kMostLineBytes = (uint64_t{1} << 32) - 4096;

struct ReadOptions {
  int64_t vocab_size = 0;      // ids must be in [0, vocab_size); 0: only >= 0 and within 32 bits
  bool skip_bad_rows = false;  // count and report instead of throwing
  int64_t max_rows = 0;        // stop after so many good rows; 0: all
  int64_t max_line_bytes = kDefaultLineBytes;  // JSONL: a longer row is a bad one
  std::function<void(double fraction)>
      progress;  // called now and then with the part of the file read; may be empty
};

struct ReadReport {
  int64_t rows_read = 0;
  int64_t rows_skipped = 0;
  std::vector<std::string> first_errors;  // at most 10 messages of skipped rows
  FieldTally fields;                      // of the rows that were read
};

/// Reads a file by its content: safetensors when the name ends in .safetensors, otherwise JSONL, decompressed
/// when it starts with the gzip or zstd magic number. A bad row throws InputError "FILE:LINE: field `F`:
/// expected E, received R" (packed form: "FILE: row N: ..."); with skip_bad_rows it is counted. A file
/// without a single good row throws. Blank lines are skipped.
Trajectories read_trajectories(const std::filesystem::path& path, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

/// Reads the rows of several files (at least one), one file after the other. max_rows and the report count
/// the rows of all files, and files after max_rows rows are not read. A single packed file stays mapped;
/// several are copied into memory.
Trajectories read_trajectories(std::span<const std::filesystem::path> paths, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

/// The files that names and patterns stand for, in the given order. The matches of one pattern are sorted by
/// the bytes of their names. A pattern contains `*`, `?` or `[...]` as in a shell, but the name of an
/// existing file is never a pattern. Throws InputError for a pattern without matches, an empty name, or a
/// file that does not exist.
std::vector<std::filesystem::path> expand_file_patterns(std::span<const std::string> patterns);

}  // namespace espalier
