# SPDX-License-Identifier: Apache-2.0
"""Requests to a server of samples."""

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from .kinds import SGLANG, VLLM, Kind

ALIVE_SECONDS = 10
LOAD_SECONDS = 600
WAIT_SECONDS = 10
"""For how long a call is tried again by default."""
ANSWER_BYTES = 16 << 20
FAILURES = (OSError, http.client.HTTPException, ValueError)
"""What a request raises. Its text is one line."""

_NOT_YET = (502, 503, 504)
_Result = TypeVar("_Result")


class Refused(OSError):
    """The server has answered, and not done what it was asked. `status`: that of HTTP; `answer`: its text, JSON with spaces."""

    def __init__(self, path: str, expected: str, received: str, status: int, answer: str) -> None:
        super().__init__(f"{path}: expected {expected}, received {received}")
        self.status, self.answer = status, answer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another server, and turn a POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


class Server:
    """A server of a kind at `url`. `kind` None: it is asked as a server whose kind, and so whose key, is not known."""

    def __init__(self, url: str, kind: Kind | None, wait: float = WAIT_SECONDS) -> None:
        self._url, self._kind, self._wait = checked_url(url), kind, wait

    @property
    def kind(self) -> Kind:
        assert self._kind is not None
        return self._kind

    def get(self, path: str) -> Any:
        """The JSON that it answers."""
        answer = self._answer(path, None, ALIVE_SECONDS)
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(answer) if answer else None
        raise Refused(path, "JSON", _line(answer), 200, answer)

    def get_alive(self) -> None:
        """Returns once the server answers."""
        self.patiently(lambda: self._answer(self.kind.alive, None, ALIVE_SECONDS))

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float = LOAD_SECONDS) -> None:
        """Raises Refused also where the answer is `{"success": false}`, which vLLM sends with the status 200."""
        answer = self._answer(path, json.dumps(body or {}).encode(), seconds)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(answer) if answer else None
            if isinstance(value, dict) and value.get("success") is False:
                raise Refused(_name(path), '{"success": true}', _line(answer), 200, json.dumps(value))

    def patiently(self, call: Callable[[], _Result]) -> _Result:
        """Calls again, for `wait` seconds, where nobody answers or the server says that it cannot yet."""
        deadline = time.monotonic() + self._wait
        while True:
            try:
                return call()
            except (OSError, http.client.HTTPException) as error:
                if (isinstance(error, Refused) and error.status not in _NOT_YET) or time.monotonic() >= deadline:
                    raise
            time.sleep(min(0.5, self._wait))

    def replace_weights(self, update: Callable[[], None]) -> None:
        """Calls `update` while requests of the server rest, and has it forget prefixes of the old weights. Some may be in use by
        copies to other memory, which end only while requests go on: then they rest again after a while, for `wait` seconds."""
        deadline = time.monotonic() + self._wait
        is_updated = False
        while True:
            try:
                with self._paused():
                    if not is_updated or self.kind.flush is None:
                        update()
                        is_updated = True
                    if self.kind.flush is not None:
                        self.post(*self.kind.flush)
                return
            except Refused as error:
                if not any(words in error.answer for words in self.kind.stale) or time.monotonic() >= deadline:
                    raise
            time.sleep(min(0.5, self._wait))

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Requests of the server rest, and go on afterwards, also after a failure."""
        resume = lambda: self.patiently(lambda: self.post(self.kind.resume, seconds=ALIVE_SECONDS))
        try:
            self.post(*self.kind.pause)
            yield
        except BaseException:
            with contextlib.suppress(*FAILURES):  # the first failure is the one to report
                resume()
            raise
        resume()

    def _answer(self, path: str, body: bytes | None, seconds: float) -> str:
        headers = {"Content-Type": "application/json", **self._key(writes=body is not None)}
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            with _opener.open(request, timeout=seconds) as answer:
                return _read(answer, seconds)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(_name(path), error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise OSError(f"{_name(path)}: expected an answer within {seconds:g} seconds, received none") from None
            raise OSError(f"{_name(path)}: expected an answer, received {_line(str(reason)) or type(error).__name__}") from None

    def _key(self, writes: bool) -> dict[str, str]:
        names = () if self._kind is None else self._kind.write_keys if writes else self._kind.read_keys
        key = next(filter(None, map(os.environ.get, names)), None)
        return {"Authorization": f"Bearer {key}"} if key else {}


def kind_of(url: str, wait: float = WAIT_SECONDS) -> Kind:
    """SGLang describes its model at /model_info, or refuses to without a key; vLLM has no such path. No key is sent."""
    server = Server(url, None, wait)
    try:
        answer = server.patiently(lambda: server.get("/model_info"))
    except Refused as error:
        if error.status in _NOT_YET:
            raise
        return SGLANG if error.status == 401 else VLLM
    return SGLANG if isinstance(answer, dict) and "model_path" in answer else VLLM


def checked_url(url: str) -> str:
    """Without a slash at its end."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("expected a URL such as http://HOST:PORT, without a name, a password or a query")
    return url.rstrip("/")


def _refused(path: str, error: urllib.error.HTTPError) -> Refused:
    status = _line(f"{error.code} {error.reason}")
    if 300 <= error.code < 400:
        there = _line(error.headers.get("Location", ""))
        return Refused(path, "status 200", f"{status} to {there}, which is not followed", error.code, "")
    with contextlib.suppress(OSError, http.client.HTTPException):  # it may end in the middle
        text = error.read(ANSWER_BYTES).decode(errors="replace")
        return Refused(path, "status 200", f"{status}: {_line(text)}", error.code, text)
    return Refused(path, "status 200", status, error.code, "")


def _read(answer: IO[bytes], seconds: float) -> str:
    """All of it, within `seconds` and ANSWER_BYTES."""
    assert isinstance(answer, http.client.HTTPResponse)
    deadline, content = time.monotonic() + seconds, bytearray()
    while part := answer.read1(1 << 16):
        content += part
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(content) > ANSWER_BYTES:
            raise http.client.HTTPException(f"more than {ANSWER_BYTES >> 20} MiB")
    if answer.length:
        raise http.client.HTTPException("a part of it")
    return content.decode(errors="replace")


def _name(path: str) -> str:
    return path.partition("?")[0]


def _line(text: str) -> str:
    """The beginning of a server's words, printable in one line."""
    line = " ".join(text[:2000].split())
    return "".join(character if character.isprintable() else "?" for character in line)[:300]
