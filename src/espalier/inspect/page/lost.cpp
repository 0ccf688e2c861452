// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page/tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "espalier/base/units.h"
#include "espalier/inspect/page/text.h"

namespace espalier {
namespace {

template <typename... Args>
void add(std::string* out, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(*out), format, std::forward<Args>(args)...);
}

void add_cause_row(Cause cause, const CauseReport& found, std::string* page) {
  const bool lost = is_lost(cause);
  add(page, "<tr{}><td class=\"text\">{}</td><td class=\"text\">{}</td><td>{}</td><td>{}</td>",
      lost ? " class=\"lost\"" : "", text_of(cause).phrase, lost ? "lost" : "intended",
      with_commas(found.places), with_commas(found.divergences));
  if (lost) {
    add(page, "<td>{}</td><td>{}</td></tr>\n", with_commas(found.tokens),
        with_commas(found.tokens_between_groups));
  } else {
    add(page, "<td>\xE2\x80\x93</td><td>\xE2\x80\x93</td></tr>\n");
  }
}

void add_table(const SharingReport& sharing, std::string* page) {
  add(page,
      "<div class=\"scroll\"><table><thead><tr><th scope=\"col\" class=\"text\">cause of divergence</th>"
      "<th scope=\"col\" class=\"text\"></th><th scope=\"col\">places</th><th scope=\"col\">branches</th>"
      "<th scope=\"col\">tokens lost</th><th scope=\"col\">between groups</th></tr></thead><tbody>\n");
  for (int i = 0; i < kNumCauses; ++i) {
    const auto cause = static_cast<Cause>(i);
    if (sharing[cause].divergences > 0) add_cause_row(cause, sharing[cause], page);
  }
  if (sharing.not_examined > 0) {
    add(page,
        "<tr><td class=\"text\">not examined: the limit of comparisons was "
        "reached</td><td></td><td></td><td>{}</td>"
        "<td></td><td></td></tr>\n",
        with_commas(sharing.not_examined));
  }
  add(page, "</tbody></table></div>\n");
}

class Examples {
 public:
  Examples(const PageContents& contents, const PageNodes& held) : contents_(contents), held_(held) {}

  void add_cause(Cause cause, bool open, std::string* page) const {
    const CauseReport& found = contents_.report.sharing[cause];
    add(page, "<details{}><summary>Examples: {}</summary>\n", open ? " open" : "", text_of(cause).phrase);
    if (!found.values.empty()) {
      add(page, "<p>Such as ");
      for (size_t v = 0; v < found.values.size(); ++v) {
        add(page, "{}<code>{}</code>", v > 0 ? ", " : "", html(found.values[v]));
      }
      add(page, "</p>\n");
    }
    if (is_lost(cause)) {
      add(page, "<p>To share: {}.</p>\n", html(text_of(cause).remedy));
      add(page,
          "<p class=\"scripted\"><button type=\"button\" data-cause=\"{}\">Show the next of these branches "
          "in the chart</button> <span role=\"status\"></span></p>\n",
          static_cast<int>(cause) + 1);
    }
    for (const SharingExample& example : found.examples) add_example(cause, example, page);
    add(page, "</details>\n");
  }

 private:
  void add_example(Cause cause, const SharingExample& example, std::string* page) const {
    add(page, "<div class=\"example\"><div>Position {}, {}{}", with_commas(example.position),
        example.role == Role::kUnknown ? "speaker unknown" : to_string(example.role),
        example.between_groups ? "; between groups" : "");
    if (is_lost(cause)) {
      add(page, "; {}", count_of(example.common, "equal token follows", "equal tokens follow"));
    }
    add(page, "</div>\n");
    add_side(example, {example.left_row, example.left_node, example.left, example.left_after}, page);
    add_side(example, {example.right_row, example.right_node, example.right, example.right_after}, page);
    add(page, "</div>\n");
  }

  struct ExampleSide {
    int64_t row, node;
    const std::vector<int32_t>& differing;
    const std::vector<int32_t>& after;
  };

  void add_side(const SharingExample& example, const ExampleSide& side, std::string* page) const {
    const std::vector<int32_t>& tokens = side.differing.empty() ? side.after : side.differing;
    add(page, "<div class=\"side\"><div class=\"faint\"><bdi>{}</bdi>",
        html(cut(valid_utf8(contents_.trajectories.name(side.row)), kNameBytes)));
    if (!tokens.empty()) add(page, ", token {}", tokens[0]);
    if (const int64_t node = held_.index[side.node]; node >= 0) {
      add(page, " <button type=\"button\" class=\"scripted\" data-node=\"{}\">Show in the chart</button>",
          node);
    }
    // Text before the place has the same role, unless there is a marker in between.
    ChatState state;
    std::vector<Message> before = messages_of(contents_.vocabulary, example.before, &state);
    if (before.size() <= 1 && state.role == Role::kUnknown && !state.in_header) state.role = example.role;
    if (before.size() == 1) before[0].role = state.role;
    const auto differing = messages_of(contents_.vocabulary, side.differing, &state);
    const auto after = messages_of(contents_.vocabulary, side.after, &state);
    add(page, "</div><pre class=\"said\"><span class=\"faint\">{}</span><mark>{}</mark>{}</pre></div>\n",
        messages_html(before), side.differing.empty() ? "\xE2\x88\x85" : messages_html(differing),
        messages_html(after));
  }

  const PageContents& contents_;
  const PageNodes& held_;
};

}  // namespace

std::string lost_html(const PageContents& contents, const PageNodes& held) {
  const SharingReport& sharing = contents.report.sharing;
  if (sharing.places == 0) return "<p>No trajectories diverge after a common token.</p>\n";
  std::string page;
  add_table(sharing, &page);
  add(&page, "<p class=\"note\">{}</p>\n", kHowLossIsCounted);
  if (contents.vocabulary == nullptr) {
    add(&page,
        "<p class=\"note\">Only ids are known. With a model folder that has a tokenizer.json, more causes "
        "are distinguished.</p>\n");
  }
  const int64_t most =
      std::max_element(sharing.causes.begin(), sharing.causes.end(), [](const auto& a, const auto& b) {
        return a.tokens < b.tokens;
      })->tokens;
  const Examples examples(contents, held);
  for (int i = 0; i < kNumCauses; ++i) {
    const auto cause = static_cast<Cause>(i);
    if (sharing[cause].examples.empty()) continue;
    examples.add_cause(cause, /*open=*/most > 0 && sharing[cause].tokens == most, &page);
  }
  return page;
}

}  // namespace espalier
