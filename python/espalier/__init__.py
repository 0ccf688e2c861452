# SPDX-License-Identifier: Apache-2.0
"""Espalier trains language models on trees of tokens.

    import espalier

    forest = espalier.build([[1, 2, 3], [1, 2, 4]])   # the prefix trees of the rows
    layout = forest.layout()                          # their tokens in preorder, and which sees which
    plan = espalier.plan(forest, token_budget=4096)   # what runs together
    rows = espalier.read("rows.jsonl")                # rows of files, as NumPy arrays
    print(espalier.inspect(rows))                     # what they share, and what sharing was lost
    model = espalier.hf.patch(model)                  # a model of Transformers that trains on trees
    step = espalier.Step(model, plan)                 # the same for batches larger than memory
    engine = espalier.Engine("MODEL")                 # the trainer of the command line

Importing the package loads nothing else, not even its compiled part: names are loaded when they are used.
"""

import importlib

from . import name_clash

# Where names come from: module of this package -> names.
_MODULES = {
    "adapter": ("Adapter",),
    "engine": ("Engine", "TopLogprobs"),
    "errors": ("InputError",),
    "native": ("__version__",),
    "options": ("EngineConfig", "LoraConfig", "ObjectiveConfig", "SamplingParams"),
    "pricing": ("Costs", "costs"),
    "report": ("Report", "inspect"),
    "sampling_call": ("Completion", "Sampling"),
    "rows.files": ("Trajectories", "read", "trajectories", "write"),
    "step": ("Step",),
    "trees": ("Distribution", "Forest", "Layout", "MicroBatch", "Plan", "RankShare", "build", "distribute", "plan"),
}
_PACKAGES = ("distributed", "hf", "io", "megatron", "ops", "titan", "trl")
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
name_clash.warn(__file__)

__all__ = sorted([*_PACKAGES, *(name for name in _HOMES if not name.startswith("_"))])  # noqa: PLE0605  it is a list


def __getattr__(name):
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES, *_PACKAGES})
