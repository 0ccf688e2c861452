# SPDX-License-Identifier: Apache-2.0
"""Requests to a vLLM server."""

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

ALIVE_SECONDS = 10
LOAD_SECONDS = 600
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)
"""What a request raises, or an answer that is not of the expected form."""


class Server:
    """A vLLM server at `url`. VLLM_API_KEY is sent if it is set."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> bytes:
        return self._answer(urllib.request.Request(self._url + path, None, self._headers), ALIVE_SECONDS)

    def post(self, path: str, body: dict[str, Any] | None = None, seconds: float = LOAD_SECONDS) -> None:
        self._answer(urllib.request.Request(self._url + path, json.dumps(body or {}).encode(), self._headers), seconds)

    def post_if_it_can(self, path: str) -> None:
        """For what follows a failure, which is the one to report."""
        with contextlib.suppress(*FAILURES):
            self.post(path, seconds=ALIVE_SECONDS)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Requests of the server rest, and go on afterwards, also after a failure."""
        try:
            self.post("/pause?mode=keep")
            yield
        except BaseException:
            self.post_if_it_can("/resume")
            raise
        self.post("/resume")

    @staticmethod
    def _answer(request: urllib.request.Request, seconds: float) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode(errors="replace").split())
            path = request.selector.partition("?")[0]
            raise OSError(f"{path}: {error.code} {error.reason}: {said[:300]}") from None
