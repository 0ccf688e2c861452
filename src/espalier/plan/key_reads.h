// SPDX-License-Identifier: Apache-2.0
// The keys that ranks read of one another in the attention of a divided micro-batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/context.h"
#include "espalier/plan/division.h"
#include "espalier/tree/layout.h"

namespace espalier {

/// What one rank sends, receives and sees. Keys have sources: the ancestors whose context the micro-batch
/// reads, root first, and then the micro-batch itself. Of each source a rank has the keys of its own tokens.
struct KeyReads {
  std::vector<std::vector<int64_t>> picks{};  // by source: own keys that are sent, each once for every reader
  std::vector<int64_t> order{};               // all picks, one source after another, in the order of sending;
                                              // empty: as they are
  std::vector<int64_t> send{}, receive{};     // [ranks] keys
  int64_t most_received = 0;                  // by any rank
  /// As of AttentionContext (ops/attention/tree_attention.h), of queries of this rank: [P, 5] and [P].
  /// Segments are this rank's keys of the ancestors, and then the keys that it receives, by rank.
  std::vector<int64_t> blocks{}, positions{};
};

/// A micro-batch and how ranks divide it.
struct DividedMicroBatch {
  const Layout& layout;
  std::span<const ContextBlock> context;     // as context_blocks gives it
  std::span<const TokenDivision> divisions;  // of the micro-batches of the plan
  const TokenDivision& own;                  // one of them
  int64_t ranks;
};

/// What attention reads on a rank. Keys that no query of a rank sees are not sent: with a sliding window
/// those that are `window` positions away or more (0: no window), with attention in chunks those of another
/// position / `chunk` (0: no chunks).
KeyReads key_reads(const DividedMicroBatch& batch, int64_t rank, int64_t window, int64_t chunk = 0);

}  // namespace espalier
