# SPDX-License-Identifier: Apache-2.0
"""The first part of the page: gains, verdict and totals."""

from typing import Any

from ..printed.figures import gain_figures
from .text import html

# Term, where the report has it (or what is made of the report), format and meaning.
_TOTALS = (
    ("Trajectories", "trajectories", ",", "Rows of the data: one token sequence each."),
    ("Flat tokens", "flat_tokens", ",", "The tokens of all trajectories: what sequence packing encodes."),
    ("Append-only tokens", "append_only_tokens", ",",
     "The tokens that remain after dropping trajectories which others extend."),
    ("Tree tokens", "tree_tokens", ",", "The tokens with every shared prefix counted once: what training on trees encodes."),
    ("Cached-token ratio", "cached_token_ratio", ".2f",
     "Flat tokens over tree tokens: how many trajectories the average token belongs to."),
    ("POR", "por", ".3f", "Potential overlap ratio: the fraction of the flat tokens that need not be encoded again."),
    ("Tokens lost, at least", "lost_tokens", ",",
     "Tokens that are encoded again although they are equal, because something before them differs."),
    ("Trees", "trees", ",", "Sets of trajectories with the same first token."),
    ("Nodes", "nodes", ",", "Token sequences between places where trajectories diverge or end: the boxes of the chart."),
    ("Leaves", "leaves", ",", "Nodes without children."),
    ("Mean multiplicity", "cached_token_ratio", ".2f",
     "A token's multiplicity is the number of trajectories that pass through it; its mean over the tree tokens is the "
     "cached-token ratio."),
    ("Longest trajectory", "depth_tokens", ",", "In tokens: the depth of the deepest tree."),
    ("Depth in nodes", "depth_nodes", ",", "The most nodes on the path of one trajectory."),
    ("Mean branching", "mean_branching", ".2f", "Children per node, on average over the nodes that have any."),
    ("Largest branching", "max_branching", ",", "The most children of one node."),
)  # fmt: skip


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _gains_html(report: dict[str, Any]) -> str:
    unit = report["prediction_counts"]
    figures = "".join(f'<div><strong>{gain:.2f}&times;</strong> <span class="over">over {over}</span>'
                      f'<div class="note">{_sentence(meaning)}. Predicted, by {unit}.</div></div>\n'
                      for gain, over, meaning in gain_figures(report))  # fmt: skip
    return f'<div id="gains">\n{figures}</div>\n'


def summary_html(report: dict[str, Any]) -> str:
    """Both gains as large figures, the leading one first, the verdict and its advice, and under "Details" every total."""
    verdict = report["verdict"]
    values = report | {"lost_tokens": report["sharing"]["lost_tokens"]}
    totals = "".join(f'<div><dt>{term}</dt><dd>{values[key]:{form}}</dd><dd class="note">{meaning}</dd></div>\n'
                     for term, key, form, meaning in _TOTALS)  # fmt: skip
    page = _gains_html(report)
    look = "" if verdict["worth_it"] else ' class="no"'
    page += f'<p id="verdict"{look}>{html(_sentence(verdict["text"]))}</p>\n'
    if verdict["advice"]:
        page += f'<p id="advice">{html(verdict["advice"])}</p>\n'
    return page + ('<details id="details"><summary>Details: the numbers and what they mean</summary>\n'
                   f"<dl>\n{totals}</dl>\n</details>\n")  # fmt: skip
