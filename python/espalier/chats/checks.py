# SPDX-License-Identifier: Apache-2.0
"""Whether a rendered conversation has what its messages say: what is missing is counted by its kind, and calls are refused."""

import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import RenderError
from ..rows.json_lines import json_value
from .messages import REASONING


def check_answer(message, completion, tally):
    """Compares a turn with its completion. Raises RenderError if it lacks a tool call."""
    content, thoughts = _divided(message)
    if not _is_in(content, completion):
        tally("dropped_beside_calls" if message.get("tool_calls") else "dropped_answers")
    if not _is_in(thoughts, completion):
        tally("dropped_reasoning")
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        if name not in completion:
            raise RenderError(f"a tool call of `{name}`, which the template does not write in this turn")
        arguments = json_value(call["function"]["arguments"])
        if isinstance(arguments, dict) and not all(_is_in(key, completion) for key in arguments):
            tally("dropped_arguments")


@dataclass
class Context:
    """Looks for messages in the growing text of a run, for each once. `count`: of those looked for; they end before `place`."""

    messages: list[dict[str, Any]]
    count: int = 0
    place: int = 0

    def gaps(self, end, prompt):
        """The indices of messages before `end`, a turn, whose content its prompt lacks."""
        for index in range(self.count, end):
            content = _divided(self.messages[index])[0].strip()
            at = prompt.find(content, self.place)
            if at >= 0:
                self.place = at + len(content)
            elif not _is_in(content, prompt):
                yield index
        self.count = end


def check_context(messages, gaps, tokens, tally):
    """Counts messages with these indices as dropped, and those that have special tokens. tokens: a pattern of them."""
    for index, message in enumerate(messages):
        if message["content"] and tokens.search(message["content"]):
            tally("special_tokens")
        if index in gaps:
            tally(f"dropped:{message['role']}")


def _divided(message):
    """(what a message says, its thoughts), which may stand in its content."""
    content = message["content"] or ""
    thoughts = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
    if message["role"] == "assistant" and "</think>" in content:
        thought, _, content = content.rpartition("</think>")
        thoughts = thoughts or thought.replace("<think>", "", 1)
    return content, thoughts


def _is_in(words, text):
    """Whether a text has the words, perhaps with other spaces, or escaped as in JSON."""
    words = words.strip()
    if words in text or json.dumps(words)[1:-1] in text or json.dumps(words, ensure_ascii=False)[1:-1] in text:
        return True
    letters = re.sub(r"[\W_]+", "", words)
    return bool(letters) and letters in re.sub(r"[\W_]+", "", text)
