// SPDX-License-Identifier: Apache-2.0
// Text from the data as the page shows it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/data/vocabulary.h"
#include "espalier/inspect/chat_roles.h"

namespace espalier {

/// `text` with everything visible that would act on the text around it or not be seen at all (printable.h).
/// Line feeds and tabs stay.
std::string visible(std::string_view text);

/// visible(text), safe as text and as an attribute's value in HTML.
std::string html(std::string_view text);

/// At most `most` bytes of whole characters, with an ellipsis if it was cut. `text` is valid UTF-8.
std::string cut(std::string text, int64_t most);

/// The bytes of a trajectory's name that the page shows.
inline constexpr int64_t kNameBytes = 120;

/// What tokens say, and where; without a vocabulary their ids, as words of nobody.
std::vector<Message> messages_of(const Vocabulary* vocabulary, std::span<const int32_t> tokens,
                                 ChatState* state);

/// Messages as HTML: each with its role as a label where it begins, in the role's colour.
std::string messages_html(const std::vector<Message>& messages);

}  // namespace espalier
