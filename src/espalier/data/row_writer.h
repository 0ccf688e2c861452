// SPDX-License-Identifier: Apache-2.0
// Writing rows one by one, for rows that come from elsewhere than a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "espalier/data/builder.h"

namespace espalier {

/// Writes rows in the form that the name of the file asks for: JSON Lines, compressed where it ends in .gz or
/// .zst, or packed safetensors where it ends in .safetensors, with reals as F64. The file appears under its
/// name with commit(); without it no file is left (AtomicFile). Equal rows give equal files. Throws
/// InputError if the file cannot be written.
class RowWriter {
 public:
  /// `memory`: the columns of a packed file go to temporary files beside it once they take more bytes.
  explicit RowWriter(const std::filesystem::path& path, int64_t memory = int64_t{1} << 24);
  ~RowWriter();

  /// Checks the row (check_row) and writes it. A packed file also takes rows of one number of routes and of
  /// reference tokens alone.
  void add(const TrajectoryRow& row);
  /// Writes a row that keeps the rules.
  void add_checked(const TrajectoryRow& row);
  void commit();

 private:
  class Form;
  class Lines;
  class Packed;
  std::unique_ptr<Form> form_;
};

}  // namespace espalier
