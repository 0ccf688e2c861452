# SPDX-License-Identifier: Apache-2.0
"""Who may come in: which hosts are asked for, pages of which origin ask, and with which key."""

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..commands.console import clipped, printable
from ..errors import in_one_line
from .errors import Refused
from .openai_errors import error_response
from .signing import Signer

logger = logging.getLogger("uvicorn.error")
INCOMING_BYTES = 1 << 30  # of bodies that come at the same time
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@]+)(:[0-9]{1,5})?")
_OF_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")  # which any page may send
_OPEN_PATH = "/api/v1/healthz"
UPLOADS_PATH = "/api/v1/uploads/"  # whose bodies go to disk as they come


@dataclass(frozen=True)
class Door:
    """An application of ASGI, the key that opens it ("": none is needed), the signer of its URLs that need no key, and whether a
    request has a secret of the application in its URL, in place of a key."""

    api_key: str
    app: ASGIApp
    signer: Signer
    has_secret: Callable[[Scope], bool] = lambda scope: False


class Access:
    """An application of ASGI that hands a request over to the one whose key it has, and refuses others.

    doors: one for each key, or a single one that needs none; what is no request goes to the first. hosts: names that a request
    may give as its Host, beside addresses in digits and `localhost`. A page in a browser reaches this machine under a name of its
    own, or says where it is from; official clients do neither.
    """

    def __init__(self, doors: Sequence[Door], hosts: Iterable[str]) -> None:
        self._doors = [(_digest(door.api_key), door) for door in doors]
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._incoming = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._doors[0][1].app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            _check_origin(headers)
            door = self._door(scope, headers)
        except Refused as error:
            await error_response(scope["path"], str(error), error.status)(scope, receive, send)
            return
        await self._hand_over(door.app, scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        text = headers.get("host", "")
        match = _HOST.fullmatch(text)
        name = match[1].lower().rstrip(".") if match else ""
        if name not in self._hosts and not _is_address(name.strip("[]")):
            raise Refused(f"Host: expected an address in digits, localhost or a name of --allow-host, received {text[:100]!r}",
                          421)  # fmt: skip

    def _door(self, scope: Scope, headers: Headers) -> Door:
        """Which one a request opens. All keys are compared, whichever fits. Raises Refused."""
        first = self._doors[0][1]
        if not first.api_key or scope["path"] == _OPEN_PATH:
            return first
        for _, door in self._doors:
            if door.signer.has_signed(scope) or door.has_secret(scope):
                return door
        key = _digest(headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer "))
        opened = [door for digest, door in self._doors if hmac.compare_digest(digest, key)]
        if not opened:
            raise Refused("expected an API key of this server (TINKER_API_KEY, header X-API-Key)", 401)
        return opened[0]

    async def _hand_over(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts what has come of its body until the request is answered."""
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            size = len(message.get("body", b""))
            if self._incoming + size > INCOMING_BYTES and self._incoming > count:
                raise Refused(f"expected at most {INCOMING_BYTES} bytes of requests at the same time, received more", 429)
            count += size
            self._incoming += size
            return message

        try:
            await app(scope, receive if scope["path"].startswith(UPLOADS_PATH) else counted, send)
        except Exception as error:  # of the answer itself: a file that vanishes while it is read
            logger.error("%s %s: %s", scope["method"], clipped(printable(scope["path"])), printable(in_one_line(error)))
        finally:
            self._incoming -= count


def _check_origin(headers: Headers) -> None:
    """Refuses what a page of another origin sends. Raises Refused."""
    host = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        if not re.fullmatch(rf"https?://{re.escape(host)}", origin.lower()):
            raise Refused(f"Origin: expected no page of another origin, received {origin[:100]!r}", 403)
    for site in headers.getlist("sec-fetch-site"):
        if site not in ("none", "same-origin"):
            raise Refused(f"Sec-Fetch-Site: expected none or same-origin, received {site[:100]!r}", 403)
    for kind in headers.getlist("content-type"):
        if kind.partition(";")[0].strip().lower() in _OF_FORMS:
            raise Refused(f"Content-Type: expected application/json or application/x-protobuf, received {kind[:100]!r}", 415)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    """Of an API key: compared in constant time, whatever its length."""
    return hashlib.sha256(key.encode()).digest()
