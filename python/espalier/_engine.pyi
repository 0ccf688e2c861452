"""The trainer of Espalier for Python, on LibTorch."""

from collections.abc import Sequence
import os
from typing import Annotated

import numpy
from numpy.typing import NDArray

import espalier._core


class Engine:
    """
    What espalier.Engine is made of. Options are pairs of a flag's name and its text. All work is done without the GIL.
    """

    def __init__(self, model: str | os.PathLike, options: Sequence[tuple[str, str]], process_group: str) -> None:
        """Loads the model. process_group: its name; "": none."""

    def forward_backward(self, rows: espalier._core.Trajectories, indices: Sequence[int] | None, objective: Sequence[tuple[str, str]], progress: object | None) -> list[tuple[str, int | float]]:
        """The metrics, by name."""

    def forward_backward_custom(self, rows: espalier._core.Trajectories, indices: Sequence[int] | None, options: Sequence[tuple[str, str]], function: object, progress: object | None) -> list[tuple[str, int | float]]:
        """
        The same with a loss of
        function(offsets int64 [R + 1], positions int64 [M], logprobs float64 [M]) -> (loss, gradient float64 [M]).
        """

    def optim_step(self, learning_rate: float | None) -> list[tuple[str, int | float]]:
        """The metrics, by name."""

    def fail(self, message: str) -> None:
        """
        In place of a call that this rank cannot make: the other ranks, which make it, raise the message.
        """

    def logprobs(self, rows: espalier._core.Trajectories, progress: object | None) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """
        float64 [N]: of every token given all before it in its row; 0 for first tokens.
        """

    def sample(self, rows: espalier._core.Trajectories, options: Sequence[tuple[str, str]], progress: object | None) -> espalier._core.Trajectories:
        """Completions of the rows' prompts as rows."""

    def gradients(self) -> dict:
        """Copies of the gradients, by the names of the parameters."""

    def zero_gradients(self) -> None:
        """Forgets all gradients."""

    def save(self, folder: str | os.PathLike, dtype: str) -> None:
        """Writes a checkpoint."""

    def load(self, folder: str | os.PathLike) -> list[str]:
        """Loads a checkpoint. Returns notes about oddities of its folder."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""

    @property
    def dtype(self) -> str:
        """Of the model."""

    @property
    def learning_rate(self) -> float:
        """Of steps that are given none."""

def check_kernels_by(command: Sequence[str]) -> None:
    """
    Engines on a GPU check its kernels first, by processes of `command` FAMILY DEVICE FILE, which call check_kernels.
    """

def check_kernels(family: str, device: str, finding: str | os.PathLike) -> None:
    """
    Checks one family of kernels in this process and writes what it finds into the file.
    """

def prove_kernels(index: int) -> bool:
    """
    Does so for the CUDA device of this index, once. Returns whether attention in bfloat16 is more than the masked form there.
    """

def run_on_rank(arguments: Sequence[str], process_group: str, version: str) -> int:
    """
    Runs `espalier train` or `espalier rerun`, with its name first, as a rank of a process group, by its name. Returns the exit status. version: the text of --version.
    """

def fail_ranks(message: str) -> None:
    """
    Ends what waits for other ranks, or will, with an error of this message.
    """

def waits_for_ranks() -> bool:
    """Whether this process waits for other ranks."""

def engine_options() -> str:
    """Options of an Engine, as JSON."""

def objective_options() -> str:
    """Options of objectives, as JSON."""

def sampling_options() -> str:
    """Options of sampling, as JSON."""
