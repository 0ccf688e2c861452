// SPDX-License-Identifier: Apache-2.0
// Random forests for tests, benchmarks and the command `synth`.
#pragma once

#include <cstdint>

#include "espalier/base/csr.h"

namespace espalier {

/// Every tree is complete: each inner node has `branching` children. Trees differ in their first token, and
/// so do the children of a node, so build_forest recovers the same trees (with branching 1 it collapses each
/// chain into one node).
struct SynthOptions {
  int64_t num_trees = 1;
  int64_t depth = 3;         // nodes on a root path, at least 1
  int64_t branching = 3;     // children of an inner node, at least 1
  int64_t node_length = 64;  // mean tokens of a node; lengths vary by +-50 % unless fixed
  bool fixed_node_length = false;
  int64_t vocab_size = 256;  // ids are in [first_token, vocab_size)
  int64_t first_token = 0;
  double end_inside = 0;  // probability that a trajectory also ends at an inner node
  double duplicate = 0;   // probability that a trajectory is repeated
  double target_cached_token_ratio =
      -1;  // >= 1: node lengths are scaled to approach this flat / tree; -1: off
  uint64_t seed = 0;
};

/// Token sequences of the trajectories of a random forest, in preorder of their end nodes. A target is met
/// within 2 % of flat / tree. To meet it, either the shared (inner) nodes or the leaves are lengthened, while
/// the mean node length stays and every node keeps at least one token. Throws InputError if the shape cannot
/// reach the target (for example without branching), naming the reachable range; if siblings outnumber the
/// token ids; and if an option is out of range.
Csr<int32_t> synthesize(const SynthOptions& options);

}  // namespace espalier
