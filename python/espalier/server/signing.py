# SPDX-License-Identifier: Apache-2.0
"""URLs of single files that need no key, for a time."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qs, quote, urlencode

from starlette.types import Scope

SECONDS = 3600  # within which a download has to begin


class Signer:
    """Signs paths with a secret of its own: what another one signed, such as one before a restart, is not valid. clock: seconds
    since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock

    def query(self, path: str) -> tuple[str, int]:
        """What makes a URL of this path valid without a key, and until when."""
        expires = int(self._clock()) + SECONDS
        return urlencode({"expires": expires, "signature": self._signature(path, str(expires))}), expires

    def has_signed(self, scope: Scope) -> bool:
        """Whether a request reads exactly what was signed, in time."""
        if scope["method"] not in ("GET", "HEAD"):
            return False
        try:
            fields = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=10)
        except ValueError:
            return False
        expires, signature = (fields.get(name, [""])[0] for name in ("expires", "signature"))
        if not (expires.isascii() and expires.isdigit() and len(expires) < 20 and int(expires) >= self._clock()):
            return False
        return hmac.compare_digest(self._signature(scope["path"], expires).encode(), signature.encode("utf-8", "replace"))

    def _signature(self, path: str, expires: str) -> str:
        text = f"{expires}\n{quote(path)}"
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
