# SPDX-License-Identifier: Apache-2.0
"""The search of checkpoints."""

from collections.abc import Iterable
from typing import Any

from . import requests
from .errors import Refused


def search(checkpoints: Iterable[dict[str, Any]], request: requests.SearchCheckpoints) -> dict[str, Any]:
    """One page of the checkpoints that a request names, the newest first. checkpoints: as the store has them. Raises Refused."""
    if request.project_ids is not None:
        raise Refused("project_ids: expected none, as this server has no projects")
    if request.owner.type == "user":
        raise Refused("owner: expected own or accessible, as this server has no users, received user")
    place = None if request.cursor is None else (request.cursor.last_created_at, request.cursor.last_checkpoint_uuid)
    found = sorted((each for each in checkpoints if _is_wanted(each, request) and (place is None or _place(each) < place)),
                   key=_place, reverse=True)  # fmt: skip
    page = found[: request.limit]
    if len(page) == len(found):
        return {"checkpoints": page, "next_cursor": None}
    time, path = _place(page[-1])
    return {"checkpoints": page, "next_cursor": {"last_created_at": time, "last_checkpoint_uuid": path}}


def _place(checkpoint: dict[str, Any]) -> tuple[str, str]:
    """Its place in the list."""
    return checkpoint["time"], checkpoint["tinker_path"]


def _is_wanted(checkpoint: dict[str, Any], request: requests.SearchCheckpoints) -> bool:
    metadata = checkpoint.get("user_metadata") or {}
    return ((request.checkpoint_type is None or checkpoint["checkpoint_type"] == request.checkpoint_type)
            and (request.base_models is None or checkpoint["base_model"] in request.base_models)
            and all(metadata.get(name) == value for name, value in request.user_metadata.items()))  # fmt: skip
