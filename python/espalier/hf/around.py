# SPDX-License-Identifier: Apache-2.0
"""The code around a patched backbone: the model with a head, its head and its loss.

The head may be shared where this code is what the tests cover. Other code gets the hidden states of all rows, which are zeros at
padding; where it may look at these, batches with padding run unshared.
"""

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.loss import loss_utils

from .changes import Change, Snapshot, hooks_of, is_hook_of_wrapper
from .heads import is_plain
from .origin import home_of, is_library_code, stock_of

_LIGER = "liger_kernel."  # whose forwards and losses take tokens with labels alone
_KNOWN = (_LIGER, "accelerate.", "espalier.", "peft.", "torch.", "trl.")


class Around:
    """What is around a backbone. Does not keep the model alive."""

    def __init__(self, model: Any) -> None:
        self.model = weakref.ref(model)
        self._parts: nn.ModuleList | None = None  # beside the backbone
        self._snapshot: Snapshot | None = None
        self._is_plain: bool | None = None
        self._losses: dict[Any, bool] = {}  # whether they ignore logits without a label

    def changes(self, backbone: Any) -> list[Change]:
        """What others have changed of the head and of the class of the model, but for LoRA and Liger."""
        model = self.model()
        parts = [] if model is None else _parts_beside(model, backbone)
        if not parts:
            return []
        if self._parts is None or list(self._parts) != parts:
            self._parts, self._snapshot = nn.ModuleList(parts), None
        if self._snapshot is None or not self._snapshot.is_current(self._parts, type(model)):
            self._snapshot = Snapshot(self._parts, type(model))
        return [change for change in self._snapshot.changes if not _is_plain_adapter(change) and _LIGER not in str(change)]

    def may_share_head(self, backbone: Any) -> bool:
        """Whether head and model are the code that the tests cover, and no parametrization of weights counts its calls."""
        model, changes = self.model(), self.changes(backbone)
        head = None if model is None else model.get_output_embeddings()
        if head is None or changes or next(self._suspects(model, backbone, changes), None) is not None:
            return False
        return not any("parametrizations" in part._modules for part in head.modules())

    def has_plain_head(self, backbone: Any) -> bool:
        """Whether logits are those of the output layer alone."""
        if self._is_plain is None:
            self._is_plain = is_plain(self.model(), backbone)
        return self._is_plain

    def sees_padding(self, backbone: Any) -> str | None:
        """The code that may look at hidden states or logits at padding, for messages; None where none does."""
        model = self.model()
        if model is None:
            return None
        return next(self._suspects(model, backbone, self.changes(backbone)), None)

    def _suspects(self, model: Any, backbone: Any, changes: Sequence[Change]) -> Iterator[str]:
        yield from map(str, changes)
        for module in (model, backbone):
            forward = stock_of(module.__dict__.get("forward"))
            if forward is None or getattr(forward, "__func__", None) is inspect.unwrap(type(module).forward):
                continue  # Accelerate's unwrap_model binds what the class has
            if not f"{home_of(forward)}.".startswith(_KNOWN):
                yield f"a forward of {type(module).__name__} from {home_of(forward)}"
        beside = [module for part in _parts_beside(model, backbone) for module in part.modules()]
        for module in (model, backbone, *beside):
            for hook in hooks_of(module):
                if not is_hook_of_wrapper(hook):
                    yield f"a hook of {type(module).__name__}"
        loss = getattr(model, "loss_function", None)
        if loss is not None and not self._ignores_padding(loss, model.config):
            yield "a loss that looks at logits without labels"

    def _ignores_padding(self, loss: Any, config: Any) -> bool:
        functions = (loss, loss_utils.fixed_cross_entropy, nn.functional.cross_entropy)
        if all(map(is_library_code, functions)):
            return True
        if functions not in self._losses:
            self._losses[functions] = _is_alike_without_labels(loss, getattr(config, "vocab_size", 16))
        return self._losses[functions]


def _parts_beside(model: Any, backbone: Any) -> list[Any]:
    """The modules of a model that its backbone is not in: its head, whatever it is called."""
    return [child for child in model.children() if not any(part is backbone for part in child.modules())]


@torch.inference_mode(False)
@torch.enable_grad()
def _is_alike_without_labels(loss: Any, vocabulary: int) -> bool:
    """Whether a loss stays when logits change at places without a label, and has no gradient there; False where it does not
    say."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    logits = torch.randn(2, 5, vocabulary, generator=generator, device="cpu")
    labels = torch.tensor([[-100, 1, 2, 3, -100], [-100, 0, 1, -100, -100]], device="cpu")
    is_free = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool, device="cpu")
    leaf = logits.clone().requires_grad_()
    try:
        value = loss(logits=leaf, labels=labels, vocab_size=vocabulary)
        (gradient,) = torch.autograd.grad(value, leaf)
        other = loss(logits=logits.masked_fill(is_free.unsqueeze(-1), 0), labels=labels, vocab_size=vocabulary)
        return bool(torch.isclose(value, other)) and not bool(gradient[is_free].any())
    except Exception:  # whatever a loss of others needs
        return False


def _is_plain_adapter(change: Change) -> bool:
    """Whether it is PEFT's wrapper of a layer, or LoRA without variants, which take tokens one at a time whatever their state."""
    if not change.what.startswith("the class"):
        return False
    if type(change.module).__module__ == "peft.utils.other":
        return True
    is_lora = type(change.module).__module__ == "peft.tuners.lora.layer" and not change.module.lora_variant
    return is_lora and home_of(type(change.module).forward).startswith("peft.")
