// Reading trajectories: JSONL (plain, gzip, zstd) and packed safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "espalier/data/trajectories.h"

namespace espalier {

struct ReadOptions {
  int64_t vocab_size = 0;      // ids must be in [0, vocab_size); 0: only >= 0 and within 32 bits
  bool skip_bad_rows = false;  // count and report instead of throwing
  int64_t max_rows = 0;        // stop after so many good rows; 0: all
  int64_t max_line_bytes = int64_t{1} << 30;
  std::function<void(double fraction)>
      progress;  // called now and then with the part of the file read; may be empty
};

struct ReadReport {
  int64_t rows_read = 0;
  int64_t rows_skipped = 0;
  std::vector<std::string> first_errors;  // at most 10 messages of skipped rows
};

/// Reads a file by its content: safetensors when the name ends in .safetensors, otherwise JSONL, decompressed
/// when it starts with the gzip or zstd magic number. A bad row throws InputError
/// "FILE:LINE: field `F`: expected E, received R" (packed form: "FILE: row N: ..."); with skip_bad_rows it is
/// counted. A file without a single good row throws. Blank lines are passed over.
Trajectories read_trajectories(const std::filesystem::path& path, const ReadOptions& options = {},
                               ReadReport* report = nullptr);

}  // namespace espalier
