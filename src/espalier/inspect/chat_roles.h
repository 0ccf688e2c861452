// SPDX-License-Identifier: Apache-2.0
// Finds who speaks at a token of a chat, from the markers that chat templates write.
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

/// What the tokens before a place say about it.
struct ChatState {
  Role role = Role::kUnknown;  // of the last marker
  bool thinking = false;       // after <think>, before </think>
  bool in_header = false;      // between a marker and the end of the role's name
  std::string tail;            // of the text so far, or of the header: markers may span tokens
};

/// Moves `state` past one token. Knows ChatML, the headers of Llama 3, Gemma and Harmony, `[INST]`, and one
/// token per role (`<|user|>`). A text without such markers leaves the role unknown.
void advance(const Vocabulary& vocabulary, int32_t token, ChatState* state);

/// The number of tokens before the first one with a part of a marker that ends or opens a message; all of
/// them where there is none.
int64_t tokens_before_marker(const Vocabulary& vocabulary, std::span<const int32_t> tokens);

/// What one speaker says, or a part of it.
struct Message {
  Role role = Role::kUnknown;
  std::string text;     // valid UTF-8, without the template's markers and the role's name
  size_t begin = 0;     // byte of the whole text at which the message begins, with its markers
  bool opened = false;  // it has the marker that begins a message
  bool ended = false;   // and the one that ends it
};

/// The messages of `text`, in order; together they cover it. `state` is that before the text, and is moved to
/// its end. (Only `role`, `in_header` and `tail` are used.) Space between messages belongs to none of them. A
/// marker of which a part stands before `text` or after it is not seen, except for its role's name.
std::vector<Message> messages_of(std::string_view text, ChatState* state);

}  // namespace espalier
