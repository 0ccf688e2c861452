# SPDX-License-Identifier: Apache-2.0
"""Reads chats: one JSON object per line, with messages in a format of chat_shapes, and any extra fields.

Conversations are checked and normalised: contents are strings or None, tool calls are
{"id", "type", "function": {"name", "arguments"}} with arguments as the string in the file.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import BadRow
from ..rows.foreign_files import describe_foreign_line
from .chat_shapes import messages_of

MOST_DIGITS = 4300  # of an integer: Python's limit, because conversion takes quadratic time


@dataclass
class Conversation:
    """One checked line of input. `where` is FILE:LINE; `tools` is the list of tool schemas or None. `pair_id` and
    `chosen` identify its preference pair and its side of it."""

    where: str
    messages: list
    name: str | None
    group_id: str | None
    reward: float | None
    tools: list | None = field(default=None)
    pair_id: str | None = None
    chosen: bool | None = None


def shown(value, limit=60):
    """The value as JSON, shortened to `limit` characters, for messages."""
    if isinstance(value, int) and abs(value) >= 10**limit:
        return f"an integer of {len(str(abs(value)))} digits"
    try:
        text = value if isinstance(value, str) and value.startswith("<") else json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__} that is nested too deeply to be shown"
    return text if len(text) <= limit else text[:limit] + "..."


def is_text(text):
    """Whether it can be encoded as UTF-8: a JSON string may contain an unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(name):
    raise BadRow("<line>", "JSON numbers", name)


def _integer(text):
    if len(text) > MOST_DIGITS:
        raise BadRow("<line>", f"integers of at most {MOST_DIGITS} digits", f"one of {len(text)}")
    return int(text)


def object_without_duplicates(pairs):
    """The dict of a JSON object; raises BadRow for duplicate keys."""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow(key, "each key once in an object", "it twice")
            seen.add(key)
    return made


def parse_line(line, where="", constant=_reject_constant):
    """The JSON object on one line of bytes; raises BadRow. `where`: FILE:LINE, for messages. constant(name) gives
    the value of NaN, Infinity and -Infinity, which JSON does not have."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=constant, parse_int=_integer,
                         object_pairs_hook=object_without_duplicates)
    except UnicodeDecodeError as error:
        raise BadRow("<line>", "UTF-8", f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        foreign = describe_foreign_line(line, Path(where.rpartition(":")[0]))
        raise BadRow("<line>", "one JSON object", foreign or f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("<line>", "JSON of bounded depth", "deeper nesting than can be parsed") from None
    if not isinstance(row, dict):
        foreign = describe_foreign_line(line, Path(where.rpartition(":")[0]))
        raise BadRow("<line>", "one JSON object", foreign or shown(row))
    return row


def _content(value, name):
    """Text of a message: a string, None, or the joined text of a list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRow(name, "a string, null or a list of text parts", shown(value))
    for index, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise BadRow(f"{name}[{index}]", "a part of type text", shown(part))
    return "".join(part["text"] for part in value)


def _tool_call(call, name):
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRow(f"{name}.function", "an object with name and arguments", shown(function))
    if not isinstance(function.get("name"), str):
        raise BadRow(f"{name}.function.name", "a string", shown(function.get("name")))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            raise BadRow(f"{name}.function.arguments", "JSON of bounded depth", "deeper nesting") from None
    if not isinstance(arguments, str):
        raise BadRow(f"{name}.function.arguments", "a JSON object, or a string that holds one", shown(arguments))
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _message(message, name):
    if not isinstance(message, dict):
        raise BadRow(name, "an object", shown(message))
    # Clients write every field they know. null means absent, but templates often test with `in`.
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRow(f"{name}.role", "a non-empty string", shown(role))
    message["content"] = _content(message.get("content"), f"{name}.content")
    if role == "function":
        message["role"] = "tool"
    calls = message.pop("tool_calls", [])
    if "function_call" in message:  # the older name of a single tool call
        calls = [{"function": message.pop("function_call")}] if calls == [] else calls
    if not isinstance(calls, list):
        raise BadRow(f"{name}.tool_calls", "a list", shown(calls))
    if calls:
        if role != "assistant":
            raise BadRow(f"{name}.tool_calls", "tool calls in assistant messages only", f"role {shown(role)}")
        message["tool_calls"] = [_tool_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _scalar_text(value, name):
    if isinstance(value, str) and value:
        if not is_text(value):
            raise BadRow(name, "text in UTF-8", "an unpaired surrogate")
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise BadRow(name, "a non-empty string or a number", shown(value))


def _lookup(row, path):
    """Value at a dotted path. A key that contains dots itself is tried first."""
    if path in row:
        return row[path]
    value = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise BadRow(path, "a string or a number to group by", "no such field")
        value = value[key]
    return value


def _name(row):
    """The row's name: its id, or task and trial together."""
    for key in ("trajectory_id", "conversation_id", "id"):
        if row.get(key) is not None:
            return _scalar_text(row[key], key)
    parts = [_scalar_text(row[key], key) for key in ("task_id", "trial") if row.get(key) is not None]
    return "/".join(parts) if parts else None


def _reward(value):
    if value is None:
        return None
    if isinstance(value, (int, float)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise BadRow("reward", "a finite number", shown(value))


def conversation_of(line, where, group_by=None):
    """Checks one line of bytes; raises BadRow."""
    row = parse_line(line, where)
    messages = messages_of(row, shown)
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages", "a non-empty list of chat messages", shown(messages))
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("messages", "at least one message with role assistant", "none")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRow("tools", "a list of tool schemas", shown(tools))
    group_id = _scalar_text(_lookup(row, group_by), group_by) if group_by else None
    conversation = Conversation(where, messages, _name(row), group_id, _reward(row.get("reward")), tools)
    if row.get("pair_id") is not None and isinstance(row.get("chosen"), bool):
        conversation.pair_id, conversation.chosen = _scalar_text(row["pair_id"], "pair_id"), row["chosen"]
    return conversation
