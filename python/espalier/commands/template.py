# SPDX-License-Identifier: Apache-2.0
"""A model's chat template: which features it supports, and rendering of conversations."""

import json
from typing import Any

from ..errors import RenderError
from .console import clipped

ARGUMENT = "espalier_probe_key"
VALUE = "espalier probe value"
FUNCTION = "espalier_probe_function"
BESIDE = "espalier probe beside a call"
RESULT = "espalier probe result"


class ChatTemplate:
    """Renders messages with a tokenizer's chat template.

    Tool calls are rendered by the template if it can (`tool_calls == "template"`), otherwise written into the
    content (`"content"`). A template can render them if a rendered probe conversation contains the call's name,
    argument and value, none of them escaped twice, and the content of the message with the call. The variants that
    OpenAI's format allows are tried in order: null or empty content, arguments as a string or as an object.
    """

    def __init__(self, tokenizer, tool_calls="auto", arguments=None):
        """Raises ValueError if the template cannot be used, or not as `tool_calls` requires."""
        if not tokenizer.chat_template:
            raise ValueError("expected a tokenizer with a chat template, received one without")
        self._tokenizer = tokenizer
        self._arguments = arguments or {}
        self._null_content, self._object_arguments = None, False
        self.reason = ""
        self.tool_calls = tool_calls
        if tool_calls == "content" or not self._can_render_calls(tool_calls == "template"):
            if tool_calls == "template":
                raise ValueError(
                    f"--tool-calls template: expected a chat template that renders them, but {self.reason}")
            self.tool_calls = "content"
            self._null_content = ""
        else:
            self.tool_calls = "template"
        self.renders_tool_role = self._can_render_tool_role()
        self.renders_tools = self._renders_tools()
        self.ending_tokens = _special_tokens(tokenizer)

    def text(self, messages, add_generation_prompt, tools=None):
        """The rendered conversation; raises RenderError if the template raises."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt,
                tools=tools if tools and self.renders_tools else None, **self._arguments)
        except Exception as error:  # a template is a program and may raise anything
            kind = type(error).__name__
            if kind == "TemplateSyntaxError":
                line = getattr(error, "lineno", None)
                raise ValueError(f"expected a chat template in Jinja, received: line {line}: {error}") from None
            raise RenderError(clipped(f"{kind}: {error}")) from None

    def adapt(self, messages):
        """The messages in a form that this template can render; raises RenderError.

        Without template support a call is appended to the content as
        `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, and, if role `tool` is not rendered either, the
        results of one turn become a user message of `<tool_response>\\n...\\n</tool_response>`.
        """
        adapted: list[dict[str, Any]] = []
        for message in messages:
            message = dict(message)
            if message["role"] == "tool" and not self.renders_tool_role:
                text = f"<tool_response>\n{message['content'] or ''}\n</tool_response>"
                if adapted and adapted[-1].get("holds_results"):
                    adapted[-1]["content"] += "\n" + text
                    continue
                adapted.append({"role": "user", "content": text, "holds_results": True})
                continue
            if message.get("tool_calls"):
                if self.tool_calls == "content":
                    message["content"] = _with_calls(message["content"], message.pop("tool_calls"))
                elif self._object_arguments:
                    message["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]
            if message["content"] is None:
                message["content"] = self._null_content if message.get("tool_calls") else ""
            adapted.append(message)
        for message in adapted:
            message.pop("holds_results", None)
        return adapted

    def describe(self):
        """Lines for the user on the chosen rendering and its reason."""
        if self.tool_calls == "template":
            lines = ["tool calls: rendered by the chat template"]
        else:
            lines = ["tool calls: written into the content as <tool_call> JSON </tool_call>"
                     + (f" ({self.reason})" if self.reason else "")]
        if not self.renders_tool_role:
            lines.append("tool results: as user messages in <tool_response> (the chat template does not "
                         "render role `tool`)")
        if "strftime_now" in str(self._tokenizer.chat_template):
            lines.append("warning: the chat template writes today's date, so rows differ from day to day "
                         "unless --template-args sets it")
        return lines

    def _can_render_calls(self, forced):
        reasons = []
        for null_content in (None, ""):
            for object_arguments in (False, True):
                self._null_content, self._object_arguments = null_content, object_arguments
                reason = self._probe_calls(forced)
                if reason is None:
                    return True
                reasons.append(reason)
        self.reason = f"the chat template {reasons[-1]}"
        return False

    def _probe_calls(self, forced):
        """The reason why a probe is not rendered completely; None if it is."""
        arguments = {ARGUMENT: VALUE} if self._object_arguments else json.dumps({ARGUMENT: VALUE})
        call = {"id": "call00001", "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}

        def conversation(content):
            return [{"role": "user", "content": "x"},
                    {"role": "assistant", "content": content, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call00001", "name": FUNCTION, "content": RESULT}]
        try:
            bare = self._probe(conversation(self._null_content))
            beside = self._probe(conversation(BESIDE))
        except RenderError as error:
            return f"fails on them: {error}"
        if any(word not in bare for word in (FUNCTION, ARGUMENT, VALUE)):
            return "drops them"
        if f'\\"{ARGUMENT}' in bare:
            return "escapes their arguments twice"
        if "None" in bare:
            return "writes null content as None"
        if BESIDE not in beside and not forced:
            return "drops the content of messages with tool calls"
        return None

    def _can_render_tool_role(self):
        turn = {"role": "assistant", "content": "y"}
        if self.tool_calls == "template":
            return True  # the probe of the calls contained a result
        try:
            return RESULT in self._probe([{"role": "user", "content": "x"}, turn, {"role": "tool", "content": RESULT}])
        except RenderError:
            return False

    def _probe(self, messages):
        self.renders_tools = False
        return self.text(messages, add_generation_prompt=True)

    def _renders_tools(self):
        self.renders_tools = True
        schema = {"type": "function", "function": {
            "name": FUNCTION, "description": "x", "parameters": {"type": "object", "properties": {}}}}
        try:
            return FUNCTION in self.text([{"role": "user", "content": "x"}], True, [schema])
        except RenderError:
            return False


def _special_tokens(tokenizer):
    """Texts of the tokenizer's special tokens, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text))


def _with_object_arguments(call):
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RenderError(
            f"the template takes the arguments of a tool call as an object, but they are {clipped(text, 60)!r}")
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _with_calls(content, calls):
    parts = [content] if content else []
    for call in calls:
        function = call["function"]
        try:
            body = _call_text(function["name"], json.loads(function["arguments"]))
        except (ValueError, RecursionError):  # keep the model's text, although it is not valid JSON
            body = _call_text(function["name"], function["arguments"])
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _call_text(name, arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
