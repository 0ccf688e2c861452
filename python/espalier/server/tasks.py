# SPDX-License-Identifier: Apache-2.0
"""Work beside the answers to requests, on the event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_tasks: set[asyncio.Task[Any]] = set()


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Runs a coroutine beside; the loop itself would forget it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task
