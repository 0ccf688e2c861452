# SPDX-License-Identifier: Apache-2.0
"""The member "tree" of the page's data, from which the script draws: {nodes, of, columns, num_spans, span_columns, roles, causes,
texts, names}.

`columns` holds base64 of LEB128 numbers, one per node in preorder: those of the library (src/espalier/inspect/page_data.h), but
for parent and subtree, and

    up      levels from the preceding node up to the parent, 0: the preceding node is the parent
    hidden  tree tokens of omitted branches below it
    spans   how many of the spans are this node's

`span_columns` has the role (an index of `roles`) and the size in tokens of each span, in order; without a vocabulary it is empty.
`texts` has for each node a flat list of role, text, and whether the message ends (0 or 1); `names` a list of the trajectories
that end there.
"""

import base64
from collections.abc import Iterable
from typing import Any, TypeAlias

from .messages import ROLES, Chat, Message, messages_in
from .text import NAME_BYTES, cut, visible

_INDEX = {role: index for index, role in enumerate(ROLES)}
_Text: TypeAlias = tuple[str | None, str]  # header before it, text
_Span: TypeAlias = tuple[str, int]  # role, size in tokens


def column(numbers: list[int]) -> str:
    """Base64 of LEB128: seven bits per byte, lowest first; the eighth bit marks that more follow."""
    if max(numbers, default=0) < 128:
        return base64.b64encode(bytes(numbers)).decode()
    coded = bytearray()
    for number in numbers:
        while number > 127:
            coded.append(number & 127 | 128)
            number >>= 7
        coded.append(number)
    return base64.b64encode(coded).decode()


def tree_of(told: dict[str, Any]) -> dict[str, Any]:
    """The tree as the script reads it, of the library's."""
    columns: dict[str, list[int]] = told["columns"]
    nodes = len(columns["size"])
    said, spans = _said_and_spans(told.get("texts", []), told.get("spans", []), nodes)
    columns["up"], columns["hidden"] = _ups_and_hidden(columns.pop("parent"), columns.pop("subtree"), columns["size"])
    columns["spans"] = list(map(len, spans))
    columns.setdefault("shown", [0] * nodes)
    flat = [span for node_spans in spans for span in node_spans]
    return {
        "nodes": nodes,
        "of": told["of"],
        "columns": {name: column(numbers) for name, numbers in columns.items()},
        "num_spans": len(flat),
        "span_columns": {"role": column([_INDEX[role] for role, _ in flat]), "size": column([size for _, size in flat])},
        "roles": ROLES,
        "texts": [_flat(messages) for messages in said],
        "causes": told["causes"],
        "names": [[visible(cut(name, NAME_BYTES)) for name in names] for names in told["names"]],
    }


def _said_and_spans(texts: list[_Text], spans: list[list[_Span]], nodes: int) -> tuple[list[list[Message]], list[list[_Span]]]:
    """The messages and the spans of each node."""
    if not texts:
        return [[]] * nodes, [[]] * nodes
    said = []
    for (header, text), node_spans in zip(texts, spans, strict=True):
        # Whatever role the header names is read again.
        said.append(messages_in(text, Chat("unknown" if header is not None else node_spans[0][0], header)))
    return said, list(map(_joined, spans, said))


def _joined(spans: list[_Span], messages: list[Message]) -> list[_Span]:
    """The spans of a node without that of space before the first marker, which belongs to the message that the marker begins."""
    if len(spans) > 1 and messages and messages[0].begins and messages[0].role == spans[1][0]:
        (_, space), (role, size), *others = spans
        return [(role, space + size), *others]
    return [span for span in spans if span[1] > 0]


def _flat(messages: Iterable[Message]) -> list[int | str]:
    return [part for message in messages for part in (_INDEX[message.role], visible(message.text), int(message.ends))]


def _ups_and_hidden(parents: list[int], subtrees: list[int], sizes: list[int]) -> tuple[list[int], list[int]]:
    depths: list[int] = []
    ups, hidden, before = [], [0] * len(parents), -1
    for node, (parent, subtree, size) in enumerate(zip(parents, subtrees, sizes, strict=True)):
        depth = 0
        hidden[node] += subtree - size
        if parent >= 0:
            depth = depths[parent] + 1
            hidden[parent] -= subtree
        ups.append(before + 1 - depth)
        depths.append(depth)
        before = depth
    return ups, hidden
