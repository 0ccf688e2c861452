# SPDX-License-Identifier: Apache-2.0
"""When a patched model runs as Transformers has it."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import torch

_keys = itertools.count()
_lock = threading.Lock()
_of_thread = threading.local()  # .keys: those of the Rests that are on in this thread


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # layers are handed a forest or none, by which compiled ones are told apart
def _is_on_here(key: int) -> bool:
    return key in getattr(_of_thread, "keys", ())


class Rest:
    """Whether a patched backbone runs as it would unpatched: in one thread, as generation does beside training in
    another, or in all threads, as where backward computes layers again in threads of autograd. A copy is off."""

    def __init__(self) -> None:
        self._key = next(_keys)
        self._count = 0
        self._is_on_anywhere = self._is_on_everywhere = False
        self.is_lasting = False  # batches run unshared, and so do backward passes that compute layers again

    def is_on(self) -> bool:
        return self.is_lasting or self.is_entered()

    def is_entered(self) -> bool:
        """Whether this thread is inside of `here` or `everywhere`."""
        return self._is_on_anywhere and (self._is_on_everywhere or _is_on_here(self._key))

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, it is on in this thread."""
        before: frozenset[int] = getattr(_of_thread, "keys", frozenset())
        with self._counted():
            _of_thread.keys = before | {self._key}
            try:
                yield
            finally:
                _of_thread.keys = before

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Inside, it is on in all threads."""
        with self._counted():
            self._is_on_everywhere = True
            try:
                yield
            finally:
                self._is_on_everywhere = False

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with _lock:
            self._count += 1
            self._is_on_anywhere = True
        try:
            yield
        finally:
            with _lock:
                self._count -= 1
                self._is_on_anywhere = self._count > 0

    def __reduce__(self) -> "tuple[Callable[[], Rest], tuple[()]]":
        return Rest, ()
