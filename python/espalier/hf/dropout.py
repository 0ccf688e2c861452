# SPDX-License-Identifier: Apache-2.0
"""Dropout and noise in a patched model: refused, or drawn once for each distinct token of a batch.

Layers of a patched model see each distinct token once, so that whatever they draw for a token is drawn once. That is what
`patch(model, dropout="shared")` asks for, and all that it needs, but for three things: dropout that is not of single values of
tokens is refused; noise on embeddings has the scale that it would have in the batch itself; and `verify` runs without either.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import Unsupported
from .for_now import with_values

NOISE = "neftune_noise_alpha"  # where Transformers keeps it


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_module(name: str, module: Any, choice: str | None) -> None:
    """Raises Unsupported for what a module in training, of that name in its backbone, draws, and `choice` does not allow."""
    found, noise = probabilities_of(module), getattr(module, NOISE, None)
    if choice is None and found:
        raise Unsupported(f"dropout: expected none in training, received {next(iter(found.values()))} in "
                          f"{name or 'the backbone'}: tokens that rows share would share what is dropped; set it to 0, or "
                          'patch with dropout="shared"')  # fmt: skip
    if choice is None and noise:
        raise Unsupported(f"neftune_noise_alpha: expected none, received {noise}: tokens that rows share would share their "
                          'noise; leave it out, or patch with dropout="shared"')  # fmt: skip
    for own, probability in found.items():
        if fault := _fault_of(name, module, own):
            raise Unsupported(f"dropout: expected that of single values of tokens, received {probability} in "
                              f"{name or 'the backbone'}, {fault}; set it to 0")  # fmt: skip


def probabilities_of(module: Any) -> dict[str, float]:
    """Those that the module itself has, not its children, and that are not 0, by the names of its attributes."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return {"p": module.p} if module.p else {}
    return {name: value for name, value in vars(module).items() if ("drop" in name or "jitter" in name)
            and isinstance(value, int | float) and not isinstance(value, bool) and value}  # fmt: skip


def _fault_of(name: str, module: Any, own: str) -> str | None:
    """Why dropout cannot be drawn once for each token."""
    is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
    own_name = name.rpartition(".")[2] if is_layer else own
    if own_name.startswith("att") or (not is_layer and "Attention" in type(module).__name__ and own == "dropout"):
        return "of attention weights"
    is_of_values = type(module) is nn.Dropout if is_layer else "dropout" in own or own.endswith("pdrop")
    return None if is_of_values else "of whole layers or channels"


def has_dropout(module: Any) -> bool:
    """Whether the module itself drops something in its next forward pass."""
    return bool(module.training and probabilities_of(module))


def noise_of_batch(backbone: Any, length: int, num_tokens: int) -> AbstractContextManager[None]:
    """Inside, noise on embeddings of the num_tokens of a forest has the scale of that on a batch [B, length]: Transformers
    divides by the root of the length that it sees."""
    embeddings = backbone.get_input_embeddings()
    noise = getattr(embeddings, NOISE, None)
    return with_values([(embeddings, NOISE, noise * (num_tokens / length) ** 0.5)] if noise else [])


def switched_off(model: Any) -> AbstractContextManager[None]:
    """Inside, nothing is dropped, and there is no noise."""
    return with_values((module, name, 0.0) for module in model.modules()
                       for name in (*probabilities_of(module), *([NOISE] if getattr(module, NOISE, None) else [])))  # fmt: skip


class Draws:
    """The state of the random numbers of the CPU and of a device, so that what runs again draws the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._of_cpu = torch.get_rng_state()
        self._of_device = None if self._device is None else torch.get_device_module(device).get_rng_state(device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers are as they were when this was made; afterwards, as they were before."""
        devices = [] if self._device is None else [self._device]
        kind = "cuda" if self._device is None else self._device.type
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(self._of_cpu)
            if self._of_device is not None:
                torch.get_device_module(self._device).set_rng_state(self._of_device, self._device)
            yield
