# SPDX-License-Identifier: Apache-2.0
"""Text of trajectories made safe for a page."""

import html as entities
import re
from collections.abc import Iterable

from .messages import Message

NAME_BYTES = 120  # of a trajectory's name that the page shows

# Characters that control the text around them and are not themselves visible, but for line feeds and tabs. Joiners stay:
# scripts and emoji need them. (base/printable.cpp has the same for terminals.)
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u115f\u1160\u3164\uffa0\u200b\u200e\u200f\u2028-\u202e"
                     "\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]")  # fmt: skip


def _escaped(found: re.Match[str]) -> str:
    point = ord(found[0])
    if point == ord("\r"):
        return "\\r"
    return f"\\x{point:02X}" if point < 0x80 else f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def visible(text: str) -> str:
    """`text` with invisible and control characters escaped. Line feeds and tabs stay."""
    return _UNSEEN.sub(_escaped, text)


def html(text: str) -> str:
    """visible(text), safe as text and as an attribute's value in HTML."""
    return entities.escape(visible(text))


def cut(text: str, most: int) -> str:
    """At most `most` bytes of whole characters, with an ellipsis if it was cut."""
    encoded = text.encode()
    return text if len(encoded) <= most else encoded[:most].decode(errors="ignore") + "…"


def messages_html(messages: Iterable[Message]) -> str:
    """Messages in their roles' colours, each labelled with its role where it begins."""
    page = ""
    for message in messages:
        label = f'<b class="role">{message.role}</b> ' if message.begins and message.role != "unknown" else ""
        end = '<span class="end" title="end of the message">∎</span>' if message.ends else ""
        page += f'<span class="message {message.role}">{label}{html(message.text)}{end}</span>'
    return page
