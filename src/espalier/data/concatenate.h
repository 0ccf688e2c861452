// SPDX-License-Identifier: Apache-2.0
// Several sets of trajectories as one.
#pragma once

#include <memory>
#include <string>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Appends sets of trajectories to one another in memory. A column keeps its type if all sets have the same
/// (a mask stays bytes, floats stay floats). Otherwise its reals become doubles.
class Concatenation {
 public:
  Concatenation();
  ~Concatenation();
  Concatenation(const Concatenation&) = delete;
  Concatenation& operator=(const Concatenation&) = delete;

  /// `name` is the file of the rows. Throws InputError "NAME: field `F`: ..." if the rows do not match those
  /// before (another number of routes or of reference tokens per token).
  void append(const Trajectories& part, const std::string& name);

  /// Hands over the rows; nothing may be appended afterwards.
  Trajectories finish();

 private:
  void append_turn_rewards(const Trajectories& part);
  void append_ref_topk(const Trajectories& part, const std::string& name, size_t tokens_before);

  struct Columns;
  std::unique_ptr<Columns> columns_;
};

}  // namespace espalier
