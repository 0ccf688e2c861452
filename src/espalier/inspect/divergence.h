// SPDX-License-Identifier: Apache-2.0
// Why two trajectories with a common prefix diverge at a token.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "espalier/data/vocabulary.h"
#include "espalier/inspect/chat_roles.h"

namespace espalier {

enum class Cause {
  // Intended branching.
  kSampling,    // sampled text of the assistant differs
  kOtherInput,  // text of the user, a tool or the task differs
  kOtherGroup,  // the trajectories belong to different groups
  // Lost sharing: the texts were meant to be equal, or are equal again after the difference.
  kRetokenised,   // equal text, different ids
  kThinking,      // one side has a thought that was stripped from the other
  kSystemPrompt,  // the system prompt was changed
  kTimestamp,     // a date, a time, a counter or another number differs; the text after it is equal
  kIdentifier,    // an id (of a request, a session, a user) differs; the text after it is equal
  kRoutes,        // equal ids with different recorded expert routes
  kOtherText,     // another short text differs; the message after it is equal
};
inline constexpr int kNumCauses = 10;

/// The number of tokens around a place that are searched for the whole word that differs.
inline constexpr int64_t kWordTokens = 24;

bool is_lost(Cause cause);
struct CauseText {
  const char* word;    // for files
  const char* phrase;  // for reports
  const char* remedy;  // how to avoid it, an imperative without a full stop; empty if nothing is lost
};
const CauseText& text_of(Cause cause);

/// The tokens of one trajectory after the place where two trajectories diverge.
struct Side {
  std::span<const int32_t> tokens;
  bool trained = false;  // the trajectory trains on the first of them
  bool sampled = false;  // some trajectory of this branch trains on it
};

struct DivergenceContext {
  const Vocabulary* vocabulary = nullptr;  // nullptr: ids only, without equal texts and roles
  ChatState chat;                          // at the place
  bool masked = true;                      // some tokens carry no loss, so loss marks sampled tokens
  bool history_only = false;               // search only for equal text and for thoughts
  std::string before;                      // the end of the text before the place
};

struct Divergence {
  Cause cause = Cause::kOtherInput;
  int64_t left_size = 0;   // tokens of the differing text on either side
  int64_t right_size = 0;  // (both 0 if the sides are never equal again)
  int64_t common = 0;      // equal tokens after it
  int64_t right_end = 0;   // tokens of the right side up to the last of these
  int64_t work = 0;        // tokens compared
  // The whole words that differ, if the cause is a number or an id.
  std::string left_value{};
  std::string right_value{};
};

/// Compares two sides of a place. If both train on the assistant's text, they are samples and are not
/// compared further. Otherwise the sides are aligned again: by text if there is a vocabulary (equal text with
/// different ids; a thought on one side only), then by common sequences of ids among their first kWindow
/// tokens. `common` counts the equal ids after the alignment, up to the next difference. If that difference
/// is again a number or an id in the same message, the equal ids after it count too.
Divergence compare(const DivergenceContext& context, const Side& left, const Side& right);

inline constexpr int64_t kWindow = 256;

}  // namespace espalier
