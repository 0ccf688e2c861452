// SPDX-License-Identifier: Apache-2.0
// Concatenates sets of trajectories.
#pragma once

#include <memory>
#include <string>

#include "espalier/data/trajectories.h"

namespace espalier {

/// Concatenates sets of trajectories in memory. A column keeps its type if all sets have the same type (masks
/// stay bytes, floats stay floats). Otherwise its reals become doubles.
class Concatenation {
 public:
  Concatenation();
  ~Concatenation();
  Concatenation(const Concatenation&) = delete;
  Concatenation& operator=(const Concatenation&) = delete;

  /// `name` is the file of the rows. Throws InputError "NAME: field `F`: ..." if their number of routes or
  /// reference tokens per token differs from that of the rows before.
  void append(const Trajectories& part, const std::string& name);

  /// Moves the rows out; nothing may be appended afterwards.
  Trajectories finish();

 private:
  void append_turn_rewards(const Trajectories& part);
  void append_ref_topk(const Trajectories& part, const std::string& name, size_t tokens_before);

  struct Columns;
  std::unique_ptr<Columns> columns_;
};

}  // namespace espalier
