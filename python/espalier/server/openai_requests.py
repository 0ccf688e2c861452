# SPDX-License-Identifier: Apache-2.0
"""The requests of the OpenAI API that the server reads. Fields that would change the answer and are not served are refused by
name; those that would not are left out."""

from reprlib import repr as short
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
from pydantic import ConfigDict, Field

from ..commands.arguments import RESERVED
from .bodies import check_memory, refusal_of
from .errors import Refused
from .requests import Int64, Request, Token

HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "parallel_tool_calls", "prediction"))  # fmt: skip
# Values with which a field that is not served changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "logit_bias": ({},),
    "best_of": (1,), "echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "tool_choice": ("auto", "none"), "functions": ([],)}  # fmt: skip
MAX_SAMPLES = 128   # of a prompt, as OpenAI has it
MAX_PROMPTS = 256   # of a request
MAX_TOP = 20        # tokens whose log-probabilities are given at a position
MAX_MESSAGES = 10000

StopText = Annotated[str, Field(min_length=1, max_length=256)]
Variable = bool | int | float | Annotated[str, Field(max_length=256)]
Kind = TypeVar("Kind", bound="Generate")


class StreamOptions(Request):
    include_usage: bool = False


class Generate(Request):
    """Of both kinds."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    model: str
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    seed: Int64 | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = Field([])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stop_texts(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context has room for."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Tokens at each position whose log-probabilities are asked for; None: not even those of the answer."""
        raise NotImplementedError


class Completions(Generate):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def token_limit(self) -> int | None:
        """OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def top(self) -> int | None:
        """Tokens at each position whose log-probabilities are asked for; None: not even those of the answer."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Texts and lists of token ids. Raises Refused."""
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise Refused(f"prompt: expected 1 to {MAX_PROMPTS} prompts, received {len(prompts)}")
        return prompts


class Chat(Generate):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    tools: list[dict[str, Any]] = Field([], max_length=1024)
    chat_template_kwargs: dict[str, Variable] = Field({}, max_length=16)

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Tokens at each position whose log-probabilities are asked for; None: not even those of the answer."""
        return self.top_logprobs if self.logprobs else None

    def variables(self) -> dict[str, bool | int | float | str]:
        """Of the chat template. Raises Refused."""
        if reserved := RESERVED & self.chat_template_kwargs.keys():
            raise Refused(f"chat_template_kwargs: expected variables of the template, received {min(reserved)}")
        return self.chat_template_kwargs


def read(body: bytes, kind: type[Kind]) -> Kind:
    """A request of this kind. Raises Refused, and MemoryError as `check_memory`."""
    check_memory(body)
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"expected a body of JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused("expected an object of JSON, received something else")
    with_tools = fields.get("tool_choice") != "none"
    fields = {name: value for name, value in fields.items() if not _changes_nothing(name, value)}
    for name, value in fields.items():
        if name in kind.model_fields:
            continue
        neutral = f" but {' or '.join(map(repr, NEUTRAL[name]))}" if name in NEUTRAL else ""
        raise Refused(f"{name[:100]}: expected none{neutral}, as this server cannot do what it asks for, received {short(value)}")
    if not with_tools:
        fields.pop("tools", None)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise refusal_of(error) from None


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or name in HARMLESS or value in NEUTRAL.get(name, ())


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are texts. Raises Refused."""
    return [_message(message, f"messages.{number}") for number, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    checked = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not isinstance(checked.get("role"), str) or not checked["role"]:
        raise Refused(f"{place}.role: expected a text, received {short(checked.get('role'))}")
    checked["content"] = _content(checked.get("content"), f"{place}.content")
    if "tool_calls" in checked:
        calls = checked["tool_calls"]
        if checked["role"] != "assistant" or not isinstance(calls, list):
            raise Refused(f"{place}.tool_calls: expected a list, of a message with the role assistant")
        checked["tool_calls"] = [_call(call, f"{place}.tool_calls.{number}") for number, call in enumerate(calls)]
    return checked


def _content(content: Any, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{place}: expected a text or a list of parts of type text, received {short(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{place}: expected parts of type text, received one of type {short(kind)}, which these models do "
                          "not read")  # fmt: skip
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
        raise Refused(f"{place}: expected a function with name and arguments, both texts, received {short(call)}")
    return {**call, "function": {"name": function["name"], "arguments": function["arguments"]}}
