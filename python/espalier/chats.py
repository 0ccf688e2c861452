"""Reading chats: one JSON object per line, with OpenAI-style `messages` and any extra fields.

A conversation comes out checked and in one shape: contents are strings or None, tool calls are
{"id", "type", "function": {"name", "arguments"}} with arguments as the string that stands in the file.
"""

import gzip
import io
import json
import math
from dataclasses import dataclass, field


class BadRow(Exception):
    """One line of input that cannot be used: field, what was expected, what was received."""

    def __init__(self, field_name, expected, received):
        super().__init__(f"field `{field_name}`: expected {expected}, received {received}")


@dataclass
class Conversation:
    """One checked line of input. `where` is FILE:LINE; `tools` is the list of tool schemas or None."""

    where: str
    messages: list
    name: str | None
    group_id: str | None
    reward: float | None
    tools: list | None = field(default=None)


def shown(value, limit=60):
    """The value as JSON, cut to `limit` characters, for messages."""
    text = value if isinstance(value, str) and value.startswith("<") else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[:limit] + "..."


def open_lines(path):
    """Opens a plain, gzip or zstd file (told by its first bytes) for reading bytes.

    Returns (stream of bytes, function that gives the part of the file read so far).
    """
    raw = open(path, "rb")
    size = max(1, raw.seek(0, io.SEEK_END))
    raw.seek(0)
    magic = raw.peek(4)[:4]
    stream = raw
    if magic[:2] == b"\x1f\x8b":
        stream = gzip.GzipFile(fileobj=raw)
    elif magic == b"\x28\xb5\x2f\xfd":
        import zstandard

        stream = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return stream, lambda: raw.tell() / size


def _reject_constant(name):
    raise BadRow("<line>", "JSON numbers", name)


def _object_without_duplicates(pairs):
    made = dict(pairs)
    if len(made) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow(key, "a key that stands once in its object", "it twice")
            seen.add(key)
    return made


def parse_line(line):
    """The JSON object on one line of bytes; raises BadRow."""
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_reject_constant,
                         object_pairs_hook=_object_without_duplicates)
    except UnicodeDecodeError as error:
        raise BadRow("<line>", "UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadRow("<line>", "one JSON object", f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("<line>", "JSON of bounded depth", "deeper nesting than can be parsed") from None
    if not isinstance(row, dict):
        raise BadRow("<line>", "one JSON object", shown(row))
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
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise BadRow(f"{name}.function.arguments", "a JSON object, or a string that holds one", shown(arguments))
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _message(message, name):
    if not isinstance(message, dict):
        raise BadRow(name, "an object", shown(message))
    # Clients write every field they know; null says no more than absence, and templates often test `in`.
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
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise BadRow(name, "a non-empty string or a number", shown(value))


def _lookup(row, path):
    """Value at a dotted path. A key that itself holds dots is found too, because it is tried first."""
    if path in row:
        return row[path]
    value = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise BadRow(path, "a string or a number to group by", "no such field")
        value = value[key]
    return value


def _name(row):
    """What the row calls itself: its own id, or task and trial together."""
    for key in ("trajectory_id", "conversation_id", "id"):
        if row.get(key) is not None:
            return _scalar_text(row[key], key)
    parts = [_scalar_text(row[key], key) for key in ("task_id", "trial") if row.get(key) is not None]
    return "/".join(parts) if parts else None


def _reward(value):
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRow("reward", "a finite number", shown(value))
    return float(value)


def conversation_of(line, where, group_by=None):
    """Checks one line of bytes; raises BadRow."""
    row = parse_line(line)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages", "a non-empty list of chat messages", shown(messages))
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("messages", "at least one message with role assistant", "none")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRow("tools", "a list of tool schemas", shown(tools))
    group_id = _scalar_text(_lookup(row, group_by), group_by) if group_by else None
    return Conversation(where, messages, _name(row), group_id, _reward(row.get("reward")), tools)
