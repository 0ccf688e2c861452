// SPDX-License-Identifier: Apache-2.0
// Formats text from the data for the page.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/vocabulary.h"
#include "espalier/inspect/chat_roles.h"

namespace espalier {

/// `text` with invisible and control characters escaped (printable.h). Line feeds and tabs stay.
std::string visible(std::string_view text);

/// visible(text), safe as text and as an attribute's value in HTML.
std::string html(std::string_view text);

/// At most `most` bytes of whole characters, with an ellipsis if it was cut. `text` is valid UTF-8.
std::string cut(std::string text, int64_t most);

/// The bytes of a trajectory's name that the page shows.
inline constexpr int64_t kNameBytes = 120;

/// The messages of tokens; without a vocabulary one message of their ids with unknown role.
std::vector<Message> messages_of(const Vocabulary* vocabulary, std::span<const int32_t> tokens,
                                 ChatState* state);

/// Messages as HTML, in their roles' colours, each labelled with its role where it begins.
std::string messages_html(const std::vector<Message>& messages);

}  // namespace espalier
