# SPDX-License-Identifier: Apache-2.0
"""Preference pairs in text as two chats (TRL 1.16: docs/source/dataset_formats.md).

    prompt, chosen, rejected    texts, or lists of messages; lists without a prompt begin with it
"""

from ..commands.chats import shown
from ..errors import BadRow


def chats_of(record, place, names):
    """Two chats with one `pair_id`, and with `chosen` true and false. place: names a pair that has no name.
    names.unique(name) makes names of pairs unique."""
    pair = next(
        (record[name] for name in ("pair_id", "id") if isinstance(record.get(name), (str, int)) and record[name] != ""),
        place)
    pair = names.unique(str(pair))
    return [{"messages": _messages(record, side), "pair_id": pair, "chosen": side == "chosen",
             "trajectory_id": f"{pair}/{side}"} for side in ("chosen", "rejected")]


def _messages(record, side):
    prompt, answer = record.get("prompt"), record[side]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str) and prompt is not None:
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list) or not isinstance(prompt, (list, type(None))):
        raise BadRow(side, "a text with a `prompt`, or a list of messages", shown(record[side]))
    return [*(prompt or []), *answer]
