# SPDX-License-Identifier: Apache-2.0
"""A look at all chats before the first is converted, where the rendering of all depends on what some have."""

from ..errors import BadRow
from ..io.sources import records_of_files


def has_content_beside_calls(files, most_bytes, name):
    """Whether a message of some file has both tool calls and content. `name`: of the command, for its progress."""
    records = records_of_files(files, most_bytes, name, lambda: "read, looking for content beside tool calls")
    return any(_has_both(record) for _, _, record in records if not isinstance(record, BadRow))


def _has_both(value):
    """Looks at all depths: chats of all formats have calls and contents in one object."""
    if isinstance(value, list):
        return any(map(_has_both, value))
    if not isinstance(value, dict):
        return False
    calls = value.get("tool_calls") or value.get("function_call")
    if calls and any(_says_something(value.get(name)) for name in ("content", "value", "message")):
        return True
    return any(_has_both(item) for item in value.values() if isinstance(item, (list, dict)))


def _says_something(content):
    return bool(content.strip()) if isinstance(content, str) else bool(content)
