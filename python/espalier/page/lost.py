# SPDX-License-Identifier: Apache-2.0
"""The part of the page on where trajectories diverge, and what is lost."""

from typing import Any

from ..commands.console import count_of
from .messages import Chat, Message, messages_in
from .text import NAME_BYTES, cut, html, messages_html


def lost_html(sharing: dict[str, Any], examples: list[list[tuple[int, int]]], words: list[str]) -> str:
    """A table of causes, and the examples of each (`examples`: the nodes of both branches). If the page holds a branch of an
    example, a button with the attribute data-node makes the script show that node. Buttons with data-cause (1 + index in `words`,
    as in the column "cause") step through the branches of a cause."""
    if not sharing["places"]:
        return "<p>No trajectories diverge after a common token.</p>\n"
    page = _table(sharing) + f'<p class="note">{sharing["how_counted"]}</p>\n'
    if not sharing["text_known"]:
        page += ('<p class="note">Only ids are known. With a model folder that has a tokenizer.json, more causes are '
                 "distinguished.</p>\n")  # fmt: skip
    most = max((cause["tokens"] for cause in sharing["causes"]), default=0)
    for cause, nodes in zip(sharing["causes"], examples, strict=True):
        if cause["examples"]:
            page += _examples(cause, nodes, 1 + words.index(cause["cause"]), is_open=cause["tokens"] == most > 0)
    return page


def _table(sharing: dict[str, Any]) -> str:
    rows = ""
    for cause in sharing["causes"]:
        lost = cause["lost"]
        counts = [f"{cause[key]:,}" for key in ("places", "divergences")]
        counts += [f"{cause[key]:,}" if lost else "&ndash;" for key in ("tokens", "tokens_between_groups")]
        rows += ('<tr class="lost">' if lost else "<tr>") + f'<td class="text">{cause["meaning"]}</td>'
        rows += (f'<td class="text">{"lost" if lost else "intended"}</td>'
                 + "".join(f"<td>{count}</td>" for count in counts) + "</tr>\n")  # fmt: skip
    if sharing["not_examined"]:
        rows += ('<tr><td class="text">not examined: the limit of comparisons was reached</td><td></td><td></td>'
                 f'<td>{sharing["not_examined"]:,}</td><td></td><td></td></tr>\n')  # fmt: skip
    return ('<div class="scroll"><table><thead><tr><th scope="col" class="text">cause of divergence</th>'
            '<th scope="col" class="text"></th><th scope="col">places</th><th scope="col">branches</th>'
            '<th scope="col">tokens lost</th><th scope="col">between groups</th></tr></thead><tbody>\n'
            f"{rows}</tbody></table></div>\n")  # fmt: skip


def _examples(cause: dict[str, Any], nodes: list[tuple[int, int]], number: int, *, is_open: bool) -> str:
    page = f'<details{" open" if is_open else ""}><summary>Examples: {cause["meaning"]}</summary>\n'
    if cause["values"]:
        page += f"<p>Such as {', '.join(f'<code>{html(value)}</code>' for value in cause['values'])}</p>\n"
    if cause["lost"]:
        page += (f'<p>To share: {html(cause["remedy"])}.</p>\n'
                 f'<p class="scripted"><button type="button" data-cause="{number}">Show the next of these branches in the '
                 'chart</button> <span role="status"></span></p>\n')  # fmt: skip
    for example, (left, right) in zip(cause["examples"], nodes, strict=True):
        role = "speaker unknown" if example["role"] == "unknown" else example["role"]
        page += f'<div class="example"><div>Position {example["position"]:,}, {role}'
        page += "; between groups" if example["between_groups"] else ""
        page += f"; {count_of(example['common'], 'equal token follows', 'equal tokens follow')}" if cause["lost"] else ""
        page += f"</div>\n{_side(example, 'left', left)}{_side(example, 'right', right)}</div>\n"
    return page + "</details>\n"


def _side(example: dict[str, Any], name: str, node: int) -> str:
    token, (before, chat) = example[f"{name}_token"], _before(example)
    page = f'<div class="side"><div class="faint"><bdi>{html(cut(example[f"{name}_trajectory"], NAME_BYTES))}</bdi>'
    page += f", token {token['id']}" if token else ""
    if node >= 0:
        page += f' <button type="button" class="scripted" data-node="{node}">Show in the chart</button>'
    differing = messages_html(messages_in(example[name], chat))
    after = messages_html(messages_in(example[f"{name}_after"], chat))
    return (f'{page}</div><pre class="said"><span class="faint">{messages_html(before)}</span>'
            f"<mark>{differing or '∅'}</mark>{after}</pre></div>\n")  # fmt: skip


def _before(example: dict[str, Any]) -> tuple[list[Message], Chat]:
    """The messages before the place of an example, and the chat at the place."""
    chat = Chat()
    messages = messages_in(example["before"], chat)
    # Text before the place has the same role, unless there is a marker in between.
    if len(messages) <= 1 and chat == Chat():
        chat.role = example["role"]
    if len(messages) == 1:
        messages[0].role = chat.role
    return messages, chat
