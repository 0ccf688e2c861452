// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page/page.h"

#include <string_view>

#include "espalier/base/check.h"
#include "espalier/inspect/page/lost.h"
#include "espalier/inspect/page/summary.h"
#include "espalier/inspect/page/template.h"
#include "espalier/inspect/page/text.h"
#include "espalier/inspect/page/tree.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;

/// JSON that is safe inside a script element: it cannot end the element or start a comment.
std::string for_script(const Json& json) {
  const std::string text = json.dump();
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
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
