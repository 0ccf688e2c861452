// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/chat_roles.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

struct Said {
  Role role;
  std::string text;
  bool opened, ended;
  bool operator==(const Said&) const = default;
};

void PrintTo(const Said& said, std::ostream* out) {
  *out << to_string(said.role) << ": \"" << said.text << "\" " << said.opened << said.ended;
}

std::vector<Said> said(const std::string& text, ChatState* state) {
  std::vector<Said> found;
  size_t begin = 0;
  for (const Message& message : messages_of(text, state)) {
    EXPECT_EQ(message.begin, begin == 0 ? 0 : message.begin);
    EXPECT_GE(message.begin, begin);
    begin = message.begin + 1;
    found.push_back({message.role, message.text, message.opened, message.ended});
  }
  return found;
}

std::vector<Said> said(const std::string& text) {
  ChatState state;
  return said(text, &state);
}

using Messages = std::vector<Said>;

TEST(Messages, HaveNoMarkers) {
  EXPECT_EQ(said("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi\nyou<|im_end|>\n"),
            (Messages{{Role::kSystem, "Be kind.", true, true}, {Role::kUser, "Hi\nyou", true, true}}));
  EXPECT_EQ(said("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
            (Messages{{Role::kUser, "Hi", true, true}}));
  EXPECT_EQ(said("[INST] Hi [/INST] Bye</s>"),
            (Messages{{Role::kUser, " Hi ", true, false}, {Role::kAssistant, " Bye", true, true}}));
  EXPECT_EQ(said("[INST]Hi</s> and more</s>"),
            (Messages{{Role::kUser, "Hi", true, true}, {Role::kUser, " and more", false, true}}));
  // Controls: no marker, and what only looks like one.
  EXPECT_EQ(said("a < b [c] <|im_sta"), (Messages{{Role::kUnknown, "a < b [c] <|im_sta", false, false}}));
  EXPECT_EQ(said(""), Messages{});
}

TEST(Messages, GoOnAfterANode) {
  ChatState state;
  EXPECT_EQ(said("<|im_start|>user\nWhere", &state), (Messages{{Role::kUser, "Where", true, false}}));
  EXPECT_EQ(said(" is it?<|im_end|>", &state), (Messages{{Role::kUser, " is it?", false, true}}));
  // Between messages, then in the middle of the role's name.
  EXPECT_EQ(said("\n<|im_start|>assis", &state), (Messages{{Role::kUnknown, "", true, false}}));
  EXPECT_EQ(said("tant\nHere.", &state), (Messages{{Role::kAssistant, "Here.", false, false}}));
}

TEST(Messages, TextThatIsNotUtf8IsMadeValid) {
  EXPECT_EQ(said("<|im_start|>user\n\xC3<|im_end|>"), (Messages{{Role::kUser, "\xEF\xBF\xBD", true, true}}));
}

}  // namespace
}  // namespace espalier::testing
