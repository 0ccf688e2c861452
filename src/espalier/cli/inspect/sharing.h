// Where trajectories share, and where they could have shared but do not.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "espalier/cli/inspect/divergence.h"
#include "espalier/data/trajectories.h"
#include "espalier/model/vocabulary.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {

/// Tokens at the positions [begin, end).
struct DepthBucket {
  int64_t begin = 0, end = 0;
  int64_t tree_tokens = 0, flat_tokens = 0;
  double mean_multiplicity() const {
    return static_cast<double>(flat_tokens) / static_cast<double>(tree_tokens);
  }
  /// The part of the flat tokens that is not encoded again.
  double reused() const { return 1 - static_cast<double>(tree_tokens) / static_cast<double>(flat_tokens); }
};

/// Buckets of equal width (1, 2 or 5 times a power of ten), at most `most` of them, up to the longest
/// trajectory. Linear in nodes and in the buckets that they span.
std::vector<DepthBucket> sharing_by_depth(const Forest& forest, int64_t most = 20);

/// A place where two trajectories part, as token ids; each run at most kSnippet long.
struct SharingExample {
  static constexpr int64_t kSnippet = 24;
  int64_t position = 0;
  int64_t left_row = 0, right_row = 0;
  Role role = Role::kUnknown;                    // who speaks
  std::vector<int32_t> before;                   // what both say
  std::vector<int32_t> left, right;              // what differs
  std::vector<int32_t> left_after, right_after;  // what follows
  int64_t common = 0;                            // see Divergence
};

struct CauseReport {
  int64_t places = 0;       // places where a child parts from the others for this cause
  int64_t divergences = 0;  // such children
  /// Tokens that are encoded again though they are equal: per divergence the longest common run of ids after
  /// the differing text. Only up to the next difference, so less than all that was lost. 0 where is_lost is
  /// false.
  int64_t tokens = 0;
  std::vector<SharingExample> examples;  // those with the most tokens first
};

struct SharingReport {
  int64_t places = 0;        // nodes (and groups' starts) after which trajectories part
  int64_t divergences = 0;   // children of places, less one each
  int64_t not_examined = 0;  // divergences left out: the work was bounded
  std::array<CauseReport, kNumCauses> causes;

  const CauseReport& operator[](Cause cause) const { return causes[static_cast<size_t>(cause)]; }
  CauseReport& operator[](Cause cause) { return causes[static_cast<size_t>(cause)]; }
  int64_t lost_tokens() const;
};

struct SharingOptions {
  const Vocabulary* vocabulary = nullptr;  // null: ids only
  int64_t examples = 3;                    // per cause
  int64_t work = 0;                        // tokens to look at in all; 0: 4 per flat token and 32 million
};

/// Looks at every place of `forest`, which is that of all rows of `trajectories`: at every node with two or
/// more children, and at the roots. A child with fewer trajectories is compared with the (at most 8) largest
/// of its siblings that have a group in common with it; rows without a group_id are of one group. Each child
/// is compared by its longest trajectory; and where one side may be the history of what was sampled on the
/// other, by up to 16 trajectories of different branches, and what the histories lose adds up. Linear in the
/// flat tokens, but for the work on places, which `work` bounds.
SharingReport analyse_sharing(const Trajectories& trajectories, const Forest& forest,
                              const SharingOptions& options);

}  // namespace espalier::cli
