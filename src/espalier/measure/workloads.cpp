// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/workloads.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "espalier/tree/synth.h"

namespace espalier {

Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate) {
  Trajectories trajectories;
  trajectories.offsets = Column<int64_t>(sequences.offsets);
  trajectories.input_ids = Column<int32_t>(sequences.values);
  std::vector<uint8_t> mask(sequences.values.size());
  for (int64_t r = 0; r < sequences.num_rows(); ++r) {
    const int64_t size = sequences.row_size(r);
    const int64_t trained = std::max<int64_t>(1, static_cast<int64_t>(loss_rate * static_cast<double>(size)));
    for (int64_t t = size - trained; t < size; ++t) mask[sequences.offsets[r] + t] = 1;
  }
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  return trajectories;
}

Csr<int32_t> forest_of_ratio(int64_t tree_tokens, double ratio, int64_t vocab_size, uint64_t seed) {
  SynthOptions synth;
  synth.vocab_size = vocab_size;
  synth.seed = seed;
  int64_t nodes = 0;
  if (ratio <= 1) {
    synth.num_trees = 4;
    synth.depth = 1;
    nodes = 4;
  } else {
    // With nodes of equal size, b branches give a ratio of about 2 b^2 / (1 + b) with three levels and b with
    // two. The margin allows for the sizes of leaves.
    synth.depth = 3;
    synth.branching = static_cast<int64_t>(std::ceil(0.75 * ratio)) + 1;
    nodes = 1 + synth.branching + synth.branching * synth.branching;
    if (nodes * 8 > tree_tokens) {
      synth.depth = 2;
      synth.branching = static_cast<int64_t>(std::ceil(2 * ratio));
      nodes = 1 + synth.branching;
    }
    synth.target_cached_token_ratio = ratio;
  }
  synth.node_length = std::max<int64_t>(2, tree_tokens / nodes);
  return synthesize(synth);
}

}  // namespace espalier
