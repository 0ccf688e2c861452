# SPDX-License-Identifier: Apache-2.0
"""The messages that the page of `inspect` shows: where each begins and ends, and who speaks."""

import json
import re

import numpy as np
import pytest

from conftest import REPOSITORY
from espalier.native import core
from espalier.page import messages
from espalier.page.messages import Chat, messages_in
from espalier.page.tree import tree_of
from espalier.rows.files import trajectories
from test_inspect import messages_of, numbers

SOURCE = REPOSITORY / "src/espalier/inspect/chat_roles.cpp"


def said(text, chat=None):
    return [(m.role, m.text, m.begins, m.ends) for m in messages_in(text, chat or Chat())]


def test_messages_have_no_markers():
    assert said("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi\nyou<|im_end|>\n") == [
        ("system", "Be kind.", True, True), ("user", "Hi\nyou", True, True)]  # fmt: skip
    assert said("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>") == [("user", "Hi", True, True)]
    assert said("[INST] Hi [/INST] Bye</s>") == [("user", " Hi ", True, False), ("assistant", " Bye", True, True)]
    assert said("[INST]Hi</s> and more</s>") == [("user", "Hi", True, True), ("user", " and more", False, True)]
    # Controls: no marker, and what only looks like one.
    assert said("a < b [c] <|im_sta") == [("unknown", "a < b [c] <|im_sta", False, False)]
    assert said("") == []


def test_messages_go_on_after_a_node():
    chat = Chat()
    assert said("<|im_start|>user\nWhere", chat) == [("user", "Where", True, False)]
    assert said(" is it?<|im_end|>", chat) == [("user", " is it?", False, True)]
    # Between messages, then in the middle of the role's name.
    assert said("\n<|im_start|>assis", chat) == [("unknown", "", True, False)]
    assert chat == Chat("unknown", "assis")
    assert said("tant\nHere.", chat) == [("assistant", "Here.", False, False)]
    # Control: without what precedes it.
    assert said("tant\nHere.") == [("unknown", "tant\nHere.", False, False)]


def test_a_header_without_an_end_is_text():
    words = "a name that is longer than that of any role"
    assert said("<|im_start|>" + words) == [("unknown", words, True, False)]
    # The limit is in bytes, and a header may have been cut anywhere.
    assert said("é" * 10, Chat(header="é" * 10)) == [("unknown", "é" * 10, False, False)]
    assert said("é" * 9, Chat(header="é" * 10)) == [("unknown", "", False, False)]


def vocabulary_of(*words):
    """Offsets and bytes: ids below 256 are bytes, then `words`."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    return np.cumsum([0, *map(len, tokens)]).astype(np.int64), b"".join(tokens)


def shown(rows, *words):
    """(messages, spans) of each node of the page of `rows`, whose ids are those of vocabulary_of(*words)."""
    found = core.inspect(trajectories([{"input_ids": list(row)} for row in rows]), *vocabulary_of(*words))
    tree = tree_of(json.loads(found.page_data("rows"))["tree"])
    roles, sizes = (numbers(tree["span_columns"][name]) for name in ("role", "size"))
    spans = iter(zip([tree["roles"][role] for role in roles], sizes, strict=True))
    counts = numbers(tree["columns"]["spans"])
    return [(messages_of(tree, node), [next(spans) for _ in range(count)]) for node, count in enumerate(counts)]


def test_text_that_is_not_utf8_is_made_valid():
    ids = b"<|im_start|>user\n\xc3<|im_end|>"
    assert shown([ids]) == [([("user", "\ufffd", True)], [("user", len(ids))])]
    assert shown([ids.replace(b"\xc3", b"\xc3\xa9")])[0][0] == [("user", "é", True)]


def test_tokens_belong_to_the_message_in_which_they_begin():
    first, second = b"<s>[INST] Hi ", b"[/INST] Bye</s>"
    # A marker of many tokens; the start of the text is not one.
    assert shown([first + second])[0][1] == [("unknown", 3), ("user", 10), ("assistant", len(second))]
    # Space and marks that are not messages belong to the first message, wherever the node begins.
    assert shown([b"\n<bos>" + first[3:] + second])[0][1] == [("user", 16), ("assistant", len(second))]
    # A token that has the end of a message and a marker.
    ids = [*b"[INST]Hi", 256, *b"Bye"]
    assert shown([ids], "?[/INST]")[0][1] == [("user", 9), ("assistant", 3)]
    assert shown([ids], "[/INST]")[0][1] == [("user", 8), ("assistant", 4)]


def test_nodes_go_on_with_the_message_before_them():
    prompt = b"[INST]Hi[/INST]"
    nodes = shown([prompt + b"Bye</s>\n[INST]One[/INST]", prompt + b"See"])
    assert nodes[0] == ([("user", "Hi", False), ("assistant", "", False)], [("user", 8), ("assistant", 7)])
    assert nodes[1][1] == [("assistant", 8), ("user", 9), ("assistant", 7)]
    assert nodes[2] == ([("assistant", "See", False)], [("assistant", 3)])
    # Trajectories part in a header, and before a message.
    header = b"<|im_start|>user\nHi<|im_end|>"
    nodes = shown([header + b"\n<|im_start|>assistant\nA", header + b"\n<|im_start|>tool\nB", header])
    assert nodes[0] == ([("user", "Hi", True)], [("user", len(header))])
    assert nodes[1][1] == [("unknown", 13)]
    assert nodes[2] == ([("assistant", "A", False)], [("assistant", 11)])
    assert nodes[3] == ([("tool", "B", False)], [("tool", 6)])


@pytest.mark.parametrize("whole", [True, False])
def test_the_library_and_the_page_see_the_same_roles(whole):
    openings = [marker + name + "\n" for marker in messages.HEADER_MARKERS for name in messages.NAMES]
    for opening in [*openings, *messages.ROLE_MARKERS]:
        marker = opening.partition(">")[0] + ">" if opening[-1] == "\n" else opening
        rest = opening.removeprefix(marker).encode()
        ids = [*b"Before", *([256] if whole else marker.encode()), *rest, *b"Words"]
        ((said_there, spans),) = shown([ids], marker)
        assert [message[:2] for message in said_there] == [("unknown", "Before"), (spans[1][0], "Words")], opening
        assert spans[0] == ("unknown", 6) and spans[1][0] != "unknown" and len(spans) == 2


def of_the_library(kind):
    """Markers of a kind with the names of their roles, as the library's source has them."""
    found = re.findall(rf'{{"([^"]+)", Marker::{kind}(?:, Role::k(\w+))?}}', SOURCE.read_text(encoding="utf-8"))
    return {marker.replace("\\uFF5C", "\uff5c"): role.lower() for marker, role in found}


def test_the_library_has_the_same_markers():
    assert set(of_the_library("kHeader")) == set(messages.HEADER_MARKERS)
    assert of_the_library("kRole") == messages.ROLE_MARKERS
    assert set(of_the_library("kEnd")) == set(messages.END_MARKERS)
    text = SOURCE.read_text(encoding="utf-8")
    ends = re.search(r"kHeaderEnds =\s+std::to_array<std::string_view>\(\{(.*?)\}\)", text)[1]
    assert ends == ", ".join(json.dumps(end) for end in messages.HEADER_ENDS)
    assert f"kLongestHeader = {messages.LONGEST_HEADER};" in text
    names = {name: role.lower() for listed, role in re.findall(r"if \(is\(\{(.*?)\}\)\) return Role::k(\w+);", text)
             for name in json.loads(f"[{listed}]")}  # fmt: skip
    assert names == messages.NAMES
    # Control: there are some.
    assert len(of_the_library("kRole")) > 5 and len(names) > 5
