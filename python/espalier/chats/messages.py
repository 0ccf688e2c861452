# SPDX-License-Identifier: Apache-2.0
"""Messages in one form: OpenAI's, whatever names roles, contents, calls and marks of loss have in a file.

A checked message has `role`, `content` (a string or None), and where the file has them `tool_calls` with the arguments as
JSON text, reasoning, and other keys, which a chat template may read.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from ..errors import BadRow
from ..rows.json_lines import shown

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
         "ai": "assistant", "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
         "ipython": "tool"}  # fmt: skip
SHAREGPT_ROLES = ("user", "assistant", "system", "developer", "tool", *ROLES, "tool_call", "function_call")
CALL_ROLES = ("tool_call", "function_call")  # ms-swift and LLaMA-Factory: a message whose content is the call
MARKS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "loss_weight")
REASONING = ("reasoning_content", "reasoning", "thinking")
READ_KEYS = frozenset(("role", "content", "tool_calls", "function_call", "tool_call_id", "name", *REASONING))
ARGUMENTS = ("arguments", "parameters", "args", "input")  # OpenAI, Llama 3, LangChain, Anthropic
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "pixel_values")
NULL_KEYWORDS = ("default", "const")  # of JSON Schema, where null is a value


@dataclass
class Messages:
    """The checked messages of a conversation. `weights`: the loss of each message of the assistant, in order."""

    messages: list[dict[str, Any]]
    weights: list[float]


def checked_messages(values, context, schemas, tally):
    """Messages of a file, of which the first `context` have no loss. schemas: {function: names of its arguments}.
    tally(kind): counts what is worth a note. Raises BadRow."""
    if not isinstance(values, list) or not values:
        raise BadRow("messages", "a non-empty list of chat messages", shown(values))
    result = Messages([], [])
    for index, value in enumerate(values):
        name = f"messages[{index}]"
        message = _in_names_of_openai(value, name)
        mark = _mark(message, name)
        weight = 0.0 if index < context else 1.0 if mark is None else mark
        is_call = message["role"] in CALL_ROLES
        if is_call:
            message = _call_message(message, name)
        elif mark and message["role"] != "assistant":
            tally("marked_others")
        _check(message, name, schemas, tally)
        if is_call and _continues(result, message, weight):
            last = result.messages[-1]
            calls = [*last.get("tool_calls", []), *message["tool_calls"]]
            result.messages[-1] = {**message, **last, "tool_calls": calls}
            continue
        result.messages.append(message)
        if message["role"] == "assistant":
            result.weights.append(weight)
            if not message["content"] and "tool_calls" not in message:
                tally("empty_answers")
    if not result.weights:
        raise BadRow("messages", "at least one message with role assistant", "none")
    return result


def _continues(result, message, weight):
    """Whether a message of calls belongs to the one before it: nothing stands between them."""
    last = result.messages[-1] if result.messages else {}
    both_think = all(any(each.get(key) for key in REASONING) for each in (last, message))
    return last.get("role") == "assistant" and result.weights[-1] == weight and not both_think


def _in_names_of_openai(value, name):
    """A message with `role` and `content`, without keys that are null."""
    if not isinstance(value, dict):
        raise BadRow(name, "an object", shown(value))
    # Clients write every field they know. null means absent, but templates often test with `in`.
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if "from" in message and "role" not in message and message["from"] not in SHAREGPT_ROLES:
        raise BadRow(f"{name}.from", f"one of {', '.join(SHAREGPT_ROLES)}", shown(message["from"]))
    for key, other in (("role", "from"), ("content", "value")):
        if other in message and message.get(key) is None:
            message[key] = message.pop(other)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRow(f"{name}.role", "a non-empty string", shown(role))
    message["role"] = ROLES.get(role, role)
    for key in MEDIA:
        if message.get(key) not in (None, "", [], {}):
            raise BadRow(f"{name}.{key}", "text alone, since rows have tokens only", "images or other inputs")
    if "content" not in message and isinstance(message.get("text"), str):
        raise BadRow(f"{name}.content", "the text of a message", "none, but one in `text`")
    message.setdefault("content", None)
    return message


def _mark(message, name):
    """The weight that the message's marks give its loss; None without one."""
    marks = {key: message.pop(key) for key in MARKS if key in message}
    marks = {key: value for key, value in marks.items() if value == value}  # NaN, which tables have where there is none, is none
    for key, value in marks.items():
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value) or value < 0:
            raise BadRow(f"{name}.{key}", "true, false, or a finite number >= 0", shown(value))
    values = {float(value) for value in marks.values()}
    if len(values) > 1:
        raise BadRow(name, f"one weight in {' and '.join(f'`{key}`' for key in marks)}", shown([*marks.values()]))
    return values.pop() if values else None


def _call_message(message, name):
    """A message of a role of calls as one of the assistant. Its text is a call, a list of calls, or reasoning and calls."""
    content, reasoning = message["content"], None
    if isinstance(content, str):
        if "</think>" in content:
            thought, _, content = content.rpartition("</think>")
            reasoning = thought.replace("<think>", "", 1).strip()
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            raise BadRow(
                f"{name}.content", "the JSON of a tool call with name and arguments", shown(message["content"])
            ) from None
    calls = content if isinstance(content, list) else [content]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"{name}.content", "a tool call with name and arguments", shown(call))
    if "tool_calls" in message:
        raise BadRow(f"{name}.tool_calls", f"no calls beside those of role {message['role']}", shown(message["tool_calls"]))
    result = {**message, "role": "assistant", "content": None, "tool_calls": calls}
    return result if not reasoning else {**result, "reasoning_content": reasoning}


def _check(message, name, schemas, tally):
    message["content"], thoughts = _content(message["content"], f"{name}.content")
    _check_thoughts(message, thoughts, name, tally)
    calls = _calls(message, name)
    if calls:
        if message["role"] != "assistant":
            raise BadRow(f"{name}.tool_calls", "tool calls in assistant messages only", f"role {shown(message['role'])}")
        message["tool_calls"] = [_tool_call(call, f"{name}.tool_calls[{i}]", schemas, tally) for i, call in enumerate(calls)]


def _check_thoughts(message, of_parts, name, tally):
    """Makes one text of the reasoning that a message has under several names, and in its parts."""
    texts = {key: message[key] for key in REASONING if message.get(key)}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise BadRow(f"{name}.{key}", "a text", shown(text))
    if len({*texts.values(), *([of_parts] if of_parts else [])}) > 1:
        raise BadRow(name, f"one reasoning in {', '.join(map('`{}`'.format, texts))} and in parts", "several")
    if of_parts:
        message.setdefault("reasoning_content", of_parts)
    if (texts or of_parts) and message["role"] != "assistant":
        tally("thoughts_of_others")


def _content(value, name):
    """(the text of a message, its thoughts): of a string, null, or a list of parts."""
    if value is None or isinstance(value, str):
        return value, ""
    if not isinstance(value, list):
        raise BadRow(name, "a string, null or a list of text parts", shown(value))
    texts, thoughts = [], []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        elif kind == "reasoning" and isinstance(part.get("text"), str):
            thoughts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise BadRow(f"{name}[{index}]", "a part of type text", shown(part))
    return "".join(texts), "\n".join(thoughts)


def _calls(message, name):
    calls = message.pop("tool_calls", [])
    if isinstance(calls, str):
        try:
            calls = json.loads(calls) if calls.strip() else []
        except (ValueError, RecursionError):
            raise BadRow(f"{name}.tool_calls", "a list, or the JSON of one", shown(calls)) from None
    if "function_call" in message:  # the older name of a single tool call
        call = message.pop("function_call")
        if calls not in ([], None) and calls != [{**calls[0], "function": call}]:
            raise BadRow(f"{name}.function_call", "the call of `tool_calls`, or one of both fields", shown(call))
        calls = calls or [{"function": call}]
    if not isinstance(calls, list):
        raise BadRow(f"{name}.tool_calls", "a list", shown(calls))
    return calls


def _tool_call(call, name, schemas, tally):
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            raise BadRow(name, "an object, or the JSON of one", shown(call)) from None
    if isinstance(call, dict) and "function" not in call and isinstance(call.get("name"), str):
        call = {
            **{key: value for key, value in call.items() if key not in ("name", *ARGUMENTS)},
            "function": {key: call[key] for key in ("name", *ARGUMENTS) if key in call},
        }
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRow(f"{name}.function", "an object with name and arguments", shown(function))
    if not isinstance(function.get("name"), str):
        raise BadRow(f"{name}.function.name", "a string", shown(function.get("name")))
    names = [key for key in ARGUMENTS if function.get(key) is not None]
    if len(names) > 1:
        raise BadRow(f"{name}.function", "arguments under one name", " and ".join(map("`{}`".format, names)))
    arguments = function[names[0]] if names else None
    if isinstance(arguments, dict):
        arguments = _arguments_text(_without_nulls(arguments, schemas.get(function["name"]), tally), name)
    elif arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"  # a call without arguments
    if not isinstance(arguments, str):
        raise BadRow(f"{name}.function.arguments", "a JSON object, or a string that holds one", shown(arguments))
    return {
        **{key: value for key, value in call.items() if value is not None},
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _without_nulls(arguments, names, tally):
    """The arguments without those that are null and that the function does not have: writers of tables fill them in. Nulls of
    arguments that it has stay, and are counted."""
    result = {key: value for key, value in arguments.items() if value is not None or names is None or key in names}
    if _has_null(result):
        tally("null_arguments")
    if len(result) < len(arguments):
        tally("null_arguments_left_out")
    return result


def _has_null(value):
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(item is None or _has_null(item) for item in values)


def _arguments_text(arguments, name):
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise BadRow(f"{name}.function.arguments", "JSON of bounded depth", "deeper nesting") from None
    except (TypeError, ValueError) as error:
        raise BadRow(f"{name}.function.arguments", "values that JSON has", str(error)) from None


def checked_schemas(fields):
    """(tool schemas of a record or None, {function: names of its arguments}); raises BadRow. `functions` and `tool_defs` have
    bare functions; all may be JSON texts."""
    name, schemas = fields.first_of("tools", "functions", "tool_defs")
    if name is None and "preferred_output" in fields:  # OpenAI's pairs have them in the request
        name, schemas = fields.inside("input").first_of("tools", "functions")
    if name is None:
        return None, {}
    schemas = _parsed_schemas(schemas, name)
    if name != "tools":
        schemas = [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas]
    schemas = [_schema_without_nulls(schema) for schema in schemas]
    names = {}
    for schema in schemas:
        function = schema.get("function", schema)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict) and isinstance(function.get("name"), str):
            names[function["name"]] = frozenset(properties)
    return schemas, names


def _parsed_schemas(schemas, name):
    try:
        if isinstance(schemas, str):
            schemas = (json.loads(schemas) if schemas.strip() else None) or []
        if isinstance(schemas, list):
            schemas = [json.loads(schema) if isinstance(schema, str) else schema for schema in schemas]
    except (ValueError, RecursionError):
        raise BadRow(name, "a list of tool schemas, or the JSON of one", shown(schemas)) from None
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise BadRow(name, "a list of tool schemas", shown(schemas))
    return schemas


def _schema_without_nulls(schema):
    """A schema without keys that are null, which no keyword but those of values can be."""
    if isinstance(schema, dict):
        return {key: _schema_without_nulls(value) for key, value in schema.items() if value is not None or key in NULL_KEYWORDS}
    if isinstance(schema, list):
        return [_schema_without_nulls(value) for value in schema]
    return schema
