// SPDX-License-Identifier: Apache-2.0
// Where trajectories share tokens, and where they could share more.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/divergence.h"
#include "espalier/inspect/examples.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Finds, among sequences added earlier, those that have n-grams of ids in common with a new one, anywhere in
/// the first kAlikeWindow tokens. For each sequence the smallest hashes of its n-grams are stored (a min-hash
/// sketch), so the work does not grow with the number of sequences. Sequences with nearly the same text are
/// found almost always, those with a few common n-grams sometimes.
class AlikeIndex {
 public:
  /// Sequences that share a stored hash with `tokens` and were the first to have it, without duplicates.
  std::vector<int64_t> find(std::span<const int32_t> tokens) const;
  void add(std::span<const int32_t> tokens, int64_t sequence);

 private:
  std::unordered_map<uint64_t, int64_t> first_;
};

inline constexpr int64_t kAlikeWindow = 256;

/// Statistics of the positions [begin, end).
struct DepthBucket {
  int64_t begin = 0, end = 0;
  int64_t tree_tokens = 0, flat_tokens = 0;
  double mean_multiplicity() const {
    return static_cast<double>(flat_tokens) / static_cast<double>(tree_tokens);
  }
  /// The fraction of the flat tokens that is not encoded again.
  double reused() const { return 1 - static_cast<double>(tree_tokens) / static_cast<double>(flat_tokens); }
};

/// Buckets of equal width (1, 2 or 5 times a power of ten), at most `most` of them, up to the longest
/// trajectory. Linear in nodes and in the buckets that they span.
std::vector<DepthBucket> sharing_by_depth(const Forest& forest, int64_t most = 20);

struct CauseReport {
  int64_t places = 0;       // places where a child diverges from the others for this cause
  int64_t divergences = 0;  // such children
  /// Tokens that are encoded again although they are equal: for each divergence, the equal ids after the
  /// differing text (Divergence::common), a lower bound of the loss. 0 if is_lost is false.
  int64_t tokens = 0;
  /// The part of `tokens` that no other trajectory of the same group has. They can be encoded once only if
  /// the groups are in the same step.
  int64_t tokens_between_groups = 0;
  static constexpr int64_t kMostValues = 6;
  std::vector<std::string> values;  // the first few different texts at such places (requires a vocabulary)
  std::vector<SharingExample> examples;  // those with the most tokens first (ExamplePool)
};

/// Tokens that are encoded again although another branch has them (CauseReport::tokens): positions on the
/// path of `row`, from the first of them to the last, including details between them that differ.
struct LostSpan {
  Cause cause = Cause::kOtherText;
  int64_t node = 0;   // the branch of `row`, which diverges from `other` for this cause
  int64_t other = 0;  // the branch that has the tokens, too
  int64_t row = 0;
  int64_t begin = 0, end = 0;
};

struct SharingReport {
  int64_t places = 0;        // nodes (and starts of groups) after which trajectories diverge
  int64_t divergences = 0;   // children of places, less one each
  int64_t not_examined = 0;  // divergences that exceeded the work limit
  std::array<CauseReport, kNumCauses> causes;
  std::vector<LostSpan> lost;  // in no order; one or more for each divergence that loses tokens

  const CauseReport& operator[](Cause cause) const { return causes[static_cast<size_t>(cause)]; }
  CauseReport& operator[](Cause cause) { return causes[static_cast<size_t>(cause)]; }
  int64_t lost_tokens() const;
  int64_t lost_tokens_between_groups() const;
};

struct SharingOptions {
  const Vocabulary* vocabulary = nullptr;  // nullptr: ids only
  int64_t examples = 3;                    // per cause
  int64_t work = 0;                        // limit of compared tokens; 0: 4 per flat token plus 32 million
};

/// Examines every place of `forest`, the forest of all rows of `trajectories`: every node with two or more
/// children, and the roots. A child is compared with its (at most 8) largest siblings that have more
/// trajectories and a group in common with it; rows without a group_id form one group. Each child is
/// represented by its longest trajectory. If one side may be the history of text sampled on the other, up to
/// 16 trajectories of different branches are compared, and the losses of the histories add up. If nothing is
/// lost within its group, the child is compared with similar siblings of other groups (AlikeIndex): the
/// forest is shared over groups, so a time or an id in an otherwise equal prompt loses sharing between them.
/// Another task does not count as lost, nor does a detail with little equal text after it. Linear in the flat
/// tokens, except for the work on places, which `work` limits.
SharingReport analyse_sharing(const Trajectories& trajectories, const Forest& forest,
                              const SharingOptions& options);

}  // namespace espalier
