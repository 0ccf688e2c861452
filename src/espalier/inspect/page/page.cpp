// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page/page.h"

#include <fmt/format.h>

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/inspect/page/text.h"
#include "espalier/inspect/page/tree.h"
#include "espalier/inspect/report.h"

namespace espalier {
namespace {

std::string as_sentence(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

std::string gains_html(const Gains& gains) {
  std::string page = "<div id=\"gains\">\n";
  for (const GainFigure& figure : gain_figures(gains)) {
    page += fmt::format(
        "<div><strong>{:.2f}\xC3\x97</strong> <span class=\"over\">over {}</span>"
        "<div class=\"note\">{}. Predicted, by {}.</div></div>\n",
        figure.gain, figure.over, as_sentence(figure.meaning), gains.in_flops ? "FLOPs" : "tokens");
  }
  return page + "</div>\n";
}

struct Total {
  const char* term;
  std::string value;
  const char* meaning;
};

std::vector<Total> totals_of(const InspectReport& report) {
  const ForestStatistics& s = report.statistics;
  return {
      {"Trajectories", with_commas(s.num_trajectories), "Rows of the data: one token sequence each."},
      {"Flat tokens", with_commas(s.flat_tokens),
       "The tokens of all trajectories: what sequence packing encodes."},
      {"Append-only tokens", with_commas(s.append_only_tokens),
       "The tokens that remain after dropping trajectories which others extend."},
      {"Tree tokens", with_commas(s.tree_tokens),
       "The tokens with every shared prefix counted once: what training on trees encodes."},
      {"Cached-token ratio", fmt::format("{:.2f}", s.cached_token_ratio),
       "Flat tokens over tree tokens: how many trajectories the average token belongs to."},
      {"POR", fmt::format("{:.3f}", s.por),
       "Potential overlap ratio: the fraction of the flat tokens that need not be encoded again."},
      {"Tokens lost, at least", with_commas(report.sharing.lost_tokens()),
       "Tokens that are encoded again although they are equal, because something before them differs."},
      {"Trees", with_commas(s.num_trees), "Sets of trajectories with the same first token."},
      {"Nodes", with_commas(s.num_nodes),
       "Token sequences between places where trajectories diverge or end: the boxes of the chart."},
      {"Leaves", with_commas(s.num_leaves), "Nodes without children."},
      {"Mean multiplicity", fmt::format("{:.2f}", s.cached_token_ratio),
       "A token's multiplicity is the number of trajectories that pass through it; its mean over the tree "
       "tokens is the cached-token ratio."},
      {"Longest trajectory", with_commas(s.max_depth_tokens), "In tokens: the depth of the deepest tree."},
      {"Depth in nodes", with_commas(s.max_depth_nodes), "The most nodes on the path of one trajectory."},
      {"Mean branching", fmt::format("{:.2f}", s.mean_branching),
       "Children per node, on average over the nodes that have any."},
      {"Largest branching", with_commas(s.max_branching), "The most children of one node."},
  };
}

std::string details_html(const InspectReport& report) {
  std::string page =
      "<details id=\"details\"><summary>Details: the numbers and what they mean</summary>\n<dl>\n";
  for (const Total& total : totals_of(report)) {
    page += fmt::format("<div><dt>{}</dt><dd>{}</dd><dd class=\"note\">{}</dd></div>\n", total.term,
                        total.value, total.meaning);
  }
  return page + "</dl>\n</details>\n";
}

/// HTML: both gains as large figures, the leading one first (gain_figures), the verdict and its advice, and
/// under "Details" every total with an explanation.
std::string summary_html(const InspectReport& report) {
  const Verdict verdict = verdict_of(report);
  std::string page = gains_html(report.gains);
  page += fmt::format("<p id=\"verdict\"{}>{}</p>\n", verdict.worth_it ? "" : " class=\"no\"",
                      html(as_sentence(verdict.text)));
  if (!verdict.advice.empty()) page += fmt::format("<p id=\"advice\">{}</p>\n", html(verdict.advice));
  return page + details_html(report);
}

using Json = nlohmann::ordered_json;

/// JSON that is safe inside a script element: it cannot end the element or start a comment.
std::string for_script(const Json& json) {
  const std::string text = json.dump();
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) safe += c == '<' ? "\\u003c" : std::string_view(&c, 1);
  return safe;
}

}  // namespace

std::string inspect_page(const PageContents& contents) {
  const PageNodes held = PageNodes::of(contents.forest, kMostPageNodes);
  const auto fill = [&](std::string_view slot) -> std::string {
    if (slot == "title") return html(contents.file);
    if (slot == "summary") return summary_html(contents.report);
    if (slot == "lost") return lost_html(contents, held);
    ESPALIER_ASSERT(slot == "data");
    const Json data = {{"file", visible(contents.file)},
                       {"report", to_json(contents.report, contents.trajectories, contents.vocabulary)},
                       {"tree", tree_to_json(contents, held)}};
    return for_script(data);
  };
  constexpr std::string_view kOpen = "{{", kClose = "}}";
  std::string page;
  std::string_view rest = kInspectPage;
  for (size_t open = rest.find(kOpen); open != std::string_view::npos; open = rest.find(kOpen)) {
    const size_t close = rest.find(kClose, open);
    ESPALIER_ASSERT(close != std::string_view::npos);
    page += rest.substr(0, open);
    page += fill(rest.substr(open + kOpen.size(), close - open - kOpen.size()));
    rest.remove_prefix(close + kClose.size());
  }
  page += rest;
  return page;
}

}  // namespace espalier
