// SPDX-License-Identifier: Apache-2.0
// Counting good and bad rows while a file is read.
#pragma once

#include <string>

#include "espalier/base/check.h"
#include "espalier/data/reader.h"

namespace espalier {

/// Fills a ReadReport. Throws at a bad row unless skip_bad_rows is set.
class RowReport {
 public:
  RowReport(const ReadOptions& options, ReadReport* report)
      : options_(options), report_(report ? *report : own_) {
    report_ = {};
  }
  RowReport(const RowReport&) = delete;
  RowReport& operator=(const RowReport&) = delete;

  void good() { ++report_.rows_read; }

  /// Field counts of the good rows; the reader fills them in.
  FieldTally& fields() { return report_.fields; }

  /// Whether max_rows good rows have been read.
  bool enough() const { return options_.max_rows > 0 && report_.rows_read >= options_.max_rows; }

  void bad(const std::string& message) {
    if (!options_.skip_bad_rows) throw InputError(message);
    ++report_.rows_skipped;
    if (report_.first_errors.size() < 10) report_.first_errors.push_back(message);
  }

  /// Calls the progress function when the fraction has grown by half a percent, and after every 16 MiB,
  /// because the total size of a pipe or a compressed file is unknown.
  void progress(double fraction, int64_t bytes = 0) {
    constexpr int64_t kBytes = int64_t{1} << 24;
    if (!options_.progress || (fraction < next_fraction_ && bytes < next_bytes_)) return;
    next_fraction_ = fraction + 0.005;
    next_bytes_ = bytes + kBytes;
    options_.progress(fraction);
  }

  /// Called at the end of `file`. Throws if there was no good row.
  void finish(const std::string& file) {
    ESPALIER_CHECK(report_.rows_read > 0 || report_.rows_skipped == 0,
                   "{}: expected at least one valid row, received {} invalid ones, the first: {}", file,
                   report_.rows_skipped, report_.first_errors.front());
    ESPALIER_CHECK(report_.rows_read > 0, "{}: expected at least one row, received none", file);
    if (options_.progress) options_.progress(1.0);
  }

 private:
  const ReadOptions& options_;
  ReadReport own_;
  ReadReport& report_;
  double next_fraction_ = 0;
  int64_t next_bytes_ = int64_t{1} << 24;
};

}  // namespace espalier
