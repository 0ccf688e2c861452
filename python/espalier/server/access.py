# SPDX-License-Identifier: Apache-2.0
"""Who may come in: which hosts are asked for, pages of which origin ask, and with which key."""

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..commands.console import clipped, printable
from ..errors import in_one_line
from .errors import Refused
from .signing import Signer

logger = logging.getLogger("uvicorn.error")
INCOMING_BYTES = 1 << 30  # of bodies that come at the same time
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@]+)(:[0-9]{1,5})?")
_OF_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")  # which any page may send
_OPEN_PATH = "/api/v1/healthz"


class Access:
    """An application of ASGI that hands those requests over to another one that may come in, and refuses the rest.

    api_key: that clients have to send; "": none. hosts: names that a request may give as its Host, beside addresses in digits and
    `localhost`. A page in a browser reaches this machine under a name of its own, or says where it is from; official clients do
    neither. signer: of URLs that need no key.
    """

    def __init__(self, app: ASGIApp, api_key: str, hosts: Iterable[str], signer: Signer) -> None:
        self._app = app
        self._key = _digest(api_key) if api_key else b""
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._signer = signer
        self._incoming = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            _check_origin(headers)
            self._check_key(scope, headers)
        except Refused as error:
            await JSONResponse({"detail": str(error)}, error.status)(scope, receive, send)
            return
        await self._hand_over(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        text = headers.get("host", "")
        match = _HOST.fullmatch(text)
        name = match[1].lower().rstrip(".") if match else ""
        if name not in self._hosts and not _is_address(name.strip("[]")):
            raise Refused(f"Host: expected an address in digits, localhost or a name of --allow-host, received {text[:100]!r}",
                          421)  # fmt: skip

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._key or scope["path"] == _OPEN_PATH or self._signer.has_signed(scope):
            return
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(self._key, _digest(key)):
            raise Refused("expected the API key of this server (TINKER_API_KEY, header X-API-Key)", 401)

    async def _hand_over(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await self._app(scope, counted, send)
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
