// Why two trajectories that went the same way part at a token.
#pragma once

#include <cstdint>
#include <span>

#include "espalier/cli/inspect/chat_roles.h"
#include "espalier/model/vocabulary.h"

namespace espalier::cli {

enum class Cause {
  // Branching that is meant to be.
  kSampling,    // the assistant's own words differ
  kOtherInput,  // the user, a tool or the task says something else
  kOtherGroup,  // the trajectories belong to different groups
  // Sharing that was lost: the same text was meant, or goes on the same.
  kRetokenised,   // equal text, different ids
  kThinking,      // one side has a thought, from which the other was stripped
  kSystemPrompt,  // the system prompt was changed
  kTimestamp,     // a date, a time or a number differs, the text goes on the same
  kRoutes,        // equal ids with different recorded expert routes
  kOtherText,     // another short piece of text differs, the message goes on the same
};
inline constexpr int kNumCauses = 9;

bool is_lost(Cause cause);
/// One word for files, and a phrase for people.
const char* to_string(Cause cause);
const char* phrase(Cause cause);

/// The tokens of one trajectory from the place on.
struct Side {
  std::span<const int32_t> tokens;
  bool trained = false;  // the trajectory trains on the first of them
  bool sampled = false;  // some trajectory that goes this way does
};

struct DivergenceContext {
  const Vocabulary* vocabulary = nullptr;  // null: ids only; equal texts and roles are then not seen
  ChatState chat;                          // at the place
  bool masked = true;                      // some tokens carry no loss, so that carrying it says something
  bool history_only = false;               // look for the same text and for thoughts only
};

struct Divergence {
  Cause cause = Cause::kOtherInput;
  int64_t left_size = 0;   // tokens of the differing text on either side
  int64_t right_size = 0;  // (0 and 0 where the two never come together again)
  int64_t common = 0;      // tokens that follow it and are equal on both sides
  int64_t work = 0;        // tokens looked at
};

/// Compares two sides of a place. Where both train on the assistant's words they are samples, and are not
/// looked into. Otherwise the sides are aligned again: by text where a vocabulary is given (the same text in
/// other ids; a thought on one side only), then by the common runs of ids among their first kWindow tokens.
/// `common` is the length of the run of equal ids after the alignment, up to the next difference.
Divergence compare(const DivergenceContext& context, const Side& left, const Side& right);

inline constexpr int64_t kWindow = 256;

}  // namespace espalier::cli
