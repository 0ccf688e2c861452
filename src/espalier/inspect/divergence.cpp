// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/divergence.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>

#include "espalier/inspect/volatile_text.h"

namespace espalier {
namespace {

using Tokens = std::span<const int32_t>;

// The sides count as aligned again after this many consecutive equal ids.
constexpr int64_t kFewestCommon = 4;
// A longer difference is another text, not a detail of the same text.
constexpr int64_t kLongestDetail = 64;
// After a detail, the message must be equal for this many tokens: of any message, of possible samples of a
// model, and of the user's messages.
constexpr int64_t kMessageGoesOn = 8, kSampleGoesOn = 16, kUserGoesOn = 32;
constexpr int64_t kLongestThought = 1 << 14;
constexpr int64_t kLongestSystemPrompt = 1 << 13;
// Maximum number of numbers and ids in one message that are skipped.
constexpr int kMostDetails = 32;

struct Alignment {
  int64_t left = 0, right = 0;
};

int64_t common_prefix(Tokens left, Tokens right) {
  const auto size = std::min(left.size(), right.size());
  return std::mismatch(left.begin(), left.begin() + static_cast<int64_t>(size), right.begin()).first -
         left.begin();
}

/// Whether both begin with kFewestCommon equal tokens, or one is a prefix of the other.
bool comes_together(Tokens left, Tokens right) {
  const int64_t most = std::min<int64_t>({kFewestCommon, std::ssize(left), std::ssize(right)});
  return common_prefix(left, right) >= most;
}

/// The first place where equal text with different ids ends and equal ids follow.
std::optional<Alignment> align_texts(const Vocabulary& vocabulary, Tokens left, Tokens right, int64_t* work) {
  std::string texts[2];
  Tokens sides[2] = {left, right};
  int64_t at[2] = {0, 0};
  while (at[0] + at[1] < 2 * kWindow) {
    if (at[0] > 0 && texts[0].size() == texts[1].size() &&
        comes_together(left.subspan(at[0]), right.subspan(at[1]))) {
      return Alignment{at[0], at[1]};
    }
    const int shorter = texts[1].size() < texts[0].size();
    if (at[shorter] == std::ssize(sides[shorter])) return std::nullopt;
    const std::string_view bytes = vocabulary.bytes(sides[shorter][at[shorter]++]);
    ++*work;
    if (bytes.empty()) return std::nullopt;
    texts[shorter] += bytes;
    const size_t both = std::min(texts[0].size(), texts[1].size());
    const size_t from = std::min(both, texts[shorter].size() - bytes.size());
    if (texts[0].compare(from, both - from, texts[1], from, both - from) != 0) return std::nullopt;
  }
  return std::nullopt;
}

bool is_space(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

struct Thought {
  bool has_content = false;
  int64_t after = 0;  // the token after </think> and spaces
};

int64_t skip_spaces(const Vocabulary& vocabulary, Tokens tokens, int64_t at) {
  while (at < std::ssize(tokens) && is_space(vocabulary.bytes(tokens[at]))) ++at;
  return at;
}

/// The thought at the start of `tokens`; nullopt if it does not end. Text without one is an empty thought.
std::optional<Thought> read_thought(const Vocabulary& vocabulary, Tokens tokens, bool inside, int64_t* work) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  std::string text;
  size_t content = 0;
  int64_t at = inside ? 0 : skip_spaces(vocabulary, tokens, 0);
  const int64_t begin = at;
  for (; at < std::min<int64_t>(std::ssize(tokens), kLongestThought); ++at) {
    const size_t fresh = text.size() - std::min(text.size(), kClose.size());
    text += vocabulary.bytes(tokens[at]);
    ++*work;
    if (!inside) {
      const size_t both = std::min(text.size(), kOpen.size());
      if (text.compare(0, both, kOpen, 0, both) != 0) return Thought{false, begin};
      if (both < kOpen.size()) continue;
      inside = true;
      content = kOpen.size();
    }
    const size_t close = text.find(kClose, std::max(fresh, content));
    if (close == std::string::npos) continue;
    const bool has_content = !is_space(std::string_view(text).substr(content, close - content));
    return Thought{has_content, skip_spaces(vocabulary, tokens, at + 1)};
  }
  return inside ? std::nullopt : std::optional<Thought>(Thought{false, begin});
}

/// Whether both are equal for long enough to be the same text, or to the end of the message or of one side.
bool same_words(const Vocabulary& vocabulary, Tokens left, Tokens right) {
  const int64_t most = std::min<int64_t>({kSampleGoesOn, std::ssize(left), std::ssize(right)});
  const int64_t message = tokens_before_marker(vocabulary, left.first(static_cast<size_t>(most)));
  return common_prefix(left, right) >= message;
}

/// The place after a thought that only one side has, if the sides are equal after it.
std::optional<Alignment> align_thoughts(const Vocabulary& vocabulary, bool inside, Tokens left, Tokens right,
                                        int64_t* work) {
  const auto a = read_thought(vocabulary, left, inside, work),
             b = read_thought(vocabulary, right, inside, work);
  if (!a || !b || a->has_content == b->has_content) return std::nullopt;
  Alignment at{a->after, b->after};
  if (!comes_together(left.subspan(at.left), right.subspan(at.right))) {
    const auto again = align_texts(vocabulary, left.subspan(at.left), right.subspan(at.right), work);
    if (!again) return std::nullopt;
    at = {at.left + again->left, at.right + again->right};
  }
  if (!same_words(vocabulary, left.subspan(at.left), right.subspan(at.right))) return std::nullopt;
  return at;
}

/// The nearest common sequence of kFewestCommon ids within the window.
std::optional<Alignment> align_ids(Tokens left, Tokens right) {
  const auto key = [](Tokens tokens, int64_t at) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < kFewestCommon; ++i) {
      hash = (hash ^ static_cast<uint32_t>(tokens[at + i])) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  };
  std::unordered_map<uint64_t, int64_t> first;
  for (int64_t i = 0; i < kWindow && i + kFewestCommon <= std::ssize(left); ++i)
    first.emplace(key(left, i), i);
  std::optional<Alignment> best;
  for (int64_t j = 0; j < kWindow && j + kFewestCommon <= std::ssize(right); ++j) {
    if (best && j >= best->left + best->right) break;
    const auto found = first.find(key(right, j));
    if (found == first.end() || (best && found->second + j >= best->left + best->right)) continue;
    if (comes_together(left.subspan(found->second), right.subspan(j))) best = Alignment{found->second, j};
  }
  return best;
}

class Comparison {
 public:
  Comparison(const DivergenceContext& context, const Side& left, const Side& right)
      : context_(context), vocabulary_(context.vocabulary), left_(left.tokens), right_(right.tokens) {
    const Role role = context.chat.role;
    own_words_ = role == Role::kAssistant ||
                 (role == Role::kUnknown && context.masked && (left.sampled || right.sampled));
    samples_ = own_words_ && context.masked && left.trained && right.trained;
    // Without a mask, history and samples cannot be distinguished, and two samples are often equal again
    // later.
    by_text_only_ =
        context.history_only || (own_words_ && (!context.masked || (left.sampled && right.sampled)));
  }

  Divergence run() {
    if (!left_.empty() && !right_.empty() && left_[0] == right_[0]) return aligned(Cause::kRoutes, {0, 0});
    if (samples_) return {.cause = Cause::kSampling};
    if (vocabulary_ != nullptr) {
      if (const auto at = align_texts(*vocabulary_, left_, right_, &work_))
        return aligned(Cause::kRetokenised, *at);
      if (own_words_ || context_.chat.role == Role::kUnknown) {
        const auto at = align_thoughts(*vocabulary_, context_.chat.thinking, left_, right_, &work_);
        if (at) return aligned(Cause::kThinking, *at);
      }
    }
    if (by_text_only_) return unaligned();
    work_ += std::min<int64_t>(kWindow, std::ssize(left_)) + std::min<int64_t>(kWindow, std::ssize(right_));
    const auto at = align_ids(left_, right_);
    return at ? by_difference(*at) : unaligned();
  }

 private:
  Divergence aligned(Cause cause, Alignment at) const {
    const int64_t common = common_prefix(left_.subspan(at.left), right_.subspan(at.right));
    return {.cause = cause,
            .left_size = at.left,
            .right_size = at.right,
            .common = common,
            .right_end = at.right + common,
            .work = work_ + common};
  }

  Divergence unaligned() const {
    if (context_.chat.role == Role::kSystem) {
      const auto left_end = tokens_before_marker(*vocabulary_, first(left_, kLongestSystemPrompt));
      const auto right_end = tokens_before_marker(*vocabulary_, first(right_, kLongestSystemPrompt));
      return aligned(Cause::kSystemPrompt, {left_end, right_end});
    }
    return {.cause = own_words_ ? Cause::kSampling : Cause::kOtherInput, .work = work_};
  }

  Divergence by_difference(Alignment at) const {
    const VolatileDifference words = difference({0, 0}, at);
    const bool number = vocabulary_ != nullptr &&
                        is_date_or_number(vocabulary_->text(left_.first(at.left))) &&
                        is_date_or_number(vocabulary_->text(right_.first(at.right)));
    Divergence found;
    if (number || words.kind == Volatile::kNumber) {
      found = aligned(words.kind == Volatile::kIdentifier ? Cause::kIdentifier : Cause::kTimestamp, at);
    } else if (const auto cause = cause_of_text(at)) {
      found = aligned(words.kind == Volatile::kIdentifier ? Cause::kIdentifier : *cause, at);
    } else {
      return unaligned();
    }
    found.left_value = words.left;
    found.right_value = words.right;
    if (vocabulary_ != nullptr) pass_over_details(at, &found);
    return found;
  }

  /// The cause of a difference that is not a number or an id, if the rest of the message is equal.
  std::optional<Cause> cause_of_text(Alignment at) const {
    const int64_t longest = std::max(at.left, at.right);
    if (context_.chat.role == Role::kSystem) {
      const bool same_message =
          message_size(left_, longest + 1) >= at.left && message_size(right_, longest + 1) >= at.right;
      return same_message ? std::optional(Cause::kSystemPrompt) : std::nullopt;
    }
    const int64_t goes_on = context_.chat.role == Role::kUser      ? kUserGoesOn
                            : own_words_ || vocabulary_ == nullptr ? kSampleGoesOn
                                                                   : kMessageGoesOn;
    const bool detail = longest <= kLongestDetail &&
                        message_size(left_, at.left + goes_on) >= at.left + goes_on &&
                        common_prefix(left_.subspan(at.left), right_.subspan(at.right)) >= goes_on &&
                        message_size(right_, at.right) >= at.right;
    return detail ? std::optional(Cause::kOtherText) : std::nullopt;
  }

  /// Adds the equal tokens after further numbers and ids of the same message. A prompt with the time often
  /// also has the number of the request.
  void pass_over_details(Alignment at, Divergence* found) const {
    const int64_t left_end = message_size(left_, kLongestSystemPrompt),
                  right_end = message_size(right_, kLongestSystemPrompt);
    found->work += left_end + right_end;
    int64_t common = found->common;
    for (int detail = 0; detail < kMostDetails; ++detail) {
      at = {at.left + common, at.right + common};
      if (at.left >= left_end || at.right >= right_end) return;
      const auto next = align_ids(left_.subspan(at.left), right_.subspan(at.right));
      found->work += 2 * kWindow;
      if (!next || at.left + next->left > left_end || at.right + next->right > right_end) return;
      const Alignment after{at.left + next->left, at.right + next->right};
      if (difference(at, after).kind == Volatile::kNone) return;
      at = after;
      common = common_prefix(left_.subspan(at.left), right_.subspan(at.right));
      found->common += common;
      found->right_end = at.right + common;
      found->work += common;
    }
  }

  /// The difference of the whole words around the tokens from `begin` to `end`.
  VolatileDifference difference(Alignment begin, Alignment end) const {
    if (vocabulary_ == nullptr) return {};
    return volatile_difference(words_around(left_, begin.left, end.left),
                               words_around(right_, begin.right, end.right));
  }

  std::string words_around(Tokens side, int64_t begin, int64_t end) const {
    const int64_t from = std::max<int64_t>(0, begin - kWordTokens);
    std::string before = from == 0 ? context_.before : "";
    before += vocabulary_->text(side.subspan(from, begin - from));
    std::string words(word_end(before));
    words += vocabulary_->text(side.subspan(begin, end - begin));
    // Letters without digits are not the continuation of an id.
    if (word_end(words).find_first_of("0123456789") == std::string_view::npos) return words;
    const std::string after = vocabulary_->text(first(side.subspan(end), kWordTokens));
    return words + std::string(word_start(after));
  }

  /// The number of tokens of the message that `tokens` starts in, at most `most`.
  int64_t message_size(Tokens tokens, int64_t most) const {
    const Tokens looked_at = first(tokens, most);
    return vocabulary_ == nullptr ? std::ssize(looked_at) : tokens_before_marker(*vocabulary_, looked_at);
  }

  static Tokens first(Tokens tokens, int64_t most) {
    return tokens.first(static_cast<size_t>(std::min<int64_t>(std::ssize(tokens), most)));
  }

  const DivergenceContext& context_;
  const Vocabulary* vocabulary_;
  Tokens left_, right_;
  bool own_words_;  // at least one side is text of the assistant
  bool samples_;
  bool by_text_only_;
  int64_t work_ = 1;
};

}  // namespace

bool is_lost(Cause cause) {
  return cause >= Cause::kRetokenised;
}

const CauseText& text_of(Cause cause) {
  static constexpr std::array<CauseText, kNumCauses> kTexts{{
      {"sampling", "the assistant's text differs", ""},
      {"other_input", "text of the user, a tool or the task differs", ""},
      {"other_group", "another group begins with another text", ""},
      {"retokenised", "the same text with different ids (re-tokenised history)",
       "keep the sampled ids in the history instead of re-tokenising its text"},
      {"stripped_thinking", "a thought on one side only (stripped thinking)",
       "keep thoughts in the history, or train on turns without them"},
      {"system_prompt", "the system prompt was changed",
       "use a single system prompt, or move the part that changes to its end"},
      {"timestamp", "a date, a time, a counter or another number differs",
       "fix the date or number, or move it after the shared text"},
      {"identifier", "an id differs (of a request, a session, a user)",
       "leave the id out, or move it after the shared text"},
      {"expert_routes", "recorded expert routes differ",
       "record routes once per prefix, or leave routed_experts out"},
      {"other_text", "another short text differs", "see the examples"},
  }};
  return kTexts[static_cast<size_t>(cause)];
}

Divergence compare(const DivergenceContext& context, const Side& left, const Side& right) {
  return Comparison(context, left, right).run();
}

}  // namespace espalier
