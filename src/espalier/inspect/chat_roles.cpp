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

// python/espalier/page/messages.py has the same.
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
    {"<\uFF5CUser\uFF5C>", Marker::kRole, Role::kUser},  // DeepSeek
    {"<\uFF5CAssistant\uFF5C>", Marker::kRole, Role::kAssistant},
    {"<|im_end|>", Marker::kEnd},
    {"<|eot_id|>", Marker::kEnd},
    {"<end_of_turn>", Marker::kEnd},
    {"<|end|>", Marker::kEnd},
    {"<|return|>", Marker::kEnd},
    {"</s>", Marker::kEnd},
    {"<|endoftext|>", Marker::kEnd},
});
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

}  // namespace

size_t advance(const Vocabulary& vocabulary, int32_t token, ChatState* state) {
  const std::string_view text = vocabulary.bytes(token);
  if (state->in_header) {
    read_header(text, state);
    return 0;
  }
  state->tail += text;
  size_t opened = 0;
  // Every marker ends in one of these.
  if (text.find_first_of(">]") != std::string_view::npos) {
    for (const Marker& marker : kMarkers) {
      const size_t found = find_fresh(state->tail, marker.text, text.size());
      if (found == std::string_view::npos || marker.kind == Marker::kEnd) continue;
      const size_t size = state->tail.size() - found;
      if (opened != 0 && size > opened) continue;
      opened = size;
      state->role = marker.role;
      state->in_header = marker.kind == Marker::kHeader;
      state->thinking = false;
    }
    if (state->in_header) {
      state->tail.clear();
      return opened;
    }
    if (find_fresh(state->tail, "<think>", text.size()) != std::string_view::npos) state->thinking = true;
    if (find_fresh(state->tail, "</think>", text.size()) != std::string_view::npos) state->thinking = false;
  }
  if (state->tail.size() > kLongestMarker) state->tail.erase(0, state->tail.size() - kLongestMarker);
  return opened;
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

}  // namespace espalier
