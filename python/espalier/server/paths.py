# SPDX-License-Identifier: Apache-2.0
"""Names of training runs and checkpoints, as clients send them and as folders have them."""

import re
from dataclasses import dataclass

from .errors import Refused

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def is_run(text: str) -> bool:
    """Whether it may be the id of a training run."""
    return _RUN.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether it may be the name of a checkpoint."""
    return _NAME.fullmatch(text) is not None


def folder_name(run: str) -> str:
    """The name of the folder of a run."""
    return run.replace(":", ".")


def run_of_folder(name: str) -> str | None:
    """The run whose folder has this name; None for the folder of something else."""
    run = name.replace(".", ":")
    return run if is_run(run) else None


@dataclass(frozen=True)
class CheckpointPath:
    """tinker://run/kind/name."""

    run: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Reads a path from a client. Raises Refused."""
        run, *rest = path.removeprefix("tinker://").split("/", 1) if path.startswith("tinker://") else (path,)
        if not rest or not is_run(run):
            raise Refused(f"path: expected tinker://RUN/{'|'.join(KINDS)}/NAME, received {path[:200]!r}")
        return cls.of(run, rest[0])

    @classmethod
    def of(cls, run: str, checkpoint_id: str) -> "CheckpointPath":
        """checkpoint_id: KIND/NAME. Raises Refused."""
        kind, _, name = checkpoint_id.partition("/")
        if not is_run(run) or kind not in KINDS or not is_name(name):
            raise Refused(f"checkpoint: expected {'|'.join(KINDS)}/NAME, NAME of letters, digits, `.`, `_` and `-`, received "
                          f"{checkpoint_id[:200]!r}")  # fmt: skip
        return cls(run, kind, name)

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.checkpoint_id}"
