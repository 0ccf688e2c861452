// SPDX-License-Identifier: Apache-2.0
// --mix FILE: several sources of data in one step, each with an objective of its own.
#pragma once

#include <string>
#include <vector>

#include "espalier/cli/flags/data_flags.h"
#include "espalier/objective/mix.h"

namespace espalier::cli {

/// The trajectories of all sources, one after the other.
struct MixedData {
  Trajectories trajectories;
  std::vector<MixSource> sources;
};

/// The trajectories that a command trains on: those of --data with one objective, or those of --mix.
struct MixFlags {
  std::string file;  // empty: no mix

  void add(OptionList* list);

  /// Throws UsageError without --data and --mix; InputError where both are given, or flags of an
  /// objective beside --mix, which belong into its tables.
  void check(const OptionList& list, const DataFlags& data) const;

  /// Reads the files of every source, as of DataFlags::read. Throws InputError "FILE:LINE: source NAME: ..."
  /// for what is wrong in a table. `data` has the flags of reading, such as --skip-bad-rows and --limit,
  /// which hold for each source.
  MixedData read(const std::string& model, const DataFlags& data) const;

  /// The file once more, with the files that patterns match and all values in force.
  std::string resolved() const;
};

}  // namespace espalier::cli
