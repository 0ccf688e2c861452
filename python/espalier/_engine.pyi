"""The trainer of Espalier for Python, on LibTorch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import os

import espalier._core


class Adapter:
    """An adapter of an Engine, or its weights alone."""

    def __init__(self) -> None:
        """The weights alone."""

class Sampling:
    """Prompts that an Engine samples side by side."""

class Engine:
    """
    What espalier.Engine is made of. Options are pairs of a flag's name and its text. All work is done without the GIL.
    """

    def __init__(self, model: str | os.PathLike, options: Sequence[tuple[str, str]], process_group: str, only_adapters: bool) -> None:
        """
        Loads the model. process_group: its name; "": none. only_adapters: weights are never trained.
        """

    def new_adapter(self, options: Sequence[tuple[str, str]]) -> Adapter:
        """An adapter, which is not in use yet."""

    def copy(self, adapter: Adapter) -> Adapter:
        """A copy that is never trained."""

    def use(self, adapter: Adapter) -> None:
        """What all other methods work on."""

    @property
    def adapter(self) -> Adapter:
        """What is in use."""

    def forward_backward(self, rows: espalier._core.Trajectories, indices: Sequence[int] | None, options: Sequence[tuple[str, str]], function: object | None, progress: object | None, adapters: Sequence[Adapter]) -> list[tuple[str, int | float]]:
        """
        The metrics, by name. adapters: by row, or empty: that in use. The loss is an objective of the options, or that of
        function(offsets int64 [R + 1], positions int64 [M], logprobs float64 [M]) -> (loss, gradient float64 [M]).
        """

    def optim_step(self, settings: Sequence[tuple[str, str]]) -> list[tuple[str, int | float]]:
        """The metrics, by name."""

    def fail(self, message: str) -> None:
        """
        In place of a call that this rank cannot make: the other ranks, which make it, raise the message.
        """

    def logprobs(self, rows: espalier._core.Trajectories, top_k: int, temperature: float, entropies: bool, progress: object | None) -> tuple:
        """
        float64 [N]: of every token given all before it in its row; 0 for first tokens. int32 and float64 [N * top_k]: the most likely ones. float64 [N] or empty: entropies. How many tokens were encoded.
        """

    def sample(self, rows: espalier._core.Trajectories, options: Sequence[tuple[str, str]], row_options: Sequence[Sequence[tuple[str, str]]], progress: object | None, watch: object | None) -> espalier._core.Trajectories:
        """
        Completions of the rows' prompts as rows. watch(int64 [B * 3] of row, sample and new token): which ones end.
        """

    def sampling(self, options: Sequence[tuple[str, str]]) -> Sampling:
        """Begins to sample, without prompts."""

    def add(self, sampling: Sampling, first: int, rows: espalier._core.Trajectories, row_options: Sequence[Sequence[tuple[str, str]]], client: int) -> None:
        """
        Whole rows as prompts of the weights in use and of a client, each with its options, numbered from `first` on.
        """

    def remove(self, sampling: Sampling, number: int, client: int) -> int:
        """Ends a prompt. Returns how many of its completions were not done."""

    def sample_on(self, sampling: Sampling, watch: object | None) -> list:
        """
        A token more. Returns (prompt, sample, int32 tokens, float64 logprobs, stopped, kept_tokens, prompt_logprobs, error) of completions that are done. error: (whether it is due to the input, message), or None. watch: as of sample.
        """

    def sampling_counts(self) -> list[tuple[str, int | float]]:
        """Tokens by name, and bytes that are kept."""

    def stop_ids(self) -> list[int]:
        """Of the model's folder."""

    def gradients(self) -> dict:
        """Copies of the gradients, by the names of the parameters."""

    def zero_gradients(self) -> None:
        """Forgets all gradients."""

    def save(self, folder: str | os.PathLike, dtype: str, merged: bool) -> None:
        """Writes a checkpoint, or a model with the adapter in its weights."""

    def load(self, folder: str | os.PathLike, with_optimizer: bool) -> list[str]:
        """Loads a checkpoint. Returns notes about oddities of its folder."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""

def judge_kernels_by(judge: Callable[[int], str]) -> None:
    """
    Engines on a GPU ask this for the verdicts on its kernels, a JSON text, by the index of the device.
    """

def init_model(config: str | os.PathLike, out: str | os.PathLike, seed: int, dtype: str, files: Mapping[str, str], least_tokens: int) -> int:
    """
    Writes a random model with these files, texts by name. Its vocabulary must have least_tokens. Returns how many parameters it has.
    """

class StopRequest:
    """Asks a run to stop after its step."""

    def __init__(self) -> None: ...

    def request(self) -> bool:
        """Returns whether this is the first time."""

    @property
    def step(self) -> int:
        """
        -1: the process may end at once. 0: there is no step to save. Otherwise that which is finished first.
        """

def run_command(name: str, options: Sequence[tuple[str, bytes]], caller: object, stop: StopRequest | None, process_group: str, split_ranks: Callable[[int], str]) -> tuple[int, str]:
    """
    Runs a command with options, pairs of name and text. Returns the exit status and what there is to print, as JSON. process_group: the name of that whose ranks divide the work; "": none. split_ranks: makes groups of so many successive ranks, and gives the name of that of this rank.
    """

def describe_command(name: str) -> str:
    """Its options, as JSON."""

def prepare_process() -> None:
    """
    For a process that runs one command: memory that is freed is kept for later steps.
    """

def listen(line: object | None, progress: object | None, end: object | None) -> None:
    """
    From now on calls line(text), progress(work, fraction, detail) and end() with what the library says of long work, from any thread. None: no longer.
    """

def remove_temporaries() -> None:
    """
    Removes files that are half written. To be called before a signal ends the process.
    """

def guard_files() -> None:
    """
    From now on a mapped file that becomes shorter is an error of the work that reads it, and no longer the end of the process.
    """

def read_data(model: str | os.PathLike, files: Sequence[str | os.PathLike], flags: Sequence[tuple[str, str]]) -> espalier._core.Trajectories:
    """The rows of files and patterns for a model, by the flags of commands."""

def write_file(path: str | os.PathLike, texts: Iterable) -> None:
    """Writes texts to a file, which appears when it is whole."""

def check_file(path: str | os.PathLike) -> None:
    """Raises InputError where write_file could not write."""

def fail_ranks(message: str) -> None:
    """
    Ends what waits for other ranks, or will, with an error of this message.
    """

def waits_for_ranks() -> bool:
    """Whether this process waits for other ranks."""

def truncation_warnings(rows: espalier._core.Trajectories, options: Sequence[tuple[str, str]]) -> list[str]:
    """
    Of rows whose tokens were chosen among fewer than all, for an objective with ratios.
    """

def engine_options() -> str:
    """Options of an Engine, as JSON."""

def objective_options() -> str:
    """Options of objectives, as JSON."""

def sampling_options() -> str:
    """Options of sampling, as JSON."""
