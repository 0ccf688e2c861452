# SPDX-License-Identifier: Apache-2.0
"""The address on which the server listens."""

import errno
import ipaddress
import socket

from ..errors import InputError, UsageError


def listen(host: str, port: int, *, has_key: bool) -> socket.socket:
    """A socket that listens there. Raises InputError where it cannot, UsageError where others than this machine could use the
    server without a key."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise InputError(f"--host: expected an address or a name of this machine, received {host!r}") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise UsageError(f"--host {host}: others than this machine could use the server without a key; set one with "
                         "ESPALIER_API_KEY or --api-key")  # fmt: skip
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"--host: expected an address or a name of this machine, received {host!r}") from None
        raise InputError(f"--port: expected a free port of {host}, received {port}, which cannot be used: "
                         f"{error.strerror}") from None  # fmt: skip


def url_of(listener: socket.socket) -> str:
    """As clients on this machine write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
