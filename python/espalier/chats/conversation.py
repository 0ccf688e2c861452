# SPDX-License-Identifier: Apache-2.0
"""Conversations of records: which fields are used, and how (docs/data-format.md has the table)."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..commands.arguments import RESERVED
from ..errors import BadRow
from ..io.fields import scalar_text, verdict
from ..rows.json_lines import is_text, json_value, shown
from .messages import MEDIA, READ_KEYS, checked_messages, checked_schemas
from .shapes import chats_of

# Marks of templates. A text that has one was rendered before.
RENDERED = re.compile(
    r"<\|[a-zA-Z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|\[/?SYSTEM_PROMPT\]|\[/?INST\]"
)


@dataclass
class Conversation:
    """One checked trajectory. `weights`: the loss of each message of the assistant. `arguments`: variables of the template.
    `side`: "chosen" or "rejected" of a pair, None without one."""

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    side: str | None


@dataclass
class Record:
    """What one record of a file gives: one conversation, or the two of a pair, with what they have in common. `pair_id`: its
    name in the file."""

    conversations: list[Conversation] = field(default_factory=list)
    name: str | None = None
    group_id: str | None = None
    reward: float | None = None
    pair_id: str | None = None
    chosen: bool | None = None
    ignored: Counter[str] = field(default_factory=Counter)

    @property
    def is_pair(self):
        return len(self.conversations) > 1


def record_of(fields, kind, specials, tally):
    """Checks a record (io.fields.Fields) of a kind of shapes.py. specials: texts of the tokenizer's special tokens. tally(kind)
    counts what is worth a note. Raises BadRow."""
    for name in MEDIA:
        if fields.peek(name) not in (None, [], "", {}):
            raise BadRow(name, "text alone, since rows have tokens only", "images or other inputs")
    chats = chats_of(fields, kind)
    tools, schemas = checked_schemas(fields)
    arguments = _arguments(fields)
    record = Record()
    for chat in chats:
        _refuse_rendered(chat, fields, specials)
        checked = checked_messages(chat.messages, chat.context, schemas, tally)
        record.conversations.append(Conversation(checked.messages, checked.weights, tools, arguments, chat.side))
    record.name, record.reward = _name(fields), _reward(fields.get("reward"))
    _read_preference(record, fields)
    for name in fields.tally.ignored():
        record.ignored[name] += 1
    for conversation in record.conversations:
        for message in conversation.messages:
            record.ignored.update(f"messages[].{key}" for key in message.keys() - READ_KEYS)
    return record


def _refuse_rendered(chat, fields, specials):
    for name in chat.texts:
        text = fields.peek(name)
        marks = [*RENDERED.findall(text), *(special for special in specials if len(special) > 3 and special in text)]
        if marks:
            raise BadRow(
                name,
                "the text of a message",
                f"text that a chat template has rendered already (it has {shown(marks[0])}): pass the messages, or the token ids",
            )


def _read_preference(record, fields):
    if record.conversations[0].side is not None:
        key = next((key for key in ("pair_id", "id", "prompt_id") if _is_name(fields.peek(key))), None)
        record.pair_id = None if key is None else str(fields.get(key))
        return
    if isinstance(fields.peek("chosen"), bool) and fields.peek("pair_id") is not None:
        record.pair_id, record.chosen = scalar_text(fields.get("pair_id"), "pair_id"), fields.get("chosen")
        return
    record.chosen = verdict(fields)


def _arguments(fields):
    """Variables for the template that the record brings."""
    arguments = fields.get("chat_template_kwargs", {})
    if isinstance(arguments, str):
        arguments = (json_value(arguments, arguments) if arguments.strip() else None) or {}
    if not isinstance(arguments, dict):
        raise BadRow("chat_template_kwargs", "an object", shown(arguments))
    if reserved := RESERVED & arguments.keys():
        raise BadRow("chat_template_kwargs", "variables of the template", shown(min(reserved)))
    arguments = {name: value for name, value in arguments.items() if value is not None}
    thinking = fields.get("enable_thinking")
    if thinking is None:
        return arguments
    if not isinstance(thinking, bool):
        raise BadRow("enable_thinking", "true or false", shown(thinking))
    return {"enable_thinking": thinking, **arguments}


def _name(fields):
    """The record's name: its id, or task and trial together. What cannot be a name is none, and listed as ignored."""
    for key in ("trajectory_id", "conversation_id", "id"):
        if _is_name(fields.peek(key)):
            return str(fields.get(key))
    parts = [str(fields.get(key)) for key in ("task_id", "trial") if _is_name(fields.peek(key))]
    return "/".join(parts) if parts else None


def _is_name(value):
    if isinstance(value, str):
        return bool(value) and is_text(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reward(value):
    """A reward as a float. NaN, which tables have where there is none, is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    try:
        number = float(value) if not isinstance(value, str) else math.inf
    except (OverflowError, TypeError, ValueError):
        number = math.inf
    if math.isfinite(number):
        return number
    raise BadRow("reward", "a finite number", shown(value))
