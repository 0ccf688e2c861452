# SPDX-License-Identifier: Apache-2.0
"""What a chat template writes of a conversation, found by rendering small ones of unique words."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from ..errors import RenderError

USER, ANSWER, SYSTEM = "espalier probe question", "espalier probe answer", "espalier probe instruction"
KEY, VALUE, NUMBER = "espalier_probe_key", "espalier probe value", "espalier_probe_number"
FUNCTION, SECOND = "espalier_probe_function", "espalier_probe_second"
BESIDE, RESULT, THOUGHT = "espalier probe beside a call", "espalier probe result", "espalier probe thought"
ARGUMENTS = {KEY: VALUE, NUMBER: 1}
REASONING = ("reasoning_content", "reasoning", "thinking")
# Variables by which templates turn thoughts on, off, or keep them in history.
SWITCHES = (
    "enable_thinking",
    "thinking",
    "preserve_thinking",
    "clear_thinking",
    "keep_past_thinking",
    "truncate_history_thinking",
)


def schema(name, *keys):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "x",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "x"} for key in keys},
                "required": [*keys],
            },
        },
    }


def common_length(*texts):
    """How many characters texts begin with alike."""
    return next(
        (at for at, (first, *others) in enumerate(zip(*texts)) if others.count(first) < len(others)), min(map(len, texts))
    )


def outside_of_tokens(at, texts, tokens):
    """The place `at` of texts, or the beginning of the token that it lies in. tokens: {length: tokens}, the longest first."""
    for text in texts:
        for length, alike in tokens.items():
            begins = range(max(0, at - length + 1), at)
            at = next((begin for begin in begins if text[begin : begin + length] in alike), at)
    return at


def by_length(texts):
    """{length: texts}, the longest first."""
    return {length: set(alike) for length, alike in groupby(sorted(texts, key=len, reverse=True), len) if length}


def user(text=USER):
    return {"role": "user", "content": text}


def answer(text=ANSWER, **keys):
    return {"role": "assistant", "content": text, **keys}


@dataclass(frozen=True)
class Forms:
    """How messages are handed to a template. `parts`: contents are lists of text parts. `content`: what a message of calls
    without content has. `objects`: the arguments of calls are objects, otherwise JSON texts."""

    parts: bool = False
    content: str | None = None
    objects: bool = False

    def call(self, name=FUNCTION, identity="call00001"):
        return {
            "id": identity,
            "type": "function",
            "function": {"name": name, "arguments": ARGUMENTS if self.objects else json.dumps(ARGUMENTS)},
        }

    def calls(self, content):
        """A conversation with a call, and its result."""
        return [
            user(),
            answer(content, tool_calls=[self.call()]),
            {"role": "tool", "tool_call_id": "call00001", "name": FUNCTION, "content": RESULT},
        ]


@dataclass
class Probes:
    """The findings about a template. render(messages, add_generation_prompt, tools) renders, or raises RenderError.
    `tokens`: the tokenizer's added tokens by length. `end`: the one that ends its texts. `reasons`: the words of its refusals.
    `needs_tools`: whether it rendered the last probe with tools alone."""

    render: Callable[..., str]
    parts: bool = False
    tokens: dict[int, set[str]] = field(default_factory=dict)
    end: str = ""
    needs_tools: bool = False
    reasons: list = field(default_factory=list)

    def text(self, messages, add_generation_prompt=True):
        """A rendered conversation, with tools if the template needs some; None if it refuses it."""
        for tools in (None, [schema(FUNCTION, KEY, NUMBER), schema(SECOND, KEY, NUMBER)]):
            try:
                text = self.render(self.in_form(messages), add_generation_prompt, tools)
            except RenderError as error:
                self.reasons.append(str(error))
                continue
            self.needs_tools = tools is not None
            return text
        return None

    def in_form(self, messages):
        if not self.parts:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    @staticmethod
    def content_text(message):
        """The text of a message in the form of this template."""
        content = message["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content or ())

    def writes(self, messages, *words, add_generation_prompt=True):
        text = self.text(messages, add_generation_prompt)
        return text is not None and all(word in text for word in words)

    def find_parts(self):
        """Finds whether contents have to be lists of parts. Returns False if the template drops texts in both forms."""
        system = {"role": "system", "content": SYSTEM}
        for messages in ([system, user(), answer()], [user(), answer()]):
            for self.parts in (False, True):
                if self.writes(messages, *[message["content"] for message in messages], add_generation_prompt=False):
                    return True
        self.parts = False
        # A template that refuses more than a form says why of each conversation.
        return self.text([user(), answer()], False) is None

    def find_calls(self, forced):
        """(forms in which calls are rendered, None) or (None, the reason why none is). `forced`: even without the content
        beside a call."""
        reason = None
        for content in (None, ""):
            rendered = {}
            for objects in (False, True):
                forms = Forms(self.parts, content, objects)
                self.reasons.clear()
                text = self.text(forms.calls(content))
                reason = self._fault(text) or (None if forced else self._beside_fault(forms))
                if reason is None:
                    rendered[objects] = (forms, text)
            if rendered:
                return self._choice(rendered), None
        return None, f"the chat template {reason}"

    def _choice(self, rendered):
        """Of both forms of arguments, the one that the model's own calls have: texts where both are rendered alike, otherwise
        objects, unless the template writes those as Python does."""
        if len(rendered) == 1:
            return next(iter(rendered.values()))[0]
        (as_text, with_text), (as_object, with_object) = rendered[False], rendered[True]
        return as_text if with_text == with_object or str(ARGUMENTS) in with_object else as_object

    def _fault(self, text):
        if text is None:
            return f"fails on them: {self.reasons[0]}"
        if any(word not in text for word in (FUNCTION, KEY, VALUE)):
            return "drops them"
        if f'\\"{KEY}' in text:
            return "escapes their arguments twice"
        if "None" in text:
            return "writes null content as None"
        return "writes an empty turn behind them" if self._begins_anew(text) else None

    def _beside_fault(self, forms):
        text = self.text(forms.calls(BESIDE))
        if text is None or BESIDE not in text:
            return "drops the content of messages with tool calls"
        return "writes the content of messages with tool calls as a turn of its own" if self._begins_anew(text) else None

    def _begins_anew(self, text):
        """Whether the message of a call is written as two turns."""
        turn = text.partition(USER)[2].partition(RESULT)[0]
        begin = min(at for at in (turn.find(BESIDE), turn.find(FUNCTION), len(turn)) if at >= 0)
        again = re.escape(self.end) + r"\s*" + re.escape(self.header.rstrip())
        return bool(self.end and self.header) and re.search(again, turn[begin:]) is not None

    def writes_results(self):
        return self.writes([user(), answer(), {"role": "tool", "content": RESULT}], RESULT)

    def writes_calls_of(self, forms):
        """Whether several calls of a message are written."""
        calls = [forms.call(), forms.call(SECOND, "call00002")]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": RESULT} for call in calls
        ]
        return self.writes([user(), answer(forms.content, tool_calls=calls), *results], FUNCTION, SECOND)

    def writes_schemas(self):
        try:
            return FUNCTION in self.render(self.in_form([user()]), True, [schema(FUNCTION)])
        except RenderError:
            return False

    def fault_of_role(self, role, first):
        """Why messages of a role are not written, as the first or as a later one; empty if they are."""
        message = {"role": role, "content": SYSTEM}
        self.reasons.clear()
        if self.writes([message, user()] if first else [user(), answer(), message, user()], SYSTEM):
            return ""
        return self.reasons[0] if len(self.reasons) > 1 else "the template drops it"

    @cached_property
    def refuses_long_ids(self):
        """Whether ids of calls have to be nine letters and digits, as Mistral's."""

        def text(identity):
            forms = Forms(self.parts)
            return self.text(
                [
                    user(),
                    answer("", tool_calls=[forms.call(identity=identity)]),
                    {"role": "tool", "tool_call_id": identity, "name": FUNCTION, "content": RESULT},
                ]
            )

        return text("call00001") is not None and text("call_000000000001") is None

    @cached_property
    def reasoning_key(self):
        """The name under which the template reads the thoughts of the last answer; None if it drops them."""
        return next(
            (key for key in REASONING if self.writes([user(), answer(**{key: THOUGHT})], THOUGHT, add_generation_prompt=False)),
            None,
        )

    def prompts(self, turn):
        """Whether the generation prompt begins a turn behind a question."""
        prompt, whole = self.text([user()]), self.text([user(), turn], False)
        return bool(prompt and whole) and whole.startswith(prompt)

    @cached_property
    def finds_thoughts(self):
        """Whether thoughts in <think> at the beginning of a content are written as those of `reasoning_key`."""
        inside = self.text([user(), answer(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")], False)
        return inside == self.text([user(), answer(**{self.reasoning_key: THOUGHT})], False)

    @cached_property
    def header(self):
        """What the template writes before any answer to a question: as generation prompt, and in rendered turns."""
        question, prompt = self.text([user()], False), self.text([user()])
        answers = [answer()] + ([answer(**{self.reasoning_key: THOUGHT})] if self.reasoning_key else [])
        turns = [self.text([user(), turn], False) for turn in answers]
        if not question or not prompt or None in turns:
            return ""
        generation = prompt[outside_of_tokens(common_length(question, prompt), (question, prompt), self.tokens) :].lstrip()
        openings = [re.split(f"{ANSWER}|{THOUGHT}", turn.partition(USER)[2])[0] for turn in turns]
        lengths = range(len(generation), 0, -1)
        end = next((end for end in lengths if all(generation[:end] in opening for opening in openings)), 0)
        return generation[: outside_of_tokens(end, (generation,), self.tokens)]

    def ends(self):
        """What the template writes behind the last answer of a conversation, as (what it writes there in the middle as well, the
        rest, whether it writes the generation prompt without being told to)."""
        messages = [user(), answer()]
        whole = self.text(messages, False)
        longer = self.text([*messages, user(USER + "s")])
        if not whole or not longer or whole.count(ANSWER) != 1 or longer.count(ANSWER) != 1:
            return "", "", False
        end, middle = whole.partition(ANSWER)[2], longer.partition(ANSWER)[2]
        shared = outside_of_tokens(common_length(end, middle), (end, middle), self.tokens)
        return end[:shared], end[shared:], whole == self.text(messages)
