# SPDX-License-Identifier: Apache-2.0
"""The trainer of the command line, called from Python."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .native_engine import CHECK_COMMAND, native
from .rows.files import Trajectories, read, trajectories
from .rows.sequences import Packed, Row, is_packed, token_sequences

if TYPE_CHECKING:
    from torch import Tensor

Option: TypeAlias = bool | int | float | str | os.PathLike[str] | None
Data: TypeAlias = Trajectories | Packed | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Row | str | os.PathLike[str]]
Loss: TypeAlias = "Callable[[list[Tensor], list[Tensor]], Tensor | tuple[Tensor, Mapping[str, float]]]"

# Options that mean something beside a loss that the caller computes.
_BESIDE_A_FUNCTION = ("shared_targets", "router_aux_loss_coef", "router_z_loss_coef")


class Engine:
    """A model in training: what `espalier train` does, one call at a time.

        engine = espalier.Engine("MODEL", learning_rate=1e-5, memory_budget="16GiB")
        for batch in batches:
            metrics = engine.forward_backward(batch, "grpo", clip_high=0.28)
            engine.optim_step()
        engine.save("RUN/last")

    path     a Hugging Face folder, or a checkpoint of `espalier train` or of `save`, of which the weights are taken
    options  the flags of `espalier train` by their names, with underscores:
               dtype                   "float32", "float64" or "bfloat16" (with float32 master weights and sums)
               optimizer, learning_rate, weight_decay, max_grad_norm, beta1, beta2, eps
               strategy, token_budget, memory_budget, checkpoint_activations, offload_context, cost_model
               freeze_pad_embedding    whether the input embedding of pad_token_id has no gradient, as in Transformers
               device, deterministic   "cpu", "cuda", "cuda:N" or "auto"
               threads                 CPU threads of the whole process, those of PyTorch as well
             `espalier.Engine.options()` gives them with their defaults and meanings.

    Rows are dicts with the fields of docs/data-format.md (lists or NumPy arrays), lists or arrays of token ids, one
    dict of columns as `espalier.trajectories` takes it, a file, a list of files and patterns, or Trajectories. Columns
    and what `espalier.read` gives are used as they are, a packed file mapped and without copies: make or read
    Trajectories once, then choose rows by `indices`.

    On a GPU, kernels are checked when it is first met, as commands do, by processes of their own; what is wrong there
    is not used, and a line on stderr says so.

    The same rows give the same bits as `espalier train`. The GIL is released while the engine works. One engine does
    one thing at a time: a call during another raises. Ctrl-C stops it after the micro-batch that runs; as after any
    other exception, a forward_backward that was begun leaves no gradients, also none of calls before it, and the
    engine can be used further. Raises InputError for options, rows and folders that cannot be used, and where loss or
    gradients are not finite.

    >>> import espalier, tempfile, transformers
    >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                                   num_attention_heads=4, num_key_value_heads=2)
    >>> folder = tempfile.mkdtemp()
    >>> transformers.LlamaForCausalLM(config).save_pretrained(folder)
    >>> engine = espalier.Engine(folder, learning_rate=1e-2)
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

    def __init__(self, path: str | os.PathLike[str], **options: Option) -> None:
        if CHECK_COMMAND is None and options.get("device", "cpu") != "cpu":
            warnings.warn("kernels are not checked on this GPU, since sys.executable names no Python to do it with; Hopper's "
                          "attention is used only where ESPALIER_ATTENTION names it", stacklevel=2)  # fmt: skip
        self._path = os.fspath(path)
        self._engine = native.Engine(self._path, _named(options))
        self._samplings = 0  # calls of sample

    @staticmethod
    def options() -> dict[str, tuple[str, str]]:
        """The options of an Engine: name -> (default, meaning), as `espalier train --help` has them.

        >>> import espalier
        >>> espalier.Engine.options()["max_grad_norm"]
        ('1', 'Clip the global gradient norm (0: off)')
        """
        return _told(native.engine_options())

    @staticmethod
    def objective_options() -> dict[str, tuple[str, str]]:
        """The options of objectives: name -> (default, meaning), likewise.

        >>> import espalier
        >>> espalier.Engine.objective_options()["shared_targets"][0]
        'sum'
        """
        return _told(native.objective_options())

    def forward_backward(self, rows: Data, objective: "str | Loss" = "sft", *, indices: Iterable[int] | None = None,
                         progress: Callable[[int, int], object] | None = None,
                         **options: Option) -> dict[str, float]:  # fmt: skip
        """Adds the gradients of an objective of the rows to those that there are.

        objective  a name, such as "sft" or "grpo", or a function that computes the loss (below)
        indices    the rows to train on, by their numbers; default: all. Groups are those of all rows.
        progress   called as progress(done, total) after each micro-batch
        options    of the objective, by the names of the flags: shared_targets, normalize, clip_low, ...
                   `espalier.Engine.objective_options()` gives them with their defaults and meanings.

        Gradients of calls add up until `optim_step`, as those of several `loss.backward()` do. Each call's loss has its
        own normaliser, so that of several calls is their sum: to spread one step over several calls, give all of them
        normalize=N, N being the sum of the loss weights in all of their rows.

        Returns the metrics of the call, a dict of numbers as in metrics.jsonl: loss, flat_tokens, tree_tokens,
        encoded_tokens, loss_terms, seconds, what the objective counts, and grad_norm, the norm of all gradients so far,
        before clipping.

        A function is called once, as function(logprobs, positions), with two lists that have a tensor for each row, in
        order: logprobs[r] float64 [n], of the n tokens of row r that carry loss, each given all tokens before it (never
        of the first one), and positions[r] int64 [n], where they stand in the row. It returns the loss, a tensor with
        one element, or (loss, metrics), metrics being a dict of numbers. Autograd finds its gradient in the
        log-probabilities; those of parameters follow. Tensors are on the CPU. Weights and normalisers take no part,
        and of the options shared_targets and those of routers alone are allowed.

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
        found = _rows(rows, self._engine.vocab_size)
        chosen = None if indices is None else [_whole(index) for index in indices]
        if not callable(objective):
            return dict(self._engine.forward_backward(found, chosen, _named({"objective": objective, **options}),
                                                      progress))  # fmt: skip
        for name in options:
            if name not in _BESIDE_A_FUNCTION:
                raise InputError(f"{name}: expected no such option beside a function, which computes the loss itself; "
                                 f"received {options[name]!r}")  # fmt: skip
        function = _Function(objective)
        metrics = dict(self._engine.forward_backward_custom(found, chosen, _named(options), function, progress))
        return {**metrics, **function.metrics}

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Clips the gradients to max_grad_norm, updates the weights, and clears the gradients.

        learning_rate  of this step; default: the engine's. A schedule is the caller's.

        Returns a dict: step, the number of steps done; grad_norm, of the gradients before clipping; learning_rate.
        Raises InputError where there are no gradients, and where the update would not be finite; weights and gradients
        are as before then.
        """
        return dict(self._engine.optim_step(learning_rate))

    def logprobs(self, rows: Data, *, progress: Callable[[int, int], object] | None = None) -> list[NDArray[np.floating[Any]]]:
        """Log-probabilities of all tokens of the rows, each prefix computed once.

        Returns a list with an array [n] for each row of n tokens, float32 (float64 for float64 models): entry t is that
        of token t given all before it, and entry 0 is 0. That is what rows have as `logprobs` and `ref_logprobs`.

        >>> [row.shape for row in engine.logprobs([[11, 12, 13, 14], [11, 12, 17]])]
        [(4,), (3,)]
        """
        found = _rows(rows, self._engine.vocab_size)
        values = self._engine.logprobs(found, progress)
        if self._engine.dtype != "float64":
            values = values.astype(np.float32)
        return np.split(values, np.asarray(found.offsets)[1:-1])

    def sample(self, prompts: Data, *, samples: int = 1, max_new_tokens: int = 256, temperature: float = 1.0, top_k: int = 0,
               top_p: float = 1.0, stop_ids: Iterable[int] | None = None, seed: int | None = None,
               whole_rows: bool = False, batch_size: int = 64, token_budget: int = 32768,
               progress: Callable[[int, int], object] | None = None) -> list[dict[str, Any]]:  # fmt: skip
        """Completions of prompts, sampled with the weights as they are: what `espalier sample` does.

        prompts         rows in any form. A row's prompt is its tokens before the first one with loss; the whole row where
                        it is a list of token ids, or has no loss, or has loss from its first token on
        samples         completions of each prompt: a group
        max_new_tokens  of each completion, its stop token included
        temperature     divides the logits; 0 takes the most likely token always
        top_k, top_p    choose among the so many most likely tokens (0: all), and of these among the fewest whose
                        probabilities sum up to this
        stop_ids        token ids that end a completion, which keeps them; default: eos_token_id of the model's
                        generation_config.json or config.json; []: none, so that all have max_new_tokens tokens
        seed            of the random numbers, a whole number from 0; default: the number of calls of `sample` so far.
                        Each completion has numbers of its own, by the number of its prompt and its own.
        whole_rows      goes on from whole rows, which keep their loss and log-probabilities: from a conversation with
                        sampled turns, after a tool's result
        batch_size      completions that are sampled together, at most
        token_budget    prompt tokens whose keys and values are kept at a time, at most; a single prompt may have more
        progress        called as progress(finished, completions) after each token

        Tokens that prompts share are encoded once in each call, and all completions read their keys and values in place.

        Returns a list of rows, by prompt, then by sample: dicts with input_ids, loss_mask (1 on the completion), logprobs
        (log softmax(logits / temperature) over the whole vocabulary, 0 on the prompt), trajectory_id "NAME/sample-K" and
        group_id, that of the prompt's row or else NAME, the row's trajectory_id or number. With a reward (or an
        advantage) they are rows for `forward_backward`, which computes log-probabilities at temperature 1. Gradients
        stay as they are. Equal weights, prompts and arguments give equal bits.

        >>> rows = engine.sample([[11, 12, 13], [11, 12]], samples=4, max_new_tokens=5, stop_ids=[])
        >>> len(rows), rows[5]["trajectory_id"], rows[5]["group_id"], rows[5]["loss_mask"].tolist()
        (8, '1/sample-1', '1', [0, 0, 1, 1, 1, 1, 1])
        >>> for row in rows:
        ...     row["reward"] = float(row["input_ids"][-1] % 2)
        >>> abs(engine.forward_backward(rows, "grpo")["ratio_mean"] - 1) < 1e-9
        True
        """
        found = _rows(prompts, self._engine.vocab_size)
        options = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
                   "top_p": top_p, "seed": self._samplings if seed is None else seed, "whole_rows": whole_rows,
                   "batch_size": batch_size, "token_budget": token_budget}  # fmt: skip
        ends = [] if stop_ids is None else [("stop-id", str(_whole(id, "stop_ids", "token ids"))) for id in stop_ids]
        if stop_ids is not None and not ends:
            options["ignore_stop_ids"] = True
        rows = self._engine.sample(found, _named(options) + ends, progress)
        self._samplings += 1
        return [rows[number] for number in range(len(rows))]

    def gradients(self) -> dict[str, NDArray[np.floating[Any]]]:
        """Copies of the gradients so far, before clipping, by the names of the parameters: float32 (float64 for float64
        models), of the parameters' shapes. Empty where there are none."""
        return self._engine.gradients()

    def zero_gradients(self) -> None:
        """Forgets the gradients so far."""
        self._engine.zero_gradients()

    def save(self, folder: str | os.PathLike[str], *, dtype: str | None = None) -> None:
        """Writes a checkpoint as `espalier train` does, in a folder that does not exist yet: a model that Transformers
        and `--model` open, with the optimiser's state and checksums. The folder appears when it is whole. Gradients
        are not part of it.

        dtype  of the saved weights; default: the engine's. `load` restores the exact weights in any case.
        """
        self._engine.save(os.fspath(folder), dtype or "")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Weights and optimiser as they were when a checkpoint was written, by `save` or by `espalier train`, bit for
        bit. Gradients are cleared. Raises InputError, before anything is changed, for a damaged checkpoint, and for one
        of another model, dtype or optimiser. Learning rate and other options stay the engine's."""
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
    return {each["name"].replace("-", "_"): (each["default"], each["help"]) for each in json.loads(description)}


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
    raise InputError(f"{name}: expected a number, a text or a boolean, received {type(value).__name__}")


def _whole(value: Any, name: str = "indices", kind: str = "numbers of rows") -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{name}: expected {kind}, received {value!r}")
    return int(value.__index__())
