// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page/text.h"

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

TEST(PageText, WhatCannotBeSeenIsWrittenOut) {
  // U+202A to U+202E, U+2066 to U+2069, and the marks of direction.
  for (const char* mark : {"\u202A", "\u202B", "\u202C", "\u202D", "\u202E", "\u2066", "\u2067", "\u2068",
                           "\u2069", "\u200E", "\u200F", "\u061C", "\u200B", "\u00AD", "\u3164"}) {
    const std::string shown = visible(std::string("a") + mark + "b");
    EXPECT_EQ(shown.find(mark), std::string::npos) << shown;
    EXPECT_EQ(shown.substr(0, 3), "a\\u") << shown;
  }
  EXPECT_EQ(visible("a\tb\nc\r\x01"), "a\tb\nc\\r\\x01");
  EXPECT_EQ(visible("\t"), "\t");
  EXPECT_EQ(visible("\u05E9\u05DC \u0645 caf\u00E9"), "\u05E9\u05DC \u0645 caf\u00E9") << "letters stay";
}

TEST(PageText, HtmlIsEscaped) {
  EXPECT_EQ(html("<a href='x' b=\"y\">&\u202E"), "&lt;a href=&#39;x&#39; b=&quot;y&quot;&gt;&amp;\\u202E");
  const std::string page = messages_html({{.role = Role::kUser, .text = "<script>", .opened = true}});
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("<b class=\"role\">user</b>"), std::string::npos);
  EXPECT_EQ(messages_html({{.role = Role::kUser, .text = "on"}}).find("class=\"role\""), std::string::npos)
      << "a label stands where a message begins";
}

}  // namespace
}  // namespace espalier::testing
