# SPDX-License-Identifier: Apache-2.0
"""A model's chat template: how messages are handed to it, and rendering of conversations."""

import hashlib
import json
import re
from functools import cached_property, partial
from typing import Any

from ..commands.console import clipped
from ..errors import RenderError
from ..rows.json_lines import json_value
from .messages import REASONING
from .probes import SWITCHES, THOUGHT, Probes, answer, by_length
from .views import views_of

MOST_VARIANTS = 256  # of arguments that rows bring


class ChatTemplate:
    """Renders messages with a tokenizer's chat template.

    What the template writes is found by probes. Tool calls are rendered by it if it writes them completely (`tool_calls ==
    "template"`), otherwise written into the content (`"content"`). Whether it writes content beside calls matters only if
    the data have some: has_beside() looks. Messages of a role that the template drops are refused, or become those of another
    role.
    """

    def __init__(self, tokenizer, tool_calls="auto", arguments=None, has_beside=lambda: True):
        """Raises ValueError if the template cannot be used, or not as `tool_calls` requires."""
        if not tokenizer.chat_template:
            raise ValueError("expected a tokenizer with a chat template, received one without")
        self.tokenizer = tokenizer
        self.arguments = arguments or {}
        self._variants: dict[str, ChatTemplate] = {}
        self._faults: dict[tuple[str, bool], str] = {}  # by arguments of fault_of_role
        self.added_tokens = by_length(token.content for token in tokenizer.added_tokens_decoder.values())
        self.probes = Probes(self._rendered, tokens=self.added_tokens, end=tokenizer.eos_token or "")
        if not self.probes.find_parts():
            raise ValueError(
                "expected a chat template that writes the texts of messages, received one that drops them as texts "
                "and as lists of parts"
            )
        self.reason = ""
        self._forms = self._find_forms(tool_calls, has_beside)
        self.tool_calls = "template" if self._forms else "content"
        self.ending_tokens = _special_tokens(tokenizer)
        self.special_tokens = re.compile("|".join(map(re.escape, self.ending_tokens)) or "(?!)")

    def _find_forms(self, tool_calls, has_beside):
        """The forms of calls that the template renders; None if they are written into the content."""
        if tool_calls == "content":
            return None
        forms, self.reason = self.probes.find_calls(forced=tool_calls == "template")
        if forms is None and tool_calls == "auto":
            forms, _ = self.probes.find_calls(forced=True)
            if forms and has_beside():
                forms = None
        if forms is None and tool_calls == "template":
            raise ValueError(f"--tool-calls template: expected a chat template that renders them, but {self.reason}")
        return forms

    def variant(self, arguments):
        """The template with other values of its variables."""
        if not arguments or arguments.items() <= self.arguments.items():
            return self
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.clear()
            self._variants[key] = ChatTemplate(self.tokenizer, self.tool_calls, {**self.arguments, **arguments})
        return self._variants[key]

    @cached_property
    def source(self):
        template = self.tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    @cached_property
    def renders_results(self):
        return self.tool_calls == "template" or self.probes.writes_results()

    @cached_property
    def renders_tools(self):
        return self.probes.writes_schemas()

    @cached_property
    def renders_several_calls(self):
        return self.tool_calls == "content" or self.probes.writes_calls_of(self._forms)

    def fault_of_role(self, role, first):
        """Why the template does not write messages of a role, as the first or as a later one; empty if it does."""
        key = (role, first)
        if key not in self._faults:
            self._faults[key] = self.probes.fault_of_role(role, first)
        return self._faults[key]

    def reads(self, key):
        """Whether the template mentions a key of messages."""
        key = re.escape(key)
        pattern = rf"""\.{key}\b|[\[(]\s*['"]{key}['"]|['"]{key}['"]\s+(?:not\s+)?in\b"""
        return re.search(pattern, self.source) is not None

    @cached_property
    def end_of_text(self):
        """What stands at the end of a rendered conversation and belongs to no turn: a last token that only whole texts have, or
        a generation prompt that is always there."""
        shared, rest, prompts = self.probes.ends()
        ending = self.tokenizer.eos_token
        if not ending or ending not in shared:
            ending = next((token for token in self.ending_tokens if token in shared), None) if prompts else None
        if rest and ending:
            return shared[shared.rindex(ending) + len(ending) :] + rest
        return rest if any(shared.rstrip().endswith(token) for token in self.ending_tokens) else ""

    @cached_property
    def cure(self):
        """Arguments of the template with which its generation prompt begins answers that it does not begin without them, as
        JSON; None. Answers without thoughts are looked at first."""
        thoughts = {self.probes.reasoning_key: THOUGHT} if self.probes.reasoning_key else {}
        turn = next((turn for turn in (answer(), answer(**thoughts)) if not self.probes.prompts(turn)), None)
        for name in SWITCHES if turn else ():
            for value in (False, True):
                is_switch = re.search(rf"\b{name}\b", self.source) and name not in self.arguments
                if is_switch and Probes(partial(self._rendered, arguments={name: value}), self.probes.parts).prompts(turn):
                    return json.dumps({name: value})
        return None

    def _rendered(self, messages, add_generation_prompt, tools=None, arguments=None):
        """The rendered conversation; raises RenderError if the template raises."""
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **{**self.arguments, **(arguments or {})},
            )
        except Exception as error:  # a template is a program and may raise anything
            kind = type(error).__name__
            if kind == "TemplateSyntaxError":
                line = getattr(error, "lineno", None)
                raise ValueError(f"expected a chat template in Jinja, received: line {line}: {error}") from None
            advice = "" if tools is not None or not self.probes.needs_tools else "; the template needs `tools`"
            raise RenderError(clipped(f"{kind}: {error}") + advice) from None

    def views(self, messages, tools):
        """The renderings of the beginnings of adapted messages; raises RenderError."""
        tools = tools if tools and self.renders_tools else None

        def standard(count, add_generation_prompt):
            return self._rendered(messages[:count], add_generation_prompt, tools)

        return views_of(self.tokenizer, messages, tools, self.arguments, standard)

    def adapt(self, messages, tally):
        """The messages in a form that this template can render; raises RenderError. tally(kind): counts what is worth a note.

        Without template support a call is appended to the content as
        `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, and, if role `tool` is not rendered either, the results
        of one turn become a user message of `<tool_response>\\n...\\n</tool_response>`. A developer message that the template
        drops becomes a system message.
        """
        adapted: list[dict[str, Any]] = []
        for message in self._in_rendered_roles(messages, tally):
            message = dict(message)
            if message["role"] == "tool" and not self.renders_results:
                text = f"<tool_response>\n{message['content'] or ''}\n</tool_response>"
                if adapted and adapted[-1].get("holds_results"):
                    adapted[-1]["content"] += "\n" + text
                    continue
                adapted.append({"role": "user", "content": text, "holds_results": True})
                continue
            if message.get("tool_calls"):
                self._adapt_calls(message, tally)
            elif message["role"] == "tool" and self._needs_other_id(message.get("tool_call_id")):
                message["tool_call_id"] = _short_id(message["tool_call_id"])
            if message["role"] == "assistant":
                self._adapt_reasoning(message)
            if message["content"] is None:
                message["content"] = self._forms.content if message.get("tool_calls") and self._forms else ""
            adapted.append(message)
        for message in adapted:
            message.pop("holds_results", None)
        return self.probes.in_form(adapted)

    def _needs_other_id(self, identity):
        return (
            isinstance(identity, str)
            and not re.fullmatch("[a-zA-Z0-9]{9}", identity)
            and self._forms is not None
            and self.probes.refuses_long_ids
        )

    def _adapt_calls(self, message, tally):
        if self._forms is None:
            message["content"] = _with_calls(message["content"], message.pop("tool_calls"))
            return
        if len(message["tool_calls"]) > 1 and not self.renders_several_calls:
            raise RenderError(
                f"{len(message['tool_calls'])} tool calls of a message, of which the template does not write all; "
                "--tool-calls content does"
            )
        if self.probes.refuses_long_ids and any(call.get("id") is None for call in message["tool_calls"]):
            raise RenderError("a tool call without an id, which the template needs; --tool-calls content needs none")
        if any(self._needs_other_id(call.get("id")) for call in message["tool_calls"]):
            tally("short_ids")
            message["tool_calls"] = [
                {**call, "id": _short_id(call["id"])} if self._needs_other_id(call.get("id")) else call
                for call in message["tool_calls"]
            ]
        if self._forms.objects:
            message["tool_calls"] = [_with_object_arguments(call) for call in message["tool_calls"]]

    def _adapt_reasoning(self, message):
        """Gives thoughts the name that the template reads. Those in <think> at the beginning of the content get it if the
        template does not find them there."""
        thoughts = next((message[key] for key in REASONING if isinstance(message.get(key), str) and message[key]), None)
        thought, end, content = (message["content"] or "").partition("</think>")
        is_inside = thoughts is None and end and thought.lstrip().startswith("<think>")
        key = self.probes.reasoning_key if is_inside or thoughts is not None else None
        if key and is_inside and not self.probes.finds_thoughts:
            message[key], message["content"] = thought.replace("<think>", "", 1).strip("\n"), content.lstrip("\n") or None
        elif key and key not in message and thoughts is not None:
            message[key] = thoughts

    def _in_rendered_roles(self, messages, tally):
        """The messages, those of roles that the template drops as ones of another role. Those behind the last answer are never
        rendered, so their roles do not matter."""
        last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        result: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            role = message["role"]
            first = all(earlier["role"] in ("system", "developer") for earlier in result)
            if index > last or role in ("user", "assistant", "tool") or not self.fault_of_role(role, not result):
                result.append(message)
                continue
            if role == "developer" and first and result and result[-1]["role"] == "system":
                result[-1] = {**result[-1], "content": f"{result[-1]['content']}\n\n{message['content'] or ''}"}
            elif role == "developer" and not self.fault_of_role("system", not result):
                result.append({**message, "role": "system"})
            else:
                place = "after others" if result else "at the beginning"
                raise RenderError(
                    f"a message of role `{clipped(role, 40)}` {place}, which is not written: "
                    f"{self.fault_of_role(role, not result)}"
                )
            tally("developer_as_system")
        return result

    def describe(self):
        """Lines for the user on the chosen rendering and its reason."""
        if self.tool_calls == "template":
            lines = ["tool calls: rendered by the chat template"]
        else:
            lines = [
                "tool calls: written into the content as <tool_call> JSON </tool_call>"
                + (f" ({self.reason})" if self.reason else "")
            ]
        if not self.renders_results:
            lines.append("tool results: as user messages in <tool_response> (the chat template does not render role `tool`)")
        if "strftime_now" in self.source:
            lines.append(
                "warning: the chat template writes today's date, so rows differ from day to day unless --template-args sets it"
            )
        return lines


def _special_tokens(tokenizer):
    """Texts of the tokenizer's special tokens, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text))


def _short_id(identity):
    """Nine letters and digits, the same for the same id."""
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _with_object_arguments(call):
    text = call["function"]["arguments"]
    arguments = json_value(text)
    if not isinstance(arguments, dict):
        raise RenderError(f"the template takes the arguments of a tool call as an object, but they are {clipped(text, 60)!r}")
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _with_calls(content, calls):
    parts = [content] if content else []
    for call in calls:
        name, text = call["function"]["name"], call["function"]["arguments"]
        arguments = json_value(text, text)  # the model's text, where it is not valid JSON
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)
