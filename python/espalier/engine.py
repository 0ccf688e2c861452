# SPDX-License-Identifier: Apache-2.0
"""The trainer of the command line, called from Python."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .adapter import Adapter
from .errors import InputError
from .loss_function import Loss, LossFunction
from .native_engine import native
from .native_options import Option, described, given_options, named_texts, whole_number
from .options import EngineConfig, LoraConfig, ObjectiveConfig, SamplingParams
from .rows.files import Trajectories, file_names, read, trajectories
from .rows.sequences import Packed, Row, is_packed, token_sequences
from .sampling_call import Sampling, Watch, options_of_prompts, truncation_text, watched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Data: TypeAlias = Trajectories | Packed | str | os.PathLike[str] | Mapping[str, Any] | Iterable[Row | str | os.PathLike[str]]

# Options that mean something beside a loss that the caller computes.
_BESIDE_A_FUNCTION = ("shared_targets", "router_aux_loss_coef", "router_z_loss_coef")

_COUNTS = ("prompt_tokens", "kept_prompt_tokens", "encoded_prompt_tokens", "sampled_tokens", "prefix_cache_bytes")


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
    used further. On a GPU, kernels are checked when it is first met, by separate processes; a kernel that fails is not
    used, and a line on stderr says so.

    Args:
        path: A Hugging Face folder, or a checkpoint of `espalier train` or of `save`, of which the weights are taken.
        config: Precision, optimiser, plan and device.
        lora: An adapter that is trained in place of the weights.
        adapters: Only adapters are trained, those of `new_adapter`: the weights have neither gradients nor optimiser state.
            True where `lora` makes the first one. Default: False.
        objective: The loss of `forward_backward` calls that name none. Default: "sft".
        process_group: Ranks that train together, as torchrun starts them: torch.distributed.group.WORLD, for example. All make
            the same calls with the same rows. `forward_backward` computes this rank's share of the rows and adds gradients up,
            so that loss, metrics and gradients are those of one process. `logprobs` and `sample` are divided, and all ranks get
            all results. `save` writes one checkpoint together. Each rank has its part of the optimiser's state. Default: none.
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
                 adapters: bool = False, objective: ObjectiveConfig | None = None,
                 process_group: "ProcessGroup | None" = None, **options: Option) -> None:  # fmt: skip
        chosen = {**given_options("config", config, EngineConfig), **given_options("lora", lora, LoraConfig), **options}
        if lora is not None:
            _check_lora(chosen)
        given_options("objective", objective, ObjectiveConfig)
        self._objective = ObjectiveConfig() if objective is None else objective
        self._path = os.fspath(path)
        group = "" if process_group is None else process_group.group_name
        if group:
            from .distributed.watch import watch_ranks

            watch_ranks()
        self._engine = native.Engine(self._path, named_texts(chosen), group, adapters)
        self._adapter = Adapter(self._engine, self._engine.adapter) if _makes_adapter(chosen) else None
        self._options = {**dataclasses.asdict(EngineConfig()), **chosen}
        self._samplings = 0  # calls of sample
        self._has_warned_of_truncation = False

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
        return described(native.engine_options())

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
        return described(native.objective_options())

    def new_adapter(self, lora: LoraConfig | None = None, **options: Option) -> "Adapter":
        """An adapter over the weights, beside others of any rank, scale and maps; `use` puts it to use.

        Its matrices, gradients, optimiser state and number of steps are its own. Its first bits are those of an Engine made
        with this `lora`.

        Args:
            lora: Rank, scale, maps and seed, or a folder with an adapter.
            **options: Any field of `lora`, such as `lora_rank=8`, in place of its value.

        Returns:
            The adapter. It lives as long as the program keeps it.

        Raises:
            InputError: Options or the folder cannot be used.

        Examples:
            >>> import espalier
            >>> first = engine.new_adapter(espalier.LoraConfig(lora_rank=2, lora_targets=["q_proj", "v_proj"]))
            >>> second = engine.new_adapter(lora_rank=4, seed=1)
            >>> for adapter in (first, second, first):
            ...     engine.use(adapter)
            ...     metrics = engine.forward_backward([[11, 12, 13, 14]])
            ...     print(engine.optim_step()["step"])
            1
            1
            2
            >>> engine.use(None)
        """
        chosen = {**given_options("lora", lora, LoraConfig), **options}
        LoraConfig._check_names(chosen)
        _check_lora(chosen)
        return Adapter(self._engine, self._engine.new_adapter(named_texts(chosen)))

    def use(self, adapter: "Adapter | None") -> None:
        """Has all other methods work on an adapter, or on the weights alone, from now on. Costs nothing.

        Gradients of an adapter that is not in use stay.

        Args:
            adapter: One of `new_adapter` of this engine, or a copy of one. None: the weights, which `forward_backward` trains
                unless the engine was made with `adapters` or `lora`.

        Raises:
            InputError: The adapter is another engine's, or the engine is at work.

        Examples:
            >>> adapter = engine.new_adapter(lora_rank=2)
            >>> engine.use(adapter)
            >>> engine.adapter is adapter
            True
            >>> engine.use(None)
        """
        self._engine.use(native.Adapter() if adapter is None else self._own(adapter))
        self._adapter = adapter

    def _own(self, adapter: "Adapter") -> "native.Adapter":
        if not isinstance(adapter, Adapter) or adapter._engine is not self._engine:
            raise InputError(f"adapter: expected one of this engine, received {adapter!r}")
        return adapter._adapter

    @property
    def adapter(self) -> "Adapter | None":
        """The adapter in use."""
        return self._adapter

    def forward_backward(self, rows: Data, objective: "str | ObjectiveConfig | Loss | None" = None, *,
                         indices: Iterable[int] | None = None, progress: Callable[[int, int], object] | None = None,
                         adapters: Sequence["Adapter"] | None = None, **options: Option) -> dict[str, float]:  # fmt: skip
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
            adapters: For each row that with which it is computed and which gets its gradients, in place of the one in use.
                Their products with the weights are one, and rows of different adapters share no prefix. If the call fails,
                none of them has gradients left. Not with a process group.
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
            >>> first, second = (engine.new_adapter(lora_rank=2, seed=seed) for seed in (1, 2))
            >>> metrics = engine.forward_backward([[11, 12, 13], [11, 12, 17]], adapters=[first, second])
            >>> metrics["flat_tokens"], metrics["tree_tokens"]
            (6, 6)
        """
        objective = self._objective if objective is None else objective
        with self._with_other_ranks():
            found = _rows(rows, self._engine.vocab_size)
            chosen = None if indices is None else [whole_number(index) for index in indices]
            named: Mapping[str, Any] = {}
            if not callable(objective):
                named = objective.given() if isinstance(objective, ObjectiveConfig) else {"objective": objective}
            elif refused := [name for name in options if name not in _BESIDE_A_FUNCTION]:
                raise InputError(f"{refused[0]}: expected no such option beside a function, which computes the loss itself; "
                                 f"received {options[refused[0]]!r}")  # fmt: skip
            given = named_texts({**named, **options})
            trained = [self._own(adapter) for adapter in adapters or ()]
        if not callable(objective):
            metrics = dict(self._engine.forward_backward(found, chosen, given, None, progress, trained))
            if not self._has_warned_of_truncation and (text := truncation_text(self._engine, found, given)):
                warnings.warn(text, stacklevel=2)
                self._has_warned_of_truncation = True
            return metrics
        function = LossFunction(objective)
        metrics = dict(self._engine.forward_backward(found, chosen, given, function, progress, trained))
        return {**metrics, **function.metrics}

    def optim_step(self, learning_rate: float | None = None, *, beta1: float | None = None, beta2: float | None = None,
                   eps: float | None = None, weight_decay: float | None = None,
                   max_grad_norm: float | None = None) -> dict[str, float]:  # fmt: skip
        """Clips the gradients to max_grad_norm, updates the weights, and clears the gradients.

        Settings are those of this step alone, and where they are not given the engine's. A schedule is the caller's.

        Args:
            learning_rate: Of this step.
            beta1: adamw: decay of the mean of gradients.
            beta2: adamw: decay of the mean of their squares.
            eps: adamw: added to the denominator, above 0.
            weight_decay: Weight decay of matrices (norms and biases have none).
            max_grad_norm: Clip the global gradient norm (0: off).

        Returns:
            A dict: step, the number of steps done; grad_norm, of the gradients before clipping; learning_rate.

        Raises:
            InputError: There are no gradients, a setting is out of its range, or the update would not be finite. Weights and
                gradients stay as they were.

        Examples:
            >>> metrics = engine.forward_backward([[11, 12, 13, 14]])
            >>> engine.optim_step(learning_rate=5e-3, beta2=0.95, max_grad_norm=0)["learning_rate"]
            0.005
        """
        settings = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay,
                    "max_grad_norm": max_grad_norm}  # fmt: skip
        return dict(self._engine.optim_step(named_texts(settings)))

    def logprobs(self, rows: Data, *, progress: Callable[[int, int], object] | None = None) -> list[NDArray[np.floating[Any]]]:
        """Log-probabilities of all tokens of the rows, each prefix computed once.

        Args:
            rows: Rows in any form that the class names.
            progress: Called as progress(done, total) after each micro-batch.

        Returns:
            A list with an array [n] for each row of n tokens, float32 (float64 for float64 models), natural logarithms:
            entry t is that of token t given all before it, and entry 0 is 0. That is what rows have as `logprobs` and
            `ref_logprobs`: where a row has a temperature, the logits are divided by it.

        Raises:
            InputError: Rows cannot be used, or a log-probability is not finite.

        Examples:
            >>> [row.shape for row in engine.logprobs([[11, 12, 13, 14], [11, 12, 17]])]
            [(4,), (3,)]
        """
        return self._logprobs(rows, 0, progress)[0]

    def topk_logprobs(self, rows: Data, k: int, *,
                      progress: Callable[[int, int], object] | None = None) -> list["TopLogprobs"]:  # fmt: skip
        """The same with the most likely tokens in the place of each token, by one forward pass.

        Args:
            rows: Rows in any form that the class names.
            k: How many, from 1 to the vocabulary's size.
            progress: Called as progress(done, total) after each micro-batch.

        Returns:
            A list with a TopLogprobs for each row.

        Raises:
            InputError: Rows or k cannot be used, or a log-probability is not finite.

        Examples:
            >>> [row] = engine.topk_logprobs([[11, 12, 13]], k=2)
            >>> row.logprobs.shape, row.ids.shape, row.ids[0].tolist(), bool((row.values[1:, 0] >= row.values[1:, 1]).all())
            ((3,), (3, 2), [-1, -1], True)
        """
        k = whole_number(k, "k", "a whole number")
        if not 1 <= k <= self._engine.vocab_size:
            raise InputError(f"k: expected 1 to {self._engine.vocab_size}, the model's vocab_size, received {k}")
        return [TopLogprobs(*row) for row in zip(*self._logprobs(rows, k, progress), strict=True)]

    def _logprobs(self, rows: Data, k: int, progress: Callable[[int, int], object] | None) -> list[list[NDArray[Any]]]:
        with self._with_other_ranks():
            found = _rows(rows, self._engine.vocab_size)
        logprobs, ids, values, _, _ = self._distributions(found, k=k, progress=progress)
        if self._options["dtype"] != "float64":
            logprobs, values = logprobs.astype(np.float32), values.astype(np.float32)
        arrays = [logprobs, ids, values] if k > 0 else [logprobs]
        return [np.split(array, np.asarray(found.offsets)[1:-1]) for array in arrays]

    def _distributions(self, rows: Trajectories, *, k: int = 0, temperature: float | None = None, entropies: bool = False,
                       progress: Callable[[int, int], object] | None = None) -> tuple[Any, Any, Any, Any, int]:  # fmt: skip
        """In float64 for N tokens: log-probabilities [N], most likely ids and their log-probabilities [N, k], entropies [N] or
        [0]; and how many tokens were encoded. temperature: divides the logits; None: that of each row, and 1 for the most
        likely tokens."""
        logprobs, ids, values, found, encoded = self._engine.logprobs(rows, k, temperature or 0.0, entropies, progress)
        return logprobs, ids.reshape(len(logprobs), k), values.reshape(len(logprobs), k), found, encoded

    def sample(self, prompts: Data, params: SamplingParams | Sequence[SamplingParams] | None = None, *,
               samples: int | None = None, max_new_tokens: int | None = None, temperature: float | None = None,
               top_k: int | None = None, top_p: float | None = None, stop_ids: Iterable[int] | None = None,
               prompt_logprobs: bool | None = None, seed: int | None = None, whole_rows: bool | None = None,
               batch_size: int | None = None, token_budget: int | None = None,
               progress: Callable[[int, int], object] | None = None,
               watch: Watch | None = None) -> list[dict[str, Any]]:  # fmt: skip
        """Completions of prompts, sampled with the weights as they are: what `espalier sample` does.

        Tokens that prompts share are encoded once in each call, and all completions read their keys and values in place.
        An engine made with prefix_cache="1GiB" keeps as much of them, so that a conversation that grows encodes only what is
        new, until its weights change. Gradients stay as they are. Equal weights, prompts and arguments give equal bits without
        a cache, and results that are equal up to rounding with one.

        Args:
            prompts: Rows in any form that the class names. A row's prompt is its tokens before the first one with loss; the
                whole row where it is a list of token ids, or has no loss, or has loss from its first token on.
            params: All of the following at once, but for `progress` and `watch`. An argument that is given counts more. A list
                has those of each prompt, whose random numbers are then those of a call with it alone; whole_rows, batch_size
                and token_budget, which are the call's, are arguments.
            samples: Completions of each prompt: a group. Default: 1.
            max_new_tokens: Tokens of each completion at most, its stop token included. Default: 256.
            temperature: Divides the logits; 0 takes the most likely token always. Default: 1.
            top_k: Choose among so many most likely tokens; 0: among all. Default: 0.
            top_p: Choose among the fewest most likely tokens, of those that top_k leaves, whose probabilities sum up to
                this. Default: 1.
            stop_ids: Token ids that end a completion, which keeps them. Default: eos_token_id of the model's
                generation_config.json or config.json; []: none, so that all have max_new_tokens tokens.
            prompt_logprobs: Also log-probabilities of prompts, at temperature 1, by the pass that encodes them. The cache keeps
                them, too. Default: False.
            seed: Of the random numbers, a whole number from 0. Default: the number of calls of `sample` so far. Each
                completion has its own random numbers, by the numbers of prompt and completion.
            whole_rows: Go on from whole rows, which keep their loss and log-probabilities: from a conversation with sampled
                turns, after a tool's result. Default: False.
            batch_size: Completions that are sampled together, at most. Default: 64.
            token_budget: Prompt tokens whose keys and values are kept at a time, at most; a single prompt may have more.
                Default: 32768.
            progress: Called as progress(finished, completions) after each token.
            watch: Called after each token, as watch(tokens) with an array [B, 3] of the completions that have a new one: number
                of the prompt, of its sample, and the token. Those for which it returns true end there, as with a stop id. It
                sees text as it comes, and ends a completion at a text, or one that nobody waits for. On several ranks each
                rank gets only the tokens of its part of the prompts. None: all go on.

        Returns:
            A list of rows, by prompt, then by sample: dicts with input_ids, loss_mask (1 on the completion), logprobs
            (log softmax(logits / temperature) over the whole vocabulary; on the prompt 0, unless prompt_logprobs asks for them),
            trajectory_id "NAME/sample-K" and group_id, that of the prompt's row or else NAME, the row's trajectory_id or number;
            and temperature, top_k and top_p where they are not 1, 0 and 1. With a reward (or an advantage) they are rows for
            `forward_backward`, which computes log-probabilities at the temperature of the row.

        Raises:
            InputError: Prompts or options cannot be used, a whole row's tokens with loss are of another temperature, or the
                model's folder names no usable stop ids.

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
        own = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
               "stop_ids": None if stop_ids is None else list(stop_ids), "prompt_logprobs": prompt_logprobs, "seed": seed,
               "whole_rows": whole_rows, "batch_size": batch_size, "token_budget": token_budget}  # fmt: skip
        rows = self._sample(prompts, params, own, progress, watch)
        return [rows[number] for number in range(len(rows))]

    def _sample(self, prompts: Data, params: SamplingParams | Sequence[SamplingParams] | None, own: dict[str, Any],
                progress: Callable[[int, int], object] | None, watch: Watch | None) -> Trajectories:  # fmt: skip
        with self._with_other_ranks():
            found = _rows(prompts, self._engine.vocab_size)
            given = {name: value for name, value in own.items() if value is not None}
            call, each = options_of_prompts(params, given, self._samplings, len(found))
        rows = self._engine.sample(found, call, each, progress, None if watch is None else watched(watch))
        self._count_sampling()
        return rows

    def sampling(self, *, batch_size: int | None = None, token_budget: int | None = None) -> Sampling:
        """Samples prompts that come while others are sampled: continuous batching, also of several adapters.

        With a process group each rank samples what it is given.

        Args:
            batch_size: As of `sample`.
            token_budget: As of `sample`.

        Returns:
            The sampling, without prompts.

        Raises:
            InputError: Options cannot be used.

        Examples:
            >>> engine.sampling(batch_size=16).is_idle
            True
        """
        sizes = {"batch_size": batch_size, "token_budget": token_budget}
        native_sampling = self._engine.sampling(named_texts({name: size for name, size in sizes.items() if size is not None}))
        return Sampling(self._engine, native_sampling, lambda rows: _rows(rows, self._engine.vocab_size), self._count_sampling)

    def _count_sampling(self) -> int:
        self._samplings += 1
        return self._samplings - 1

    @property
    def sampling_counts(self) -> dict[str, int]:
        """What all sampling so far has counted, on this rank.

        prompt_tokens: of all completions. kept_prompt_tokens: of prompts, found in the cache. encoded_prompt_tokens.
        sampled_tokens. prefix_cache_bytes: kept now.
        """
        return {name: int(count) for name, count in self._engine.sampling_counts() if name in _COUNTS}

    def gradients(self) -> dict[str, NDArray[np.floating[Any]]]:
        """Copies of the gradients so far, before clipping. With a process group all ranks make the call.

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

    def save(self, folder: str | os.PathLike[str], *, dtype: str | None = None, merged: bool = False) -> None:
        """Writes a checkpoint as `espalier train` does.

        It is a model that Transformers and `--model` open, or where an adapter is in use a folder of PEFT; with the
        optimiser's state and checksums. The folder appears when it is whole. Gradients are not part of it. Copies of
        adapters, and weights that are not trained, are saved without optimiser.

        Args:
            folder: Does not exist yet.
            dtype: Of the saved weights, "float32", "float64" or "bfloat16". Default: that in which they are trained. `load`
                restores the exact weights in any case.
            merged: Instead, the whole model, with the adapter in use added to its weights: sums in at least float32, rounded
                once to the engine's precision. Without optimiser; `load` does not take it.

        Raises:
            InputError: The folder exists or cannot be written, or weights are not finite; with `merged`, there is no adapter
                in use, or it adapts a head that is the embedding.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = os.path.join(tempfile.mkdtemp(), "first")
            >>> engine.save(checkpoint)
            >>> sorted(os.listdir(checkpoint))[0]
            'config.json'
        """
        if merged and dtype is not None:
            raise InputError(f"dtype: expected none with merged, which has the engine's precision; received {dtype!r}")
        self._engine.save(os.fspath(folder), dtype or "", merged)

    def load(self, folder: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Weights and optimiser as they were when a checkpoint was written, by `save` or by `espalier train`, bit for bit.

        Gradients are cleared. Learning rate and other options stay the engine's.

        Args:
            folder: The checkpoint.
            optimizer: False: the weights alone. The optimiser and its number of steps begin anew. Default: True.

        Raises:
            InputError: The checkpoint is damaged, or of another model, dtype, optimiser or adapter; nothing is changed then.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = os.path.join(tempfile.mkdtemp(), "first")
            >>> engine.save(checkpoint)
            >>> engine.load(checkpoint)
        """
        for note in self._engine.load(os.fspath(folder), optimizer):
            warnings.warn(note, stacklevel=2)

    @property
    def step(self) -> int:
        """Optimiser steps done by what is in use, those of a loaded checkpoint included."""
        return self._engine.step

    @property
    def learning_rate(self) -> float:
        """Of steps that are given none."""
        return float(self._options["learning_rate"])

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
        return f"<espalier.Engine: {self._options['dtype']} model of {engine.vocab_size} tokens, {engine.step} steps done>"


class TopLogprobs(NamedTuple):
    """Log-probabilities of a row of n tokens, in natural logarithms: entry t is given all tokens before token t.

    float32, or float64 for float64 models. Nothing predicts the first token: its entries are 0, and its ids -1.

    Attributes:
        logprobs: [n], of the row's tokens.
        ids: [n, k] int32, the most likely tokens in place of each, the most likely one first.
        values: [n, k], their log-probabilities.

    Examples:
        >>> row = engine.topk_logprobs([[11, 12, 13]], k=1)[0]
        >>> type(row).__name__, row._fields
        ('TopLogprobs', ('logprobs', 'ids', 'values'))
    """

    logprobs: NDArray[np.floating[Any]]
    ids: NDArray[np.int32]
    values: NDArray[np.floating[Any]]


def _makes_adapter(options: Mapping[str, Any]) -> bool:
    return options.get("lora_rank") is not None or bool(options.get("adapter"))


def _check_lora(options: Mapping[str, Any]) -> None:
    if not _makes_adapter(options):
        raise InputError("lora: expected a LoraConfig with lora_rank or adapter, received one with neither")


def _rows(rows: Any, vocab_size: int) -> Trajectories:
    if isinstance(rows, Trajectories):
        return rows
    if (names := file_names(rows)) is not None:
        return read(names, vocab_size=vocab_size)
    if is_packed(rows):
        return trajectories(dict(zip(("offsets", "input_ids"), token_sequences(rows))))
    return trajectories(rows)
