# SPDX-License-Identifier: Apache-2.0
"""Small random models of Transformers, batches of rows, and what training on each row alone gives."""

import random

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from conftest import seed_of
from espalier.hf.float64 import InFloat64
from small_models import MODELS, WINDOWS_AND_ROPES

logging.set_verbosity_error()
KINDS = [kind for kind in MODELS | WINDOWS_AND_ROPES if kind != "qwen3_5-composite"]

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# Since when layers call what a patch replaces (docs/families.md), and Transformers takes the config.
SINCE = {"gemma2": (5, 23), "mamba2": (5, 23), "granitemoehybrid": (5, 16), "granitemoehybrid-dense": (5, 23)}


def needs_family(model_type):
    """Skips where the installed version of Transformers has no layers of the family, or of the kind, that follow trees."""
    if VERSION < SINCE.get(model_type, (0, 0)):
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type} that is exact on trees, and patch refuses it")


class DeepSpeedEngine(torch.nn.Module):
    """A stand-in for DeepSpeed's, which passes on what it does not have itself."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "module" else getattr(self.module, name)


def make_model(kind, dtype=torch.float64, seed=1, **changes):
    """A model in training mode. Biases have values, which Transformers leaves at zero. changes: of its config."""
    config = (MODELS | WINDOWS_AND_ROPES)[kind] | changes
    needs_family(config["model_type"])
    needs_family(kind)
    if "time_step_limit" in config:
        config["time_step_limit"] = [float("inf") if isinstance(x, dict) else x for x in config["time_step_limit"]]
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(seed_of(seed))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and not parameter.any():
                parameter.normal_(std=0.3)
    return model.to(dtype).train()


class HookOfEspalier:
    """A hook that counts as one of the package's own, so that batches are still shared."""

    __module__ = "espalier.tests"

    def __init__(self, function):
        self._function = function

    def __call__(self, *args):
        return self._function(*args)


def branching_rows(seed=2):
    """Rows that branch at several depths, end inside one another, repeat, and stand alone."""
    rng = random.Random(seed_of(seed))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    trunk = tokens(9)
    left, right = trunk + tokens(5), trunk + tokens(4)
    return [left + tokens(3), right + tokens(1), left + tokens(6), left, trunk, right, right, tokens(17), tokens(1)]


def padded(rows, side="right"):
    """input_ids, attention_mask and labels [B, S]; no label at the beginnings of rows."""
    length = max(map(len, rows))
    ids, mask = torch.randint(0, 61, (len(rows), length)), torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        begin = length - len(row) if side == "left" else 0
        place = slice(begin, begin + len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
        labels[number, begin + 1:begin + len(row)] = ids[number, begin + 1:begin + len(row)]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(rows):
    """One row of all, with the positions of each: input_ids, position_ids and labels [1, N], no label at beginnings."""
    ids = torch.tensor([sum(rows, [])])
    positions = torch.cat([torch.arange(len(row)) for row in rows]).unsqueeze(0)
    return {"input_ids": ids, "position_ids": positions, "labels": torch.where(positions == 0, -100, ids)}


FORMS = {"right": padded, "left": lambda rows: padded(rows, "left"), "packed": packed}


def sums_of(model, batches, call=None):
    """The sum of -log p over the labels of the batches, and its gradients by name."""
    total = 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = (model if call is None else call)(**inputs).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total = total + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return total.item(), dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()), allow_unused=True)))


def alone(model, rows):
    """`sums_of` the rows, each as its own batch without padding, in float64 throughout."""
    with InFloat64():
        return sums_of(model, [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in rows])


def worst_error(ours, theirs):
    """Of a loss and gradients, relative; gradients that cancel to little beside all others count as a hundredth of
    them, since they hold the rounding of larger terms."""
    (loss, gradients), (other_loss, other_gradients) = ours, theirs
    norms = {name: gradient.norm() for name, gradient in other_gradients.items() if gradient is not None}
    everything = torch.stack(list(norms.values())).norm()
    assert norms.keys() == {name for name, gradient in gradients.items() if gradient is not None}
    errors = [(gradients[name] - other_gradients[name]).norm() / max(norm, 1e-2 * everything)
              for name, norm in norms.items()]  # fmt: skip
    return max(abs(loss - other_loss) / abs(other_loss), torch.stack(errors).max().item())
