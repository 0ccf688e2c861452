# SPDX-License-Identifier: Apache-2.0
"""Answers in the form of the OpenAI API."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import openai_requests
from .texts import REPLACEMENT, ModelTexts


@dataclass
class Choice:
    """One finished answer."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    is_stopped: bool


class Answer:
    """How an answer is written. kind: "text_completion" or "chat.completion"."""

    def __init__(self, asked: openai_requests.Generate, kind: str) -> None:
        self.asked = asked
        self._kind = kind
        self._is_chat = kind == "chat.completion"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @property
    def is_sent_by_token(self) -> bool:
        """Whether the tokens of a stream are sent as they come. Log-probabilities are known once an answer is whole."""
        return self.asked.stream and self.asked.top is None

    def head(self, model: str, *, is_chunk: bool = False) -> dict[str, Any]:
        """What all parts of the answer have."""
        kind = self._kind + (".chunk" if is_chunk and self._is_chat else "")
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def choice(self, choice: Choice, text: str, is_cut: bool, texts: ModelTexts) -> dict[str, Any]:
        """One answer in one piece."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        return self._last(choice, content, is_cut, texts)

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """Which begins an answer in a stream, if anything does."""
        if not self._is_chat:
            return None
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, text: str) -> dict[str, Any]:
        """More text of an answer."""
        content = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def last_chunk(self, choice: Choice, text: str, is_cut: bool, texts: ModelTexts) -> dict[str, Any]:
        """The rest of an answer."""
        content: dict[str, Any] = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return self._last(choice, content, is_cut, texts)

    def _last(self, choice: Choice, content: dict[str, Any], is_cut: bool, texts: ModelTexts) -> dict[str, Any]:
        logprobs = None if self.asked.top is None else (_chat_logprobs if self._is_chat else _logprobs)(choice, texts)
        return {"index": choice.index, **content, "logprobs": logprobs,
                "finish_reason": "stop" if choice.is_stopped or is_cut else "length"}  # fmt: skip


def tops_of(message: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities by position, the most likely ones first."""
    ids = np.frombuffer(message.token_ids, "<i4").reshape(-1, max(message.k, 1)).tolist()
    values = np.frombuffer(message.logprobs, "<f4").reshape(-1, max(message.k, 1)).tolist()
    return [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]


def _chat_logprobs(choice: Choice, texts: ModelTexts) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}

    tops = choice.tops or [[] for _ in choice.tokens]
    content = [{**entry(token, logprob), "top_logprobs": [entry(*each) for each in top]}
               for token, logprob, top in zip(choice.tokens, choice.logprobs, tops, strict=True)]  # fmt: skip
    return {"content": content, "refusal": None}


def _logprobs(choice: Choice, texts: ModelTexts) -> dict[str, Any]:
    tokens = [texts.token_text(token) for token in choice.tokens]
    offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
    tops = [{texts.token_text(token): logprob for token, logprob in top} for top in choice.tops] if choice.tops else None
    return {"tokens": tokens, "token_logprobs": choice.logprobs, "top_logprobs": tops, "text_offset": offsets}
