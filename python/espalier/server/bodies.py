# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: bounded, unpacked, and read as what they should be."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pydantic
import zstandard
from starlette.requests import Request

from . import requests
from .errors import Refused
from .wire import SMALL_BYTES

BODY_BYTES = 64 << 20        # of a request in protobuf, after decompression
JSON_BYTES = 16 << 20        # of one in JSON, which takes many times its length while it is read
SAMPLE_BODY_BYTES = 8 << 20  # of one that samples, likewise: there are more of them
ZSTD_WINDOW = 1 << 27
_ZSTD_STEP = 1 << 10   # 256 blocks of 128 KiB at most come out of so many bytes
_PARSE_RATIO = 128     # memory that reading JSON may take, such as [[],[],...], over its length
_PARSE_UNCHECKED = 1 << 16

Body = TypeVar("Body", bound=requests.Request)
Result = TypeVar("Result")


async def read_body(request: Request, limit: int | None = None) -> bytes:
    """The body, decompressed. Raises Refused where it is longer than the limit (None: JSON_BYTES) before or after that, or not
    whole."""
    limit = JSON_BYTES if limit is None else limit
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refused(f"expected a body of at most {limit} bytes, received more", 413)
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise Refused(f"content-encoding: expected zstd or none, received {encoding[:100]!r}", 415)
    return _decompressed(body, limit)


def _decompressed(body: bytes, limit: int) -> bytes:
    """Of one whole frame. Raises Refused."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
    parts, size, taken = [], 0, 0
    while taken < len(body) and not unpacker.eof:
        try:
            parts.append(unpacker.decompress(body[taken : taken + _ZSTD_STEP]))
        except zstandard.ZstdError as error:
            raise Refused(f"expected a body in zstd, received something else: {error}") from None
        taken += _ZSTD_STEP
        size += len(parts[-1])
        if size > limit:
            raise Refused(f"expected a body of at most {limit} bytes after decompression, received more", 413)
    if not unpacker.eof:
        raise Refused("expected a body of one whole frame of zstd, received one that was cut")
    if unpacker.unused_data or taken < len(body):
        raise Refused("expected a body of one frame of zstd, received more after its end")
    return b"".join(parts)


async def read_json(request: Request, kind: type[Body]) -> Body:
    """The body as a request of this kind. Raises Refused."""
    return parsed(await read_body(request), kind)


def parsed(body: bytes, kind: type[Body]) -> Body:
    """A body in JSON as a request of this kind. Raises Refused, and MemoryError as `check_memory`."""
    check_memory(body)
    try:
        return kind.model_validate_json(body or b"{}")
    except pydantic.ValidationError as error:
        raise refusal_of(error) from None


def check_memory(body: bytes) -> None:
    """Raises MemoryError before a parser of JSON would, which ends the process where it runs out of memory."""
    if len(body) > _PARSE_UNCHECKED:
        bytes(_PARSE_RATIO * len(body))  # asks for address space, and touches none of it


def refusal_of(error: pydantic.ValidationError) -> Refused:
    """What a client is told of its first field that is wrong."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"])) or "body"
    return Refused(f"{place[:200]}: {first['msg'][:500]}")


async def apart(body: bytes, work: Callable[[bytes], Result]) -> Result:
    """What is made of a body; of a large one beside the event loop, so that other requests are answered meanwhile."""
    return work(body) if len(body) <= SMALL_BYTES else await asyncio.to_thread(work, body)
