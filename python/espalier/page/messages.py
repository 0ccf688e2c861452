# SPDX-License-Identifier: Apache-2.0
"""Messages of chats, found in texts by the markers of chat templates."""

import re
from dataclasses import dataclass

ROLES = ("unknown", "system", "user", "assistant", "tool")

# The library knows the same markers and names (src/espalier/inspect/chat_roles.cpp). The role's name and the end of a header
# follow the first; the second open a message of a role; the third end one; the others do not determine the role.
HEADER_MARKERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>")
ROLE_MARKERS = {
    "[INST]": "user",
    "[/INST]": "assistant",
    "<<SYS>>": "system",
    "<</SYS>>": "user",
    "[TOOL_RESULTS]": "tool",
    "<tool_response>": "tool",
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
    "<\uff5cUser\uff5c>": "user",  # DeepSeek
    "<\uff5cAssistant\uff5c>": "assistant",
}
END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "</s>", "<|endoftext|>")
_OTHER_MARKERS = ("<|begin_of_text|>", "<bos>", "</tool_response>", "<|message|>")
HEADER_ENDS = ("\n", "<|end_header_id|>", "<|message|>", "<|channel|>")
LONGEST_HEADER = 40  # bytes
NAMES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "model": "assistant", "gpt": "assistant",
    "tool": "tool", "ipython": "tool", "function": "tool", "functions": "tool", "observation": "tool", "environment": "tool",
}  # fmt: skip

_MARKER = re.compile("|".join(map(re.escape, (*HEADER_MARKERS, *ROLE_MARKERS, *END_MARKERS, *_OTHER_MARKERS))))
_HEADER_END = re.compile("|".join(map(re.escape, HEADER_ENDS)))
_NAME = re.compile("[ \t]*([A-Za-z]*)")
_SPACE = " \t\r\n"


@dataclass
class Message:
    """A message, or a part of one."""

    role: str  # one of ROLES
    text: str = ""  # without the template's markers and the role's name
    begins: bool = False  # it has the marker that begins a message
    ends: bool = False  # and the one that ends it


@dataclass
class Chat:
    """What the text before a place says of the text after it."""

    role: str = "unknown"  # of the last message
    header: str | None = None  # as far as it goes, if the place is between a marker and the end of the role's name


def messages_in(text: str, chat: Chat) -> list[Message]:
    """The messages of `text`, in order. `chat` is that before the text, and is advanced to its end.

    Space between messages belongs to none of them. A marker that is partly outside of `text` is not recognised, except for its
    role's name.
    """
    messages = [Message(chat.role)]
    at = 0
    while at < len(text):
        if chat.header is not None:
            at += _read_header(text[at : at + LONGEST_HEADER], chat)
            messages[-1].role = chat.role
            continue
        marker = _MARKER.search(text, at)
        words = text[at : marker.start() if marker else len(text)]
        at = marker.end() if marker else len(text)
        if messages[-1].ends and words.strip(_SPACE):
            messages.append(Message(chat.role))
        if not messages[-1].ends:
            messages[-1].text += words
        if marker and marker[0] in END_MARKERS:
            messages[-1].ends = True
        elif marker and marker[0] not in _OTHER_MARKERS:
            chat.role = ROLE_MARKERS.get(marker[0], "unknown")
            chat.header = "" if marker[0] in HEADER_MARKERS else None
            if _is_space(messages):
                messages.pop()
            messages.append(Message(chat.role, begins=True))
    for message in messages:
        if message.begins:
            message.text = message.text.lstrip("\r\n")  # templates write line feeds after the role's name
    return messages if text else []


def _is_space(messages: list[Message]) -> bool:
    """Whether only space precedes the first marker, which then belongs to the message that the marker begins."""
    first = messages[0]
    return len(messages) == 1 and not (first.begins or first.ends or first.text.strip(_SPACE))


def _read_header(text: str, chat: Chat) -> int:
    """Reads a header on in `text`, and returns how many of its characters belong to the header."""
    assert chat.header is not None
    header = chat.header + text
    end = _HEADER_END.search(header)
    if end is None and len(header.encode()) < LONGEST_HEADER:
        chat.header = header
        return len(text)
    # Without an end this is not a header, and its text belongs to the message.
    size = end.end() - len(chat.header) if end else 0
    name = _NAME.match(header)
    chat.role = NAMES.get(name[1] if name else "", "unknown")
    chat.header = None
    return size
