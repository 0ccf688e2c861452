# SPDX-License-Identifier: Apache-2.0
"""The trainer of the command line, called from Python."""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, python_names
from .native_engine import CHECK_COMMAND, native
from .options import EngineConfig, LoraConfig, ObjectiveConfig, SamplingParams
from .options_base import Options
from .rows.files import Trajectories, read, trajectories
from .rows.sequences import Packed, Row, is_packed, token_sequences

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Option: TypeAlias = bool | int | float | str | os.PathLike[str] | Sequence[str] | None
Data: TypeAlias = Trajectories | Packed | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Row | str | os.PathLike[str]]
Loss: TypeAlias = "Callable[[list[Tensor], list[Tensor]], Tensor | tuple[Tensor, Mapping[str, float]]]"

_LISTS = ("lora_targets",)  # options that may be lists of texts

# Options that mean something beside a loss that the caller computes.
_BESIDE_A_FUNCTION = ("shared_targets", "router_aux_loss_coef", "router_z_loss_coef")


class Engine:
    """A model in training: what `espalier train` does, one call at a time.

    Options are given as dataclasses or as keyword arguments, the flags of `espalier train` by their names with underscores;
    a keyword argument counts more than a dataclass. `Engine.options()` lists them with defaults and meanings.

    Rows are dicts with the fields of docs/data-format.md (lists or NumPy arrays), lists or arrays of token ids, one dict
    of columns as `espalier.trajectories` takes it, a file, a list of files and patterns, or Trajectories. Columns and what
    `espalier.read` gives are used as they are, a packed file mapped and without copies: make or read Trajectories once,
    then choose rows by `indices`.

    The same rows give the same bits as `espalier train`. The GIL is released while the engine works. One engine does one
    thing at a time: a call during another raises. Ctrl-C stops it after the micro-batch that runs. As after any other
    exception, a forward_backward that was begun leaves no gradients, also none of calls before it, and the engine can be
    used further. On a GPU, kernels are checked when it is first met, by processes of their own; a kernel that fails is not
    used, and a line on stderr says so.

    Args:
        path: A Hugging Face folder, or a checkpoint of `espalier train` or of `save`, of which the weights are taken.
        config: Precision, optimiser, plan and device.
        lora: An adapter that is trained in place of the weights.
        objective: The loss of `forward_backward` calls that name none. Default: "sft".
        process_group: Ranks that train together, as torchrun starts them: torch.distributed.group.WORLD, for example. All make
            the same calls with the same rows. `forward_backward` computes this rank's share of the rows and adds gradients up,
            so that loss, metrics and gradients are those of one process. `logprobs` and `sample` are divided, and all ranks get
            all results. `save` writes one checkpoint, by rank 0. Default: none.
        **options: Any field of `config` and `lora`, such as `learning_rate=1e-5`, in place of theirs.

    Raises:
        InputError: An option, the folder or the device cannot be used. Methods raise it for rows and folders, and where loss
            or gradients are not finite.

    Examples:
        >>> import espalier, tempfile, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> folder = tempfile.mkdtemp()
        >>> transformers.LlamaForCausalLM(config).save_pretrained(folder)
        >>> engine = espalier.Engine(folder, config=espalier.EngineConfig(learning_rate=1e-2))
        >>> engine
        <espalier.Engine: float32 model of 97 tokens, 0 steps done>
        >>> rows = [[11, 12, 13, 14], [11, 12, 13, 15, 16], {"input_ids": [11, 12, 17], "loss_mask": [0, 0, 1]}]
        >>> losses = []
        >>> for step in range(3):
        ...     losses.append(engine.forward_backward(rows)["loss"])
        ...     update = engine.optim_step()
        >>> losses[0] > losses[1] > losses[2]
        True
        >>> list(update), engine.step
        (['step', 'grad_norm', 'learning_rate'], 3)
    """

    def __init__(self, path: str | os.PathLike[str], *, config: EngineConfig | None = None, lora: LoraConfig | None = None,
                 objective: ObjectiveConfig | None = None, process_group: "ProcessGroup | None" = None,
                 **options: Option) -> None:  # fmt: skip
        chosen = {**_given("config", config, EngineConfig), **_given("lora", lora, LoraConfig), **options}
        if lora is not None and chosen.get("lora_rank") is None and chosen.get("adapter") is None:
            raise InputError("lora: expected a LoraConfig with lora_rank or adapter, received one with neither")
        if CHECK_COMMAND is None and chosen.get("device", "cpu") != "cpu":
            warnings.warn("kernels are not checked on this GPU, since sys.executable names no Python to do it with",
                          stacklevel=2)  # fmt: skip
        _given("objective", objective, ObjectiveConfig)
        self._objective = ObjectiveConfig() if objective is None else objective
        self._path = os.fspath(path)
        group = "" if process_group is None else process_group.group_name
        if group:
            from .distributed.watch import watch_ranks

            watch_ranks()
        self._engine = native.Engine(self._path, _named(chosen), group)
        self._samplings = 0  # calls of sample

    @staticmethod
    def options() -> dict[str, tuple[str, str]]:
        """The options of an Engine: name -> (default, meaning), as `espalier train --help` has them.

        Returns:
            A dict by name, with underscores. `EngineConfig` and `LoraConfig` have the same options with types.

        Examples:
            >>> import espalier
            >>> espalier.Engine.options()["max_grad_norm"]
            ('1', 'Clip the global gradient norm (0: off)')
        """
        return _told(native.engine_options())

    @staticmethod
    def objective_options() -> dict[str, tuple[str, str]]:
        """The options of objectives: name -> (default, meaning), likewise.

        Returns:
            A dict by name, with underscores. `ObjectiveConfig` has the same options with types.

        Examples:
            >>> import espalier
            >>> espalier.Engine.objective_options()["shared_targets"][0]
            'sum'
        """
        return _told(native.objective_options())

    def forward_backward(self, rows: Data, objective: "str | ObjectiveConfig | Loss | None" = None, *,
                         indices: Iterable[int] | None = None, progress: Callable[[int, int], object] | None = None,
                         **options: Option) -> dict[str, float]:  # fmt: skip
        """Adds the gradients of an objective of the rows to those that there are.

        Gradients of calls add up until `optim_step`, as those of several `loss.backward()` do. Each call's loss has its
        own normaliser, so that of several calls is their sum: to spread one step over several calls, give all of them
        normalize=N, N being the sum of the loss weights in all of their rows.

        A function as `objective` is called once, as function(logprobs, positions), with two lists that have a tensor for
        each row, in order: logprobs[r] float64 [n], of the n tokens of row r that carry loss, each given all tokens before
        it (never of the first one), and positions[r] int64 [n], where they stand in the row. It returns the loss, a tensor
        with one element, or (loss, metrics), metrics being a dict of numbers. Autograd finds its gradient in the
        log-probabilities; those of parameters follow. Tensors are on the CPU. Weights and normalisers take no part, and of
        the options only shared_targets and those of routers are allowed.

        Args:
            rows: Rows in any form that the class names.
            objective: A name, such as "sft" or "grpo", an ObjectiveConfig, or a function that computes the loss. Default:
                the engine's. docs/objectives.md has the formulas and their sources.
            indices: The rows to train on, by their numbers. Default: all. Groups are those of all rows.
            progress: Called as progress(done, total) after each micro-batch.
            **options: Any field of ObjectiveConfig, such as `clip_low=0.2`, in place of that of `objective`.

        Returns:
            The metrics of the call by name, as in metrics.jsonl: loss, flat_tokens, tree_tokens, encoded_tokens,
            loss_terms, seconds, what the objective counts, and grad_norm, the norm of all gradients so far, before
            clipping.

        Raises:
            InputError: Rows, indices or options cannot be used, the function returns no loss, or loss or gradients are not
                finite.

        Examples:
            >>> import torch
            >>> rows = [[11, 12, 13, 14], {"input_ids": [11, 12, 17], "loss_mask": [0, 0, 1]}]
            >>> metrics = engine.forward_backward(rows)
            >>> metrics["flat_tokens"], metrics["tree_tokens"], metrics["loss_terms"]
            (7, 5, 4)
            >>> def loss(logprobs, positions):
            ...     print([len(row) for row in logprobs], [row.tolist() for row in positions])
            ...     return -torch.cat(logprobs).mean()
            >>> own = engine.forward_backward(rows, loss)
            [3, 1] [[1, 2, 3], [2]]
            >>> abs(own["loss"] - metrics["loss"]) < 1e-12
            True
        """
        objective = self._objective if objective is None else objective
        with self._with_other_ranks():
            found = _rows(rows, self._engine.vocab_size)
            chosen = None if indices is None else [_whole(index) for index in indices]
            named: Mapping[str, Any] = {}
            if not callable(objective):
                named = objective.given() if isinstance(objective, ObjectiveConfig) else {"objective": objective}
            elif refused := [name for name in options if name not in _BESIDE_A_FUNCTION]:
                raise InputError(f"{refused[0]}: expected no such option beside a function, which computes the loss itself; "
                                 f"received {options[refused[0]]!r}")  # fmt: skip
            given = _named({**named, **options})
        if not callable(objective):
            return dict(self._engine.forward_backward(found, chosen, given, progress))
        function = _Function(objective)
        metrics = dict(self._engine.forward_backward_custom(found, chosen, given, function, progress))
        return {**metrics, **function.metrics}

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Clips the gradients to max_grad_norm, updates the weights, and clears the gradients.

        Args:
            learning_rate: Of this step. Default: the engine's. A schedule is the caller's.

        Returns:
            A dict: step, the number of steps done; grad_norm, of the gradients before clipping; learning_rate.

        Raises:
            InputError: There are no gradients, or the update would not be finite. Weights and gradients stay as they were.

        Examples:
            >>> metrics = engine.forward_backward([[11, 12, 13, 14]])
            >>> engine.optim_step(learning_rate=5e-3)["learning_rate"]
            0.005
        """
        return dict(self._engine.optim_step(learning_rate))

    def logprobs(self, rows: Data, *, progress: Callable[[int, int], object] | None = None) -> list[NDArray[np.floating[Any]]]:
        """Log-probabilities of all tokens of the rows, each prefix computed once.

        Args:
            rows: Rows in any form that the class names.
            progress: Called as progress(done, total) after each micro-batch.

        Returns:
            A list with an array [n] for each row of n tokens, float32 (float64 for float64 models), natural logarithms:
            entry t is that of token t given all before it, and entry 0 is 0. That is what rows have as `logprobs` and
            `ref_logprobs`.

        Raises:
            InputError: Rows cannot be used, or a log-probability is not finite.

        Examples:
            >>> [row.shape for row in engine.logprobs([[11, 12, 13, 14], [11, 12, 17]])]
            [(4,), (3,)]
        """
        with self._with_other_ranks():
            found = _rows(rows, self._engine.vocab_size)
        values = self._engine.logprobs(found, progress)
        if self._engine.dtype != "float64":
            values = values.astype(np.float32)
        return np.split(values, np.asarray(found.offsets)[1:-1])

    def sample(self, prompts: Data, params: SamplingParams | None = None, *, samples: int | None = None,
               max_new_tokens: int | None = None, temperature: float | None = None, top_k: int | None = None,
               top_p: float | None = None, stop_ids: Iterable[int] | None = None, seed: int | None = None,
               whole_rows: bool | None = None, batch_size: int | None = None, token_budget: int | None = None,
               progress: Callable[[int, int], object] | None = None) -> list[dict[str, Any]]:  # fmt: skip
        """Completions of prompts, sampled with the weights as they are: what `espalier sample` does.

        Tokens that prompts share are encoded once in each call, and all completions read their keys and values in place.
        Gradients stay as they are. Equal weights, prompts and arguments give equal bits.

        Args:
            prompts: Rows in any form that the class names. A row's prompt is its tokens before the first one with loss; the
                whole row where it is a list of token ids, or has no loss, or has loss from its first token on.
            params: All of the following at once, but for `progress`. An argument that is given counts more.
            samples: Completions of each prompt: a group. Default: 1.
            max_new_tokens: Tokens of each completion at most, its stop token included. Default: 256.
            temperature: Divides the logits; 0 takes the most likely token always. Default: 1.
            top_k: Choose among so many most likely tokens; 0: among all. Default: 0.
            top_p: Choose among the fewest most likely tokens, of those that top_k leaves, whose probabilities sum up to
                this. Default: 1.
            stop_ids: Token ids that end a completion, which keeps them. Default: eos_token_id of the model's
                generation_config.json or config.json; []: none, so that all have max_new_tokens tokens.
            seed: Of the random numbers, a whole number from 0. Default: the number of calls of `sample` so far. Each
                completion has numbers of its own, by the number of its prompt and its own.
            whole_rows: Go on from whole rows, which keep their loss and log-probabilities: from a conversation with sampled
                turns, after a tool's result. Default: False.
            batch_size: Completions that are sampled together, at most. Default: 64.
            token_budget: Prompt tokens whose keys and values are kept at a time, at most; a single prompt may have more.
                Default: 32768.
            progress: Called as progress(finished, completions) after each token.

        Returns:
            A list of rows, by prompt, then by sample: dicts with input_ids, loss_mask (1 on the completion), logprobs
            (log softmax(logits / temperature) over the whole vocabulary, 0 on the prompt), trajectory_id "NAME/sample-K"
            and group_id, that of the prompt's row or else NAME, the row's trajectory_id or number. With a reward (or an
            advantage) they are rows for `forward_backward`, which computes log-probabilities at temperature 1.

        Raises:
            InputError: Prompts or options cannot be used, or the model's folder names no usable stop ids.

        Examples:
            >>> import espalier
            >>> params = espalier.SamplingParams(samples=4, max_new_tokens=5, stop_ids=[])
            >>> rows = engine.sample([[11, 12, 13], [11, 12]], params)
            >>> len(rows), rows[5]["trajectory_id"], rows[5]["group_id"], rows[5]["loss_mask"].tolist()
            (8, '1/sample-1', '1', [0, 0, 1, 1, 1, 1, 1])
            >>> for row in rows:
            ...     row["reward"] = float(row["input_ids"][-1] % 2)
            >>> abs(engine.forward_backward(rows, "grpo")["ratio_mean"] - 1) < 1e-5
            True
        """
        own = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
               "top_p": top_p, "stop_ids": stop_ids, "seed": seed, "whole_rows": whole_rows, "batch_size": batch_size,
               "token_budget": token_budget}  # fmt: skip
        with self._with_other_ranks():
            found = _rows(prompts, self._engine.vocab_size)
            options = {"seed": self._samplings, **_given("params", params, SamplingParams),
                       **{name: value for name, value in own.items() if value is not None}}  # fmt: skip
            given_ids = options.pop("stop_ids", None)
            ends = [("stop-id", str(_whole(id, "stop_ids", "token ids"))) for id in (() if given_ids is None else given_ids)]
            if given_ids is not None and not ends:
                options["ignore_stop_ids"] = True
            named = _named(options) + ends
        rows = self._engine.sample(found, named, progress)
        self._samplings += 1
        return [rows[number] for number in range(len(rows))]

    def gradients(self) -> dict[str, NDArray[np.floating[Any]]]:
        """Copies of the gradients so far, before clipping.

        Returns:
            A dict by the names of the parameters: float32 (float64 for float64 models), of the parameters' shapes. Empty
            where there are none.

        Examples:
            >>> metrics = engine.forward_backward([[11, 12, 13, 14]])
            >>> engine.gradients()["model.norm.weight"].shape
            (32,)
        """
        return self._engine.gradients()

    def zero_gradients(self) -> None:
        """Forgets the gradients so far.

        Examples:
            >>> engine.zero_gradients()
            >>> engine.gradients()
            {}
        """
        self._engine.zero_gradients()

    def save(self, folder: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Writes a checkpoint as `espalier train` does.

        It is a model that Transformers and `--model` open, or where an adapter is trained a folder of PEFT; with the
        optimiser's state and checksums. The folder appears when it is whole. Gradients are not part of it.

        Args:
            folder: Does not exist yet.
            dtype: Of the saved weights, "float32", "float64" or "bfloat16". Default: that in which they are trained. `load`
                restores the exact weights in any case.

        Raises:
            InputError: The folder exists or cannot be written, or weights are not finite.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = os.path.join(tempfile.mkdtemp(), "first")
            >>> engine.save(checkpoint)
            >>> sorted(os.listdir(checkpoint))[0]
            'config.json'
        """
        self._engine.save(os.fspath(folder), dtype or "")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Weights and optimiser as they were when a checkpoint was written, by `save` or by `espalier train`, bit for bit.

        Gradients are cleared. Learning rate and other options stay the engine's.

        Args:
            folder: The checkpoint.

        Raises:
            InputError: The checkpoint is damaged, or of another model, dtype, optimiser or adapter; nothing is changed then.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = os.path.join(tempfile.mkdtemp(), "first")
            >>> engine.save(checkpoint)
            >>> engine.load(checkpoint)
        """
        for note in self._engine.load(os.fspath(folder)):
            warnings.warn(note, stacklevel=2)

    @property
    def step(self) -> int:
        """Optimiser steps done, those of a loaded checkpoint included."""
        return self._engine.step

    @property
    def learning_rate(self) -> float:
        """Of steps that are given none."""
        return self._engine.learning_rate

    @contextlib.contextmanager
    def _with_other_ranks(self) -> Iterator[None]:
        """What comes before a call that all ranks make: an error of one is raised on all."""
        try:
            yield
        except Exception as error:
            self._engine.fail(f"{type(error).__name__}: {error}")
            raise

    def __repr__(self) -> str:
        engine = self._engine
        return f"<espalier.Engine: {engine.dtype} model of {engine.vocab_size} tokens, {engine.step} steps done>"


class _Function:
    """A loss of the caller as the engine calls it, in arrays; keeps its metrics."""

    def __init__(self, function: "Loss") -> None:
        self._function = function
        self.metrics: dict[str, float] = {}

    def __call__(self, offsets: NDArray[np.int64], positions: NDArray[np.int64],
                 logprobs: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:  # fmt: skip
        import torch

        sizes = np.diff(offsets).tolist()
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.from_numpy(logprobs).requires_grad_()
            loss = self._function(list(leaf.split(sizes)), list(torch.from_numpy(positions).split(sizes)))
            metrics: Mapping[str, float] = {}
            if isinstance(loss, tuple) and len(loss) == 2:
                loss, metrics = loss
            loss = _checked_loss(loss)
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            raise InputError("objective: expected a loss that depends on the log-probabilities, received one that "
                             "does not")  # fmt: skip
        self.metrics = {name: float(value) for name, value in metrics.items()}
        return loss.item(), np.ascontiguousarray(gradient.numpy())


def _checked_loss(loss: object) -> "Tensor":
    import torch

    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what = "one that does not require a gradient"
        raise InputError("objective: expected the function to return a tensor with one element that depends on the "
                         f"log-probabilities, or a pair of it and a dict of metrics; received {what}")  # fmt: skip
    return loss


def _rows(rows: Any, vocab_size: int) -> Trajectories:
    if isinstance(rows, Trajectories):
        return rows
    if isinstance(rows, str | os.PathLike):
        return read(rows, vocab_size=vocab_size)
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return read(rows, vocab_size=vocab_size)
    if is_packed(rows):
        return trajectories(dict(zip(("offsets", "input_ids"), token_sequences(rows))))
    return trajectories(rows)


def _told(description: str) -> dict[str, tuple[Any, str]]:
    """Defaults and meanings by name, of a description of options as JSON."""
    return {each["name"].replace("-", "_"): (each["default"], python_names(each["help"])) for each in json.loads(description)}


def _given(name: str, options: Options | None, kind: type[Options]) -> dict[str, Any]:
    """Those that are not at their defaults."""
    if options is not None and not isinstance(options, kind):
        raise InputError(f"{name}: expected {kind.__name__}, received {type(options).__name__}")
    return {} if options is None else options.given()


def _named(options: Mapping[str, Option]) -> list[tuple[str, str]]:
    """Options as pairs of a flag's name and its text; those that are None are left out."""
    return [(name.replace("_", "-"), _text(name, value)) for name, value in options.items() if value is not None]


def _text(name: str, value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating):
        return repr(float(value))
    if isinstance(value, int | str | os.PathLike | np.integer):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if name in _LISTS and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    raise InputError(f"{name}: expected a number, a text or a boolean, received {type(value).__name__}")


def _whole(value: Any, name: str = "indices", kind: str = "numbers of rows") -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name}: expected {kind}, received {value!r}")
    return int(value.__index__())
