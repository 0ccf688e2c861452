# SPDX-License-Identifier: Apache-2.0
"""What a server knows of its clients: sessions, their samplers, and the log-probabilities of what was sampled."""

import asyncio
import collections
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import sampling, training
from .futures import PENDING_REQUESTS
from .worker import Weights, Worker

RECORD_SECONDS = 86400.0   # that sampled sequences are remembered for stable_reinforce
RECORDED_BYTES = 1 << 29   # of all of them; the oldest go first

new_client = itertools.count().__next__  # the number of a client, unique in this process


@dataclass
class Session:
    """A client."""

    session_id: str
    display_name: str | None
    number: int = field(default_factory=new_client)
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, training.Model] = field(default_factory=dict)
    samplers: dict[str, "Sampler"] = field(default_factory=dict)  # the last used one last


class Completions:
    """What `retrieve_futures` tells one client of a sampler, in order. What it has seen is forgotten."""

    def __init__(self, count: int = 0, kept: Iterable[dict[str, Any]] = ()) -> None:
        self._kept: collections.deque[dict[str, Any]] = collections.deque(kept, maxlen=PENDING_REQUESTS)
        self.count = count

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
    model: training.Model | None = None  # of an inflight one: whose newest weights it samples
    clients: int = 0
    completions: dict[int, Completions] = field(default_factory=dict)  # by client
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def drop(self) -> None:
        """Lets go what it owns, on the thread of its worker."""
        if self.owned is not None:
            self.worker.drop(self.owned)


class Records:
    """Log-probabilities of sampled sequences, by their ids, as they were when they were sampled; those of a request as one array.
    Used by several threads."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, _Record] = collections.OrderedDict()  # by request
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, request_id: str, logprobs: list[NDArray[np.floating[Any]]]) -> None:
        """Of all sequences of a request."""
        ends = np.cumsum([len(each) for each in logprobs], dtype=np.int64)
        record = _Record(np.concatenate(logprobs).astype(np.float32), ends)
        with self._lock:
            self._kept[request_id] = record
            self._bytes += record.nbytes
            oldest = time.monotonic() - RECORD_SECONDS
            while self._kept:
                first = next(iter(self._kept))
                if self._kept[first].used >= oldest and self._bytes <= RECORDED_BYTES:
                    return
                self._bytes -= self._kept.pop(first).nbytes

    def newest(self, prefix: str, limit: int) -> list[tuple[str, NDArray[np.float32], NDArray[np.int64]]]:
        """Of requests whose ids begin with a text, the oldest first: id, log-probabilities and ends of the sequences; as many of
        the newest ones as have at most so many bytes."""
        found: list[tuple[str, NDArray[np.float32], NDArray[np.int64]]] = []
        with self._lock:
            for request_id, record in reversed(self._kept.items()):
                if request_id.startswith(prefix):
                    limit -= record.nbytes
                    if limit < 0:
                        break
                    found.append((request_id, record.logprobs, record.ends))
        return found[::-1]

    def get(self, sequence_id: str) -> NDArray[np.float32] | None:
        """None where there is none. Training on a sequence keeps those of its request for another day."""
        request_id, _, text = sequence_id.rpartition(":")
        with self._lock:
            record = self._kept.get(request_id)
            number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
            if record is None or not 0 <= number < len(record.ends):
                return None
            self._kept.move_to_end(request_id)
            record.used = time.monotonic()
        return record.logprobs[record.ends[number - 1] if number else 0 : record.ends[number]]


@dataclass
class _Record:
    logprobs: NDArray[np.float32]
    ends: NDArray[np.int64]  # of each sequence
    used: float = field(default_factory=time.monotonic)

    @property
    def nbytes(self) -> int:
        return self.logprobs.nbytes + self.ends.nbytes + 1024
