# SPDX-License-Identifier: Apache-2.0
"""What a model takes for a plan, from its config alone."""

import os
import tempfile
from pathlib import Path
from typing import Any, TypeGuard

from .errors import InputError
from .native import core

Costs = core.Costs


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
        return core.costs(Path(model), str(device), rates)
    config = getattr(model, "config", model)
    if not hasattr(config, "to_json_string"):
        raise InputError("model: expected a folder of Hugging Face, a config.json, a model of Transformers, its config, or "
                         f"Costs, as espalier.costs makes them, received {type(model).__name__}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(config.to_json_string(), encoding="utf-8")
        try:
            return core.costs(file, str(device), rates)
        except InputError as error:
            raise InputError(str(error).replace(str(file), "the model's config")) from None


def costs_of(model: str | os.PathLike[str] | Costs | Any) -> Costs | None:
    """Costs of what plan and distribute were given as `model`; None for None."""
    return model if model is None or isinstance(model, Costs) else costs(model)


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)
