# SPDX-License-Identifier: Apache-2.0
"""What a model takes for a plan, from its config alone."""

import os
import tempfile
from pathlib import Path
from typing import Any, TypeGuard

from .errors import InputError
from .native import core


class Costs:
    """The cost of a model's forward and backward passes: FLOPs by its config.json, and seconds by built-in or measured rates.

    Copies and pickles are equal, and need none of the files any more.

    Attributes:
        model_type: The family, as in config.json.
        calibrated: Whether the rates were measured. Built-in rates suffice to compare plans, but do not predict times.

    Examples:
        >>> espalier.costs(model).model_type
        'llama'
    """

    def __init__(self, found: core.Costs, config: str, device: str, rates: str | None) -> None:
        self.found = found  # as the library takes them
        self._made_of = config, device, rates  # texts of files, but for the device

    @property
    def model_type(self) -> str:
        """The family, as in config.json."""
        return self.found.model_type

    @property
    def calibrated(self) -> bool:
        """Whether the rates were measured."""
        return self.found.calibrated

    def __repr__(self) -> str:
        return repr(self.found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _costs_of_texts, self._made_of


def costs(model: str | os.PathLike[str] | Any, *, device: str = "cpu",
          cost_model: str | os.PathLike[str] | None = None) -> Costs:  # fmt: skip
    """What a model takes for tokens: FLOPs by its config, seconds by rates.

    Args:
        model: A folder of Hugging Face, of which config.json alone is read, or such a file; or a model of Transformers or its
            config.
        device: "cpu" or "cuda": whose built-in rates are used. They compare plans well, but are no prediction of times.
        cost_model: A file of rates that were measured on the machine that trains, instead of built-in ones: as
            `espalier plan --save-cost-model FILE` writes it, or cost_model.json of a run.

    Returns:
        Costs, for the argument `model` of `plan` and `distribute`, which take all that this takes as well.

    Raises:
        InputError: The engine does not have the model, or a file cannot be used. The message names file and key.

    Examples:
        >>> import espalier, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> costs = espalier.costs(config)
        >>> plan = espalier.plan(espalier.build([[1, 2, 3], [1, 2, 4]]), token_budget=8, model=costs)
        >>> costs.model_type, plan.flops > 0
        ('llama', True)
    """
    if cost_model is not None and not _is_path(cost_model):
        raise InputError(f"cost_model: expected a path, received {type(cost_model).__name__}")
    rates = None if cost_model is None else Path(cost_model)
    if _is_path(model):
        path = Path(model)
        found = core.costs(path, str(device), rates)
        text = _text(path / "config.json" if path.is_dir() else path)
    else:
        config = getattr(model, "config", model)
        if not hasattr(config, "to_json_string"):
            raise InputError("model: expected a folder of Hugging Face, a config.json, a model of Transformers, its config, or "
                             f"Costs, as espalier.costs makes them, received {type(model).__name__}")  # fmt: skip
        text = config.to_json_string()
        found = _of_text(text, str(device), rates)
    return Costs(found, text, str(device), None if rates is None else _text(rates))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _of_text(config: str, device: str, rates: Path | None) -> core.Costs:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(config, encoding="utf-8")
        try:
            return core.costs(file, device, rates)
        except InputError as error:
            raise InputError(str(error).replace(str(file), "the model's config")) from None


def _costs_of_texts(config: str, device: str, rates: str | None) -> Costs:
    """What pickles and copies of Costs call."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        file.write_text(rates or "", encoding="utf-8")
        return Costs(_of_text(config, device, None if rates is None else file), config, device, rates)


def costs_of(model: str | os.PathLike[str] | Costs | Any) -> core.Costs | None:
    """The library's Costs of what plan and distribute were given as `model`; None for None."""
    if model is None:
        return None
    return (model if isinstance(model, Costs) else costs(model)).found


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)
