# SPDX-License-Identifier: Apache-2.0
"""Texts and tokens of a model: its tokenizer and chat template, and the text of tokens that come one by one."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..chats.template import ChatTemplate
from ..commands.console import clipped
from ..commands.model import load_tokenizer
from ..errors import InputError, RenderError, is_failure
from .errors import Refused

REPLACEMENT = "\ufffd"  # what tokenizers write for bytes that are no whole character
OPEN_TOKENS = 64        # that may wait for the rest of a character


class ModelTexts:
    """The tokenizer and the chat template of a folder. Methods may take long: they are for threads beside the event loop."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder

    @cached_property
    def _found(self) -> Any:
        """The tokenizer; None where the folder has none."""
        try:
            tokenizer = load_tokenizer(self._folder)
        except InputError:
            return None
        # Without files Transformers makes one that knows nothing.
        return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() else None

    @property
    def tokenizer(self) -> Any:
        """Loaded once. Raises Refused where the folder has none."""
        if (found := self._found) is None:
            raise Refused(f"model: {self._name} has no tokenizer in its folder; send token ids, to /v1/completions or with the "
                          "Tinker client")  # fmt: skip
        return found

    def stop_tokenizer(self) -> Any:
        """As `tokenizer`, for a request with stop strings. Raises InputError."""
        if (found := self._found) is None:
            raise InputError(f"stop: stop strings need a tokenizer, and the folder of {self._name} has none; use ids of tokens")
        return found

    @cached_property
    def _template(self) -> ChatTemplate:
        try:
            return ChatTemplate(self.tokenizer)
        except ValueError as error:
            raise Refused(f"model: the chat template of {self._name} cannot be used: {error}; send prompts to /v1/completions"
                          ) from None  # fmt: skip

    def prompt_tokens(self, text: str) -> list[int]:
        """A text as the tokenizer encodes it, with the special tokens that it adds."""
        return self._encoded(text, add_special_tokens=True)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None,
                    variables: Mapping[str, Any]) -> list[int]:  # fmt: skip
        """A conversation up to the beginning of the next answer, as the chat template writes it. Raises Refused."""
        template = self._template
        if tools and not template.renders_tools:
            raise Refused(f"tools: the chat template of {self._name} does not write them; describe them in a message")
        try:
            # What stands behind the last answer is not adapted, so an answer follows for the moment.
            adapted = template.adapt([*messages, {"role": "assistant", "content": "."}], lambda kind: None)[:-1]
            text = self.tokenizer.apply_chat_template(adapted, tools=tools, add_generation_prompt=True, tokenize=False,
                                                      **variables)  # fmt: skip
        except RenderError as error:
            raise Refused(f"messages: {error}") from None
        except Exception as error:  # a template is a program and may raise anything
            raise Refused(f"messages: the chat template of {self._name} refuses them: {clipped(str(error))}") from None
        return self._encoded(text, add_special_tokens=False)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except BaseException as error:
            if not is_failure(error):
                raise
            raise Refused(f"expected a text that the tokenizer of {self._name} encodes: {clipped(str(error))}") from None

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Special tokens as they are written."""
        return str(self.tokenizer.decode([token]))

    @property
    def end_ids(self) -> list[int]:
        """The token that ends a text, if there is one."""
        end = self.tokenizer.eos_token_id
        return [] if end is None else [int(end)]


class TextStream:
    """The text of tokens that come one by one, cut on whole characters and without stop strings.

    text: of some tokens. A tokenizer may write a token otherwise behind others, so tokens that were sent last are decoded again
    with the new ones.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._text = text
        self._cut = StopCut(stop)
        self._tokens: list[int] = []  # those sent last, then those whose characters may be open
        self._sent_tokens = 0
        self._sent = 0  # characters

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._cut.is_stopped

    def add(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The text that is whole now and was not before. is_last: no tokens follow."""
        self._tokens += tokens
        text = self._text(self._tokens)
        is_whole = is_last or len(self._tokens) > OPEN_TOKENS or not text.endswith(REPLACEMENT)
        whole = text if is_whole else text.rstrip(REPLACEMENT)
        new, self._sent = whole[self._sent :], max(self._sent, len(whole))
        if is_whole:
            del self._tokens[: self._sent_tokens]
            self._sent_tokens, self._sent = len(self._tokens), len(self._text(self._tokens))
        return self._cut.add(new, is_last=is_last)


class StopCut:
    """Ends a text before the first of some strings. What may be the beginning of one waits for what follows."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._waiting = ""
        self.is_stopped = False

    def add(self, text: str, *, is_last: bool = False) -> str:
        """What is known now to stand before all of the strings. is_last: no text follows."""
        if self.is_stopped:
            return ""
        text = self._waiting + text
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        open_ = 0 if is_last else max((self._begun(text, stop) for stop in self._stop), default=0)
        self._waiting = text[len(text) - open_ :]
        return text[: len(text) - open_]

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """How many characters at the end of a text begin the string."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
