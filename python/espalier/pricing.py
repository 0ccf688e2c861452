# SPDX-License-Identifier: Apache-2.0
"""What a model takes for a plan, from its config.json alone."""

import os
from pathlib import Path

from .errors import InputError
from .native import core

Costs = core.Costs


def costs(model, *, device: str = "cpu", cost_model=None) -> Costs:
    """What a model takes for tokens: FLOPs by its config.json, seconds by rates.

    model       a folder of Hugging Face, of which config.json alone is read, or such a file
    device      "cpu" or "cuda": whose built-in rates are used. They compare plans well, but are no prediction of times.
    cost_model  a file of rates that were measured on the machine that trains, instead of built-in ones: as
                `espalier plan --save-cost-model FILE` writes it, or cost_model.json of a run

    Returns Costs, for the argument `model` of plan and distribute, which take a folder or file as well. Raises
    InputError, naming file and key, for models that the engine does not have.
    """
    for name, path in {"model": model, "cost_model": cost_model}.items():
        if not isinstance(path, str | os.PathLike) and (name == "model" or path is not None):
            raise InputError(f"{name}: expected a path, received {type(path).__name__}")
    return core.costs(Path(model), str(device), None if cost_model is None else Path(cost_model))


def costs_of(model):
    """Costs of what plan and distribute were given as `model`; None for None."""
    if model is None or isinstance(model, Costs):
        return model
    if not isinstance(model, str | os.PathLike):
        raise InputError("model: expected a folder of Hugging Face, a config.json, or Costs, as espalier.costs makes "
                         f"them, received {type(model).__name__}")  # fmt: skip
    return costs(model)
