# SPDX-License-Identifier: Apache-2.0
"""The page of `espalier inspect --html`, made of what the library says of the rows (src/espalier/inspect/page_data.h).

Verdict, gains, totals and lost sharing are HTML; the scripts draw the chart of the forest, search and distributions from one
JSON script element with the id "data": file, report and tree. Everything is in one file, which loads nothing.
"""

import json
import re
from pathlib import Path
from typing import Any

from ..printed.verdict import with_verdict
from .lost import lost_html
from .summary import summary_html
from .text import html, visible
from .tree import tree_of

_FOLDER = Path(__file__).parent
_SCRIPTS = ("tree.js", "view.js", "chart.js", "panel.js", "search.js", "distributions.js", "page.js")  # they become one


def page_of(*, title: str, report: dict[str, Any], examples: list[list[tuple[int, int]]], tree: dict[str, Any]) -> str:
    """The page of the members of the library's page_data, as text."""
    tree, report = tree_of(tree), with_verdict(report)
    parts = {
        "title": html(title),
        "css": _part("page.css"),
        "summary": summary_html(report),
        "lost": lost_html(report["sharing"], examples, tree["causes"]),
        "data": _for_script({"file": visible(title), "report": report, "tree": tree}),
        "js": "".join(map(_part, _SCRIPTS)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _part("page.html"))


def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _for_script(data: Any) -> str:
    """JSON that is safe inside a script element: it cannot end the element or start a comment."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
