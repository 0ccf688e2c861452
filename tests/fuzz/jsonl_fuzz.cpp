// SPDX-License-Identifier: Apache-2.0
// Any bytes as trajectories in JSON Lines (plain, gzip or zstd): refused with InputError, or columns that fit
// together.
#include "espalier/base/check.h"
#include "espalier/data/reader.h"
#include "tests/fuzz/check_trajectories.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  const fuzz::InputFile input(data, size);
  ReadOptions options;
  options.max_line_bytes = 1 << 16;
  for (const bool skip_bad_rows : {false, true}) {
    options.skip_bad_rows = skip_bad_rows;
    ReadReport report;
    try {
      fuzz::check_trajectories(read_jsonl(input.path(), options, &report), options);
    } catch (const InputError&) {
      continue;
    }
    fuzz::require(report.rows_read > 0 && (skip_bad_rows || report.rows_skipped == 0));
  }
  return 0;
}
