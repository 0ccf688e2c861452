# SPDX-License-Identifier: Apache-2.0
"""What a server knows of its clients: sessions, their samplers, and the log-probabilities of what was sampled."""

import asyncio
import collections
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import sampling, training
from .futures import PENDING_REQUESTS
from .worker import Weights, Worker

RECORD_SECONDS = 86400.0   # that sampled sequences are remembered for stable_reinforce
RECORDED_TOKENS = 1 << 27  # of all of them; the oldest go first


@dataclass
class Session:
    """A client."""

    session_id: str
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, training.Model] = field(default_factory=dict)
    samplers: dict[str, "Sampler"] = field(default_factory=dict)  # the last used one last


class Completions:
    """What `retrieve_futures` tells one client of a sampler, in order. What it has seen is forgotten."""

    def __init__(self) -> None:
        self._kept: collections.deque[dict[str, Any]] = collections.deque(maxlen=PENDING_REQUESTS)
        self.count = 0

    def add(self, told: dict[str, Any]) -> None:
        self._kept.append(told)
        self.count += 1

    def since(self, cursor: int) -> list[dict[str, Any]]:
        while self._kept and self.count - len(self._kept) < cursor:
            self._kept.popleft()
        return list(self._kept)


@dataclass
class Sampler:
    """A sampling session: weights that a client samples from."""

    sampler_id: str
    session: Session
    worker: Worker
    weights: sampling.CurrentWeights
    model_path: str | None = None
    owned: Weights | None = None  # go with the sampler
    clients: int = 0
    completions: dict[int, Completions] = field(default_factory=dict)  # by client
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def drop(self) -> None:
        """Lets go what it owns, on the thread of its worker."""
        if self.owned is not None:
            self.worker.drop(self.owned)


class Records:
    """Log-probabilities of sampled sequences, by their ids, as they were when they were sampled."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, tuple[float, Any]] = collections.OrderedDict()
        self._tokens = 0

    def add(self, sequence_id: str, logprobs: Any) -> None:
        self._kept[sequence_id] = (time.monotonic(), np.asarray(logprobs, np.float32))
        self._tokens += len(logprobs)
        oldest = time.monotonic() - RECORD_SECONDS
        while self._kept:
            first = next(iter(self._kept))
            if self._kept[first][0] >= oldest and self._tokens <= RECORDED_TOKENS:
                return
            self._tokens -= len(self._kept.pop(first)[1])

    def get(self, sequence_id: str) -> Any:
        """None where there is none. Training on a sequence keeps it for another day."""
        if sequence_id not in self._kept:
            return None
        self._kept[sequence_id] = (time.monotonic(), self._kept.pop(sequence_id)[1])
        return self._kept[sequence_id][1]
