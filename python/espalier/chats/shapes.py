# SPDX-License-Identifier: Apache-2.0
"""The formats of chats: which fields of a record have messages, and which of these messages are targets.

    messages            OpenAI's messages, with `response` (a logged answer) or `rejected_response` (a preference pair)
    conversations       ShareGPT's turns with `from` and `value`
    prompt, completion  two texts or two lists of messages (also question, query; response, answer, output)
    instruction, output Alpaca, with an optional `input` and the turns of `history`
    chosen, rejected    a preference pair, with or without a prompt; OpenAI's preferred_output, non_preferred_output

Loss is on what was answered: not on answers in a prompt, in a logged request, or in the turns that both sides of a pair share.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import BadRow
from ..rows.json_lines import json_value, shown
from .messages import REASONING, ROLES, SHAREGPT_ROLES

COMPLETIONS = ("completion", "response", "answer", "output")
PROMPTS = ("prompt", "question", "query", "input")
TEXT_PROMPTS = ("prompt", "question", "query")  # of preference pairs
CONTENTS = {"content", "value", "tool_calls", "function_call"}
REJECTED = ("rejected_response", "rejected_messages")
TOKENS = "token ids, which are rows already: pass them to `espalier train`, `inspect` or `verify`"


@dataclass
class Chat:
    """Messages of one trajectory, unchecked. The first `context` of them carry no loss. `side`: of a preference pair.
    `texts`: names of the fields whose texts became messages, and which a template must not have rendered before."""

    messages: list[Any]
    context: int = 0
    side: str | None = None
    texts: tuple[str, ...] = ()


def chats_of(fields, kind):
    """The chats of a record (io.fields.Fields): one, or the two sides of a pair. kind: "messages", "sharegpt",
    "prompt-completion" or "preference". Raises BadRow."""
    chats = _READERS[kind](fields)
    rejected = next((name for name in REJECTED if name in fields), None)
    if rejected and kind != "preference":
        chats = _with_rejected(chats[0], fields.get(rejected), rejected)
    for chat in chats:
        before = _system(fields, chat)
        chat.messages = before + chat.messages
        chat.context += len(before)
    return chats


def kind_of(record):
    """The kind of a record of text; raises BadRow if it has none."""
    if is_preference(record):
        return "preference"
    if record.get("messages") is not None:
        return "messages"
    if is_sharegpt(record):
        return "sharegpt"
    if is_prompt_completion(record):
        return "prompt-completion"
    raise BadRow("messages", "a non-empty list of chat messages", _without(record))


def is_sharegpt(record):
    return any(isinstance(_parsed(record.get(name)), list) for name in ("conversations", "conversation"))


def is_prompt_completion(record):
    if record.get("instruction") is not None and record.get("output") is not None:
        return True
    prompt = next((name for name in PROMPTS if record.get(name) is not None), None)
    if prompt is None or all(record.get(name) is None for name in COMPLETIONS):
        return False
    # Texts under the names `input` and `output` are what programs write of anything.
    return prompt != "input" or isinstance(record["input"], list)


def is_preference(record):
    if record.get("preferred_output") is not None and record.get("non_preferred_output") is not None:
        return True
    chosen, rejected = record.get("chosen"), record.get("rejected")
    return chosen is not None and rejected is not None and not isinstance(chosen, bool)


def _messages(fields):
    messages = _list_of(fields, "messages")
    if "response" in fields and not any(name in fields for name in REJECTED):
        return [_logged(messages, _answer(fields.get("response")))]
    return [Chat(messages)]


def _with_rejected(chat, value, name):
    """A pair of a chat and its last answer, or all of its messages, as they were rejected."""
    others = _turns(value, name, "assistant")
    last = len(chat.messages) - 1
    while last > 0 and _role(chat.messages[last - 1]) == "assistant":
        last -= 1
    if name == "rejected_response":
        others = chat.messages[:last] + others
    return _pair(chat.messages, others, chat.context, chat.texts)


def _logged(messages, answer):
    """The chat of a request and its answer, which some programs also append to the messages."""
    if messages and _role(messages[-1]) == "assistant":
        last = messages[-1]
        if _essence(last)[1:3] != _essence(answer)[1:3]:
            expected = "the last message of the assistant, or messages that end before it"
            raise BadRow("response", expected, shown(_content(answer) or answer))
        answer = last | {key: value for key, value in answer.items() if value is not None}
        messages = messages[:-1]
    return Chat([*messages, answer], len(messages))


def _answer(response):
    """The message of a logged answer: a text, a message, or OpenAI's object with `choices`."""
    if isinstance(response, str) and response.lstrip()[:1] == "{":
        parsed = json_value(response, {})
        response = parsed if "choices" in parsed else response
    if isinstance(response, dict) and "choices" in response:
        choices = response["choices"]
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        response = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(response, dict):
            raise BadRow("response.choices", "one choice with a message", shown(choices))
    messages = _turns(response, "response", "assistant")
    if len(messages) != 1:
        raise BadRow("response", "one message of the assistant", f"{len(messages)}")
    return messages[0]


def _sharegpt(fields):
    name = "conversations" if isinstance(_parsed(fields.peek("conversations")), list) else "conversation"
    return [Chat(_list_of(fields, name))]


def _prompt_completion(fields):
    if "instruction" in fields and "output" in fields:
        return [_alpaca(fields)]
    prompt, values = fields.first_of(*PROMPTS)
    completion, answer = fields.first_of(*COMPLETIONS)
    before = _history(fields)
    question = _turns(values, prompt, "user")
    texts = (prompt,) if isinstance(_parsed(values), str) else ()
    if completion == "response" and isinstance(answer, dict):
        answers = [_answer(answer)]
    else:
        answers = _turns(answer, completion, "assistant", parse=not texts)
    if before:  # is learned, unlike answers in the question
        question = [{**message, "weight": 0} if _role(message) == "assistant" else message for message in question]
    return [Chat([*before, *question, *answers], 0 if before else len(question), texts=texts)]


def _alpaca(fields):
    parts = {"instruction": fields.get("instruction"), "input": fields.get("input") or "", "output": fields.get("output")}
    for name, part in parts.items():
        if not isinstance(part, str):
            raise BadRow(name, "a text", shown(part))
    question = "\n\n".join(part for part in (parts["instruction"], parts["input"]) if part)
    return Chat([*_history(fields), {"role": "user", "content": question}, {"role": "assistant", "content": parts["output"]}])


def _history(fields):
    """Earlier turns, which are learned as well: pairs of texts, or messages."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(_list_of(fields, "history") if "history" in fields else []):
        if isinstance(turn, dict):
            messages.append(turn)
        elif isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        else:
            raise BadRow(f"history[{index}]", "two texts, a question and its answer", shown(turn))
    return messages


def _preference(fields):
    if "preferred_output" in fields:
        request = fields.inside("input")
        prompt = _list_of(request, "messages")
        chosen, rejected = (
            prompt + _turns(fields.get(name), name, "assistant") for name in ("preferred_output", "non_preferred_output")
        )
        return _pair(chosen, rejected, len(prompt))
    name, value = fields.first_of(*TEXT_PROMPTS)
    if name is None and "instruction" in fields:
        parts = {part: fields.get(part) or "" for part in ("instruction", "input")}
        for part, text in parts.items():
            if not isinstance(text, str):
                raise BadRow(part, "a text", shown(text))
        name, value = "instruction", "\n\n".join(filter(None, parts.values()))
    if name is None:
        name = next((name for name in ("conversations", "conversation", "messages") if name in fields), None)
        value = None if name is None else _list_of(fields, name)
    prompt = [] if value is None else _history(fields) + _turns(value, name, "user")
    is_text = isinstance(_parsed(value), str)
    sides, shared = [], len(prompt)
    for side in ("chosen", "rejected"):
        answer = fields.get(side)
        if isinstance(answer if is_text else _parsed(answer), str) and not prompt:
            raise BadRow(side, "a text with a `prompt`, or a list of messages", shown(answer))
        turns = _turns(answer, side, "assistant", parse=not is_text)
        if prompt and _role(turns[0]) != "assistant" and any(_essence(turn)[:2] == _essence(prompt[-1])[:2] for turn in turns):
            sides.append(turns)  # the whole conversation, which has the prompt in it
            shared = 0
        elif is_text and _role(turns[0]) != "assistant":
            raise BadRow(name, f"the text of a message of `{side}`, which is a whole conversation", shown(value))
        else:
            sides.append(prompt + turns)
    chosen, rejected = sides
    return _pair(chosen, rejected, shared, (name,) if is_text else ())


def _pair(chosen, rejected, prompt=0, texts=()):
    """Both sides of a pair. The turns in which they begin alike are context (TRL 1.16: data_utils.extract_prompt)."""
    shared = prompt
    while shared < min(len(chosen), len(rejected)) - 1 and _same(chosen[shared : shared + 1], rejected[shared : shared + 1]):
        shared += 1
    return [Chat(chosen, shared, "chosen", texts), Chat(rejected, shared, "rejected", texts)]


def _system(fields, chat):
    """Messages of the fields `system`, `system_prompt` and `developer`, which stand before all others of a chat."""
    before: list[dict[str, Any]] = []
    for name, role in (("system", "system"), ("system_prompt", "system"), ("developer", "developer")):
        text = fields.get(name)
        if text in (None, ""):
            continue
        if not isinstance(text, str):
            raise BadRow(name, "a text", shown(text))
        others = [_essence(message)[1] for message in before + chat.messages[:2] if _role(message) == role]
        if any(other != text.strip() for other in others):
            raise BadRow(name, f"the same text as the other {role} message, or no such message", shown(text))
        if not others:
            before.append({"role": role, "content": text})
    return before


def _turns(value, name, role, parse=True):
    """Messages of a text, a message, or a list of messages. parse: a JSON text of messages is one as well."""
    value = _parsed(value) if parse else value
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict) and (_role(value) or "content" in value):
        return [value if _role(value) else {"role": role, **value}]
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return [{"role": role, "content": value[0]}]
    raise BadRow(name, "a text, or a list of messages", shown(value))


def _list_of(fields, name):
    value = fields.get(name)
    value = [] if isinstance(value, str) and value.strip() in ("", "[]") and name == "history" else _parsed(value)
    if not isinstance(value, list) or not (value or name == "history"):
        raise BadRow(name, "a list of pairs of texts" if name == "history" else "a non-empty list of chat messages", shown(value))
    return value


def _parsed(value):
    """The messages of a JSON text, which columns of one type need; other values stay."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    parsed = json_value(value)
    items = parsed if isinstance(parsed, list) else [parsed]
    is_chat = bool(items) and all(
        isinstance(item, dict) and _role(item) in SHAREGPT_ROLES and CONTENTS & item.keys() for item in items
    )
    return parsed if is_chat else value


def _role(message):
    role = message.get("role") or message.get("from") if isinstance(message, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else None


def _content(message):
    return message.get("content", message.get("value")) if isinstance(message, dict) else None


def _essence(message):
    """What a message says, whatever its form: role, text, calls, and thoughts."""
    if not isinstance(message, dict):
        return message, "", [], ""
    content, calls = _content(message) or "", []
    if isinstance(content, list):
        content = "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)
    for call in message.get("tool_calls") or [{"function": message.get("function_call")}]:
        function = call.get("function") or call if isinstance(call, dict) else call
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            arguments = json_value(arguments, arguments)
        calls.append((function.get("name"), arguments) if isinstance(function, dict) else function)
    thoughts = next((message[key] for key in REASONING if message.get(key)), "")
    return _role(message), content.strip() if isinstance(content, str) else content, calls, thoughts


def _same(some, others):
    """Whether messages say the same."""
    return list(map(_essence, some)) == list(map(_essence, others))


def _without(record):
    if "input_ids" in record:
        return TOKENS
    if "text" in record:
        return "text (`text`), which has no turns: docs/data-format.md says how to encode it"
    names = ", ".join(f"`{name}`" for name in list(record)[:8])
    return f"a line without `messages` (its fields: {names}{', ...' if len(record) > 8 else ''})" if record else "an empty object"


_READERS = {"messages": _messages, "sharegpt": _sharegpt, "prompt-completion": _prompt_completion, "preference": _preference}
