// SPDX-License-Identifier: Apache-2.0
// Finds the role that speaks at a token of a chat, from the markers of chat templates.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/vocabulary.h"

namespace espalier {

enum class Role { kUnknown, kSystem, kUser, kAssistant, kTool };
const char* to_string(Role role);

/// The state of a chat at a token, determined by the tokens before it.
struct ChatState {
  Role role = Role::kUnknown;  // of the last marker
  bool thinking = false;       // after <think>, before </think>
  bool in_header = false;      // between a marker and the end of the role's name
  std::string tail;            // the end of the text so far, or the header: markers may span tokens
};

/// Advances `state` by one token. Supports ChatML, the headers of Llama 3, Gemma and Harmony, `[INST]`, and
/// one token per role (`<|user|>`). Without such markers the role stays unknown.
void advance(const Vocabulary& vocabulary, int32_t token, ChatState* state);

/// The number of tokens before the first token that contains part of a marker that ends or opens a message;
/// all tokens if there is none.
int64_t tokens_before_marker(const Vocabulary& vocabulary, std::span<const int32_t> tokens);

/// A message, or a part of one.
struct Message {
  Role role = Role::kUnknown;
  std::string text;     // valid UTF-8, without the template's markers and the role's name
  size_t begin = 0;     // byte of the whole text at which the message begins, with its markers
  bool opened = false;  // it has the marker that begins a message
  bool ended = false;   // and the one that ends it
};

/// The messages of `text`, in order. `state` is the state before the text and is advanced to its end (only
/// `role`, `in_header` and `tail` are used). Space between messages belongs to none of them. A marker that is
/// partly outside of `text` is not recognised, except for its role's name.
std::vector<Message> messages_of(std::string_view text, ChatState* state);

}  // namespace espalier
