# SPDX-License-Identifier: Apache-2.0
"""Protobuf bodies that are read: counted first, because a body of a few MiB may have millions of empty messages."""

from typing import Any

from google.protobuf.message import DecodeError

from . import schema
from .errors import Refused

MAX_FIELDS = 1 << 18   # of a body, those of messages inside of it included
SMALL_BYTES = 1 << 16  # a body that has no more is read at once

_Fields = dict[int, Any]  # by number: those of a message, None for anything else


def forward_backward_request(body: bytes) -> Any:
    """Raises Refused."""
    if len(body) > SMALL_BYTES and _count(body, _REQUEST) > MAX_FIELDS:
        raise Refused(f"expected at most {MAX_FIELDS} fields in a ForwardBackwardRequest, received more")
    try:
        return schema.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise Refused("expected a ForwardBackwardRequest in protobuf (SDK 0.38), received something else") from None


def _fields(descriptor: Any) -> _Fields:
    return {field.number: _fields(field.message_type) if field.message_type else None for field in descriptor.fields}


_REQUEST = _fields(schema.ForwardBackwardRequest.DESCRIPTOR)
_TENSOR = _REQUEST[3][2][2]  # data, loss_fn_inputs, value
_SHAPE = 4                   # packed numbers


def _count(body: bytes, fields: _Fields) -> int:
    """Fields of a message, until they are too many. What is no protobuf is left to the parser."""
    count, parts = 0, [(0, len(body), fields)]
    while parts and count <= MAX_FIELDS:
        place, end, known = parts.pop()
        while place < end and count <= MAX_FIELDS:
            tag, place = _varint(body, place, end)
            count += 1
            kind = tag & 7
            if kind == 0:
                _, place = _varint(body, place, end)
            elif kind in (1, 5):
                place += 8 if kind == 1 else 4
            elif kind == 2:
                size, place = _varint(body, place, end)
                inner = known.get(tag >> 3) if known else None
                if inner:
                    parts.append((place, min(end, place + size), inner))
                elif known is _TENSOR and tag >> 3 == _SHAPE:
                    count += size
                place += size
            else:
                break
    return count


def _varint(body: bytes, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end and shift < 64:
        byte = body[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    return value, end
