# SPDX-License-Identifier: Apache-2.0
"""The fused head of TRL (`model(..., fused_lm_head=True)`) on distinct tokens.

TRL's own function runs, on a batch of one row: the distinct pairs of a token and its label, which it takes as shifted labels.
What it gives for each pair is then put wherever the pair stands in the rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import routes
from .asked import AskedTokens, asking, index_of

_ARGUMENTS = ("self", "fused_lm_head", "labels", "shift_labels", "num_items_in_batch")
_OF_TOKENS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_FIELDS = {"loss", *_OF_TOKENS, "label_mask", "aux_loss"}
IGNORED = -100


def is_tested(forward: Any) -> bool:
    """Whether it is a forward that TRL's add_fused_lm_head has set, with the interface that is tested."""
    function = getattr(forward, "__func__", None)
    if function is None or function.__globals__.get("__name__") != "trl.trainer.utils":
        return False
    code, output = function.__code__, function.__globals__.get("FusedCausalLMOutput")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (code.co_name == "_fused_forward" and names == _ARGUMENTS and dataclasses.is_dataclass(output)
            and {field.name for field in dataclasses.fields(output)} == _FIELDS)  # fmt: skip


def forward(backbone: Any, forest_of: Callable[[Mapping[str, Any]], Any], fused: Any, args: tuple[Any, ...],
            kwargs: dict[str, Any]) -> Any:  # fmt: skip
    """What `fused`, a forward with TRL's fused head, gives for a batch. forest_of: patching.forest_of."""
    batch = {name: value for name, value in kwargs.items() if value is not None}
    targets = None if args or routes.NAME in batch else _targets(batch)
    if targets is None:
        return fused(*args, **kwargs)
    size = batch["input_ids"].numel()
    rows, layout = forest_of(batch)
    pairs = _Pairs(index_of(rows, layout, size).reshape(batch["input_ids"].shape)[:, : targets.shape[1]], targets)
    if len(pairs.tokens) == 0:
        return fused(*args, **kwargs)
    labels = torch.from_numpy(pairs.targets).to(batch["input_ids"].device).unsqueeze(0)
    reduced = {**kwargs, "labels": None, "shift_labels": labels, "num_items_in_batch": None}
    with asking(AskedTokens(backbone, pairs.tokens, (rows, layout))):
        output = fused(**reduced)
    return _of_rows(output, pairs, batch.get("num_items_in_batch"), getattr(backbone.config, "router_aux_loss_coef", 0.0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _targets(batch: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """The labels of predictions, [B, S - 1], or [B, S] where they are given as such; None where they do not fit."""
    input_ids, labels, shifted = (batch.get(name) for name in ("input_ids", "labels", "shift_labels"))
    given = labels if shifted is None else shifted
    if not isinstance(input_ids, Tensor) or not isinstance(given, Tensor):
        return None
    if input_ids.dim() != 2 or given.shape != input_ids.shape:
        return None
    found: NDArray[np.int64] = given.detach().cpu().long().numpy()
    return found[:, 1:] if shifted is None else found


class _Pairs:
    """Distinct pairs of a token and its label.

    tokens, targets  [E] int64
    index            [N] int64: the pair at each of the N predictions, E where there is no label
    shape            of the predictions"""

    def __init__(self, index: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self.shape = targets.shape
        index, targets = index.reshape(-1), targets.reshape(-1)
        places = np.flatnonzero(targets != IGNORED)
        pairs, found = np.unique(np.stack([index[places], targets[places]]), axis=1, return_inverse=True)
        self.tokens, self.targets = pairs.copy()
        self.index = np.full(len(targets), len(self.tokens), np.int64)
        self.index[places] = found.reshape(-1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_rows(output: Any, pairs: _Pairs, number: Any, aux_loss_coef: float) -> Any:
    """The output for the rows of a batch, of that for pairs."""
    mask = torch.from_numpy(pairs.index != len(pairs.tokens)).view(pairs.shape).to(output.label_mask.device)
    index = torch.from_numpy(pairs.index).to(mask.device)

    def spread(values: Tensor) -> Tensor:
        values = values.reshape(-1)
        return torch.cat([values, values.new_zeros(1)])[index].view(pairs.shape)

    fields = {name: None if (values := getattr(output, name)) is None else spread(values) for name in _OF_TOKENS}
    loss = -fields["log_probs"].sum() / (mask.sum() if number is None else number)  # type: ignore[union-attr]
    if output.aux_loss is not None:
        loss = loss + aux_loss_coef * output.aux_loss
    return type(output)(loss=loss, **fields, label_mask=mask, aux_loss=output.aux_loss)
