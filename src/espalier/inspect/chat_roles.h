// SPDX-License-Identifier: Apache-2.0
// Finds the role that speaks at a token of a chat, from the markers of chat templates.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "espalier/data/vocabulary.h"

namespace espalier {

enum class Role { kUnknown, kSystem, kUser, kAssistant, kTool };
inline const char* to_string(Role role) {
  constexpr const char* kNames[] = {"unknown", "system", "user", "assistant", "tool"};  // in its order
  return kNames[static_cast<size_t>(role)];
}

/// The state of a chat at a token, determined by the tokens before it.
struct ChatState {
  Role role = Role::kUnknown;  // of the last marker
  bool thinking = false;       // after <think>, before </think>
  bool in_header = false;      // between a marker and the end of the role's name
  std::string tail;            // the end of the text so far, or the header: markers may span tokens
};

/// Advances `state` by one token. Supports ChatML, the headers of Llama 3, Gemma and Harmony, `[INST]`, and
/// one token per role (`<|user|>`). Without such markers the role stays unknown. If a marker that opens a
/// message ends in the token, returns the bytes from the beginning of the marker to the end of the token;
/// else 0.
size_t advance(const Vocabulary& vocabulary, int32_t token, ChatState* state);

/// The number of tokens before the first token that contains part of a marker that ends or opens a message;
/// all tokens if there is none.
int64_t tokens_before_marker(const Vocabulary& vocabulary, std::span<const int32_t> tokens);

}  // namespace espalier
