// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "espalier/base/printable.h"

namespace espalier {

std::string visible(std::string_view text) {
  std::string shown;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\t', begin), text.size());
    if (begin > 0) shown += '\t';
    shown += printable_lines(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return shown;
}

std::string html(std::string_view text) {
  static const std::map<char, std::string_view> entities{
      {'<', "&lt;"}, {'>', "&gt;"}, {'&', "&amp;"}, {'"', "&quot;"}, {'\'', "&#39;"}};
  std::string safe;
  for (const char c : visible(text)) {
    const auto entity = entities.find(c);
    safe += entity == entities.end() ? std::string_view(&c, 1) : entity->second;
  }
  return safe;
}

std::string cut(std::string text, int64_t most) {
  if (std::ssize(text) <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most) + "\xE2\x80\xA6";
}

std::vector<Message> messages_of(const Vocabulary* vocabulary, std::span<const int32_t> tokens,
                                 ChatState* state) {
  if (tokens.empty()) return {};
  if (vocabulary == nullptr) return {{.text = fmt::format("{}", fmt::join(tokens, " "))}};
  std::string bytes;
  for (const int32_t token : tokens) bytes += vocabulary->bytes(token);
  return messages_of(bytes, state);
}

std::string messages_html(const std::vector<Message>& messages) {
  std::string page;
  for (const Message& message : messages) {
    const char* role = to_string(message.role);
    page += fmt::format("<span class=\"message {}\">", role);
    if (message.opened && message.role != Role::kUnknown)
      page += fmt::format("<b class=\"role\">{}</b> ", role);
    page += html(message.text);
    if (message.ended) page += "<span class=\"end\" title=\"end of the message\">\xE2\x88\x8E</span>";
    page += "</span>";
  }
  return page;
}

}  // namespace espalier
