// SPDX-License-Identifier: Apache-2.0
// --mix FILE: several sources of data in one step, each with its own objective.
#pragma once

#include <string>
#include <vector>

#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/objective/mix.h"

namespace espalier::commands {

/// The concatenated trajectories of all sources.
struct MixedData {
  Trajectories trajectories;
  std::vector<MixSource> sources;
};

/// --mix, which replaces --data and the flags of the objective.
struct MixFlags {
  std::string file;  // empty: no mix

  void add(OptionList* list);

  /// Throws UsageError if there is neither --data nor --mix; InputError if --mix is combined with --data or
  /// with flags of the objective, which belong in its tables.
  void check(const OptionList& list, const DataFlags& data) const;

  /// Reads the files of every source like DataFlags::read. Throws InputError "FILE:LINE: source NAME: ..."
  /// for a fault of a table. The other flags in `data`, such as --skip-bad-rows and --limit, apply to each
  /// source.
  MixedData read(const std::string& model, const DataFlags& data, const Caller& caller) const;

  /// The content of the file with patterns expanded and all values resolved.
  std::string resolved(const Caller& caller) const;
};

}  // namespace espalier::commands
