// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/chat_roles.h"

#include <algorithm>
#include <array>

namespace espalier {
namespace {

struct Marker {
  std::string_view text;
  enum Kind { kHeader, kRole, kEnd } kind;
  Role role = Role::kUnknown;
};

constexpr auto kMarkers = std::to_array<Marker>({
    {"<|im_start|>", Marker::kHeader},
    {"<|start_header_id|>", Marker::kHeader},
    {"<start_of_turn>", Marker::kHeader},
    {"<|start|>", Marker::kHeader},
    {"[INST]", Marker::kRole, Role::kUser},
    {"[/INST]", Marker::kRole, Role::kAssistant},
    {"<<SYS>>", Marker::kRole, Role::kSystem},
    {"<</SYS>>", Marker::kRole, Role::kUser},
    {"[TOOL_RESULTS]", Marker::kRole, Role::kTool},
    {"<tool_response>", Marker::kRole, Role::kTool},
    {"<|system|>", Marker::kRole, Role::kSystem},
    {"<|user|>", Marker::kRole, Role::kUser},
    {"<|assistant|>", Marker::kRole, Role::kAssistant},
    {"<|observation|>", Marker::kRole, Role::kTool},
    {"<\xEF\xBD\x9CUser\xEF\xBD\x9C>", Marker::kRole, Role::kUser},  // DeepSeek, with U+FF5C
    {"<\xEF\xBD\x9C"
     "Assistant\xEF\xBD\x9C>",
     Marker::kRole, Role::kAssistant},
    {"<|im_end|>", Marker::kEnd},
    {"<|eot_id|>", Marker::kEnd},
    {"<end_of_turn>", Marker::kEnd},
    {"<|end|>", Marker::kEnd},
    {"<|return|>", Marker::kEnd},
    {"</s>", Marker::kEnd},
    {"<|endoftext|>", Marker::kEnd},
});
// Other markers of templates, which do not determine the role.
constexpr auto kOtherMarkers =
    std::to_array<std::string_view>({"<|begin_of_text|>", "<bos>", "</tool_response>", "<|message|>"});
constexpr size_t kLongestMarker = 24;
constexpr size_t kLongestHeader = 40;
constexpr auto kHeaderEnds =
    std::to_array<std::string_view>({"\n", "<|end_header_id|>", "<|message|>", "<|channel|>"});

Role role_named(std::string_view header) {
  const size_t begin = std::min(header.find_first_not_of(" \t"), header.size());
  size_t end = begin;
  while (end < header.size() &&
         ((header[end] >= 'a' && header[end] <= 'z') || (header[end] >= 'A' && header[end] <= 'Z')))
    ++end;
  const std::string_view name = header.substr(begin, end - begin);
  const auto is = [name](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is({"system", "developer"})) return Role::kSystem;
  if (is({"user", "human"})) return Role::kUser;
  if (is({"assistant", "model", "gpt"})) return Role::kAssistant;
  if (is({"tool", "ipython", "function", "functions", "observation", "environment"})) return Role::kTool;
  return Role::kUnknown;
}

void read_header(std::string_view text, ChatState* state) {
  state->tail += text;
  const bool ended = std::any_of(kHeaderEnds.begin(), kHeaderEnds.end(), [state](std::string_view end) {
    return state->tail.find(end) != std::string::npos;
  });
  if (!ended && state->tail.size() < kLongestHeader) return;
  state->role = role_named(state->tail);
  state->in_header = false;
  state->tail.clear();
}

/// The last occurrence of `text` that ends in the last `fresh` bytes of `tail`; npos if there is none.
size_t find_fresh(std::string_view tail, std::string_view text, size_t fresh) {
  const size_t found = tail.rfind(text);
  if (found == std::string_view::npos || found + text.size() + fresh <= tail.size())
    return std::string_view::npos;
  return found;
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

/// A marker in a text; `marker` is null for one of kOtherMarkers.
struct FoundMarker {
  size_t begin = 0, size = 0;
  const Marker* marker = nullptr;
};

/// The first marker at or after `from`; if there is none, one of size 0 at the end.
FoundMarker next_marker(std::string_view text, size_t from) {
  for (size_t at = text.find_first_of("<[", from); at < text.size(); at = text.find_first_of("<[", at + 1)) {
    const std::string_view rest = text.substr(at);
    for (const Marker& marker : kMarkers) {
      if (rest.starts_with(marker.text)) return {at, marker.text.size(), &marker};
    }
    for (const std::string_view marker : kOtherMarkers) {
      if (rest.starts_with(marker)) return {at, marker.size(), nullptr};
    }
  }
  return {text.size(), 0, nullptr};
}

class MessageReader {
 public:
  MessageReader(std::string_view text, ChatState* state) : text_(text), state_(*state) {
    current_.role = state->role;
  }

  std::vector<Message> run() {
    while (at_ < text_.size()) {
      if (state_.in_header) {
        pass_header();
      } else {
        pass_words();
      }
    }
    if (current_.begin < text_.size()) finish();
    return std::move(messages_);
  }

 private:
  void pass_header() {
    const std::string header = state_.tail + std::string(text_.substr(at_, kLongestHeader));
    size_t end = std::string::npos, size = 0;
    for (const std::string_view mark : kHeaderEnds) {
      const size_t found = header.find(mark);
      if (found >= end) continue;
      end = found;
      size = mark.size();
    }
    if (end == std::string::npos && header.size() < kLongestHeader) {
      state_.tail = header;
      at_ = text_.size();
      return;
    }
    // Without an end this is not a header, and its text belongs to the message.
    if (end != std::string::npos) at_ += end + size - state_.tail.size();
    state_.role = current_.role = role_named(header);
    state_.in_header = false;
    state_.tail.clear();
  }

  void pass_words() {
    const FoundMarker found = next_marker(text_, at_);
    const std::string_view words = text_.substr(at_, found.begin - at_);
    if (current_.ended && !is_blank(words)) {
      finish();
      current_ = Message();
      current_.role = state_.role;
      current_.begin = at_;
    }
    if (!current_.ended) current_.text += words;
    at_ = found.begin + found.size;
    if (found.marker == nullptr) return;
    if (found.marker->kind == Marker::kEnd) {
      current_.ended = true;
      return;
    }
    begin_message(found.begin);
    state_.in_header = found.marker->kind == Marker::kHeader;
    state_.role = current_.role = found.marker->role;
  }

  void begin_message(size_t begin) {
    // Space before the first message belongs to this message.
    const bool nothing_before =
        messages_.empty() && !current_.opened && !current_.ended && is_blank(current_.text);
    if (nothing_before) begin = 0;
    if (current_.begin < begin) finish();
    current_ = Message();
    current_.begin = begin;
    current_.opened = true;
  }

  void finish() {
    // Templates write line feeds after the role's name.
    if (current_.opened) current_.text.erase(0, current_.text.find_first_not_of("\r\n"));
    current_.text = valid_utf8(current_.text);
    messages_.push_back(std::move(current_));
  }

  std::string_view text_;
  ChatState& state_;
  size_t at_ = 0;
  Message current_;
  std::vector<Message> messages_;
};

}  // namespace

const char* to_string(Role role) {
  switch (role) {
    case Role::kSystem:
      return "system";
    case Role::kUser:
      return "user";
    case Role::kAssistant:
      return "assistant";
    case Role::kTool:
      return "tool";
    case Role::kUnknown:
      break;
  }
  return "unknown";
}

void advance(const Vocabulary& vocabulary, int32_t token, ChatState* state) {
  const std::string_view text = vocabulary.bytes(token);
  if (state->in_header) return read_header(text, state);
  state->tail += text;
  // Every marker ends in one of these.
  if (text.find_first_of(">]") != std::string_view::npos) {
    size_t last = 0;
    bool found_any = false;
    for (const Marker& marker : kMarkers) {
      const size_t found = find_fresh(state->tail, marker.text, text.size());
      if (found == std::string_view::npos || marker.kind == Marker::kEnd || (found_any && found < last))
        continue;
      last = found;
      found_any = true;
      state->role = marker.role;
      state->in_header = marker.kind == Marker::kHeader;
      state->thinking = false;
    }
    if (state->in_header) {
      state->tail.clear();
      return;
    }
    if (find_fresh(state->tail, "<think>", text.size()) != std::string_view::npos) state->thinking = true;
    if (find_fresh(state->tail, "</think>", text.size()) != std::string_view::npos) state->thinking = false;
  }
  if (state->tail.size() > kLongestMarker) state->tail.erase(0, state->tail.size() - kLongestMarker);
}

int64_t tokens_before_marker(const Vocabulary& vocabulary, std::span<const int32_t> tokens) {
  std::string tail;
  size_t dropped = 0;  // bytes of the text before `tail`
  std::vector<size_t> begins;
  for (const int32_t token : tokens) {
    const std::string_view text = vocabulary.bytes(token);
    begins.push_back(dropped + tail.size());
    tail += text;
    if (text.find_first_of(">]") != std::string_view::npos) {
      size_t first = std::string::npos;
      for (const Marker& marker : kMarkers)
        first = std::min(first, find_fresh(tail, marker.text, text.size()));
      if (first != std::string::npos) {
        const size_t begin = dropped + first;
        // The last token that begins at or before the marker contains its first byte.
        return std::upper_bound(begins.begin(), begins.end(), begin) - begins.begin() - 1;
      }
    }
    if (tail.size() > kLongestMarker) {
      dropped += tail.size() - kLongestMarker;
      tail.erase(0, tail.size() - kLongestMarker);
    }
  }
  return static_cast<int64_t>(tokens.size());
}

std::vector<Message> messages_of(std::string_view text, ChatState* state) {
  return MessageReader(text, state).run();
}

}  // namespace espalier
