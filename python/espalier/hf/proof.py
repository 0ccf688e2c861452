# SPDX-License-Identifier: Apache-2.0
"""The proof that trees are exact for a model: a small copy of it, patched against unpatched, before its first batch.

It decides for every family and version of Transformers that the tests do not cover."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from ..errors import Unsupported
from ..trees import Layout, build
from . import verdicts
from .config_view import original_of
from .families import FAMILIES, stock_class
from .float64 import InFloat64
from .plain_layers import by_torch
from .small_copy import NotSmall, longest_window, small_model

TESTED = ("5.23", "5.24")  # minor versions of Transformers
MAX_ERROR = 1e-6  # relative; exact models are at 1e-12, and mistakes above 1e-3
MAX_ERROR_IN_FLOAT32 = 1e-4  # where layers compute in nothing wider
_MOST_TOKENS = 2048  # of a row by which a model itself is proven

_TRUNK = [7, 13, 41, 5, 19, 2]
# Branches next to each other, shorter than windows and kernels; single tokens; rows longer than windows; rows in rows.
ROWS = [[*_TRUNK, 11, 4, 30, 12, 6, 8], [*_TRUNK, 11, 4, 9, 9, 22, 6], _TRUNK, [*_TRUNK, 40], [*_TRUNK, 17, 8],
        [*_TRUNK, 21], [5, 33, 21, 4], [5, 33, 14], [5, 10], [29], _TRUNK]  # fmt: skip

_NO_FLOAT64 = re.compile(r"dtype|scalar type|not implemented for")  # what errors of layers without it say

Attach = Callable[[Any], None]  # patches a backbone

_verdicts: dict[str, verdicts.Verdict] = {}  # of this process, by verdicts.key_of


@dataclass(frozen=True)
class Case:
    """Rows, and their tokens in the forest."""

    rows: list[list[int]]
    layout: Layout

    @classmethod
    def of(cls, rows: list[list[int]]) -> "Case":
        return cls(rows, build(rows).layout())

    def batch(self, device: Any = None) -> dict[str, Tensor]:
        """input_ids and attention_mask [B, S]."""
        size = len(self.rows), max(map(len, self.rows))
        ids, mask = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        for number, row in enumerate(self.rows):
            ids[number, :len(row)], mask[number, :len(row)] = torch.tensor(row), 1
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def is_tested() -> bool:
    return ".".join(transformers.__version__.split(".")[:2]) in TESTED


def is_known(backbone: Any) -> bool:
    """Whether the tests cover models like `backbone`, with all options of their config."""
    return is_tested() and backbone.config.model_type in FAMILIES


def check_family(backbone: Any, attach: Attach) -> None:
    """Raises Unsupported where the tests do not cover `backbone` and a small copy of it is not exact on trees. Takes a few
    seconds, once for each class and kind of config; then the verdict is known, in later processes as well."""
    if is_known(backbone):
        return
    cls, config = stock_class(backbone), original_of(backbone.config)
    key = verdicts.key_of(cls, config)
    if key not in _verdicts:
        _verdicts[key] = verdicts.read(key) or _proven(cls, config, attach)
        verdicts.write(key, _verdicts[key])
    found = _verdicts[key]
    if found.not_small is not None:
        found = _proven_itself(backbone, attach, found.not_small)
    if found.fault is not None:
        raise Unsupported(f"espalier.hf.patch: expected a model for which trees are exact, received {cls.__name__} (model_type "
                          f"{config.model_type!r}) with Transformers {transformers.__version__}, of which "
                          f"{found.fault}")  # fmt: skip


def _proven(cls: Any, config: Any, attach: Attach) -> verdicts.Verdict:
    try:
        with _as_in_a_fresh_process():
            return _judged(cls, config, attach)
    except NotSmall as reason:
        return verdicts.Verdict(not_small=str(reason))
    except Unsupported as refusal:
        return verdicts.Verdict(f"a small copy is refused: {refusal}")
    except Exception as failure:  # whatever any model may do
        return verdicts.Verdict(f"a small copy fails: {_told(failure)}")


@contextlib.contextmanager
def _as_in_a_fresh_process() -> Iterator[None]:
    """Inside, models are made and run whatever the modes around are; random numbers are as before afterwards."""
    with (torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"),
          torch.autocast("cpu", enabled=False), by_torch(), warnings.catch_warnings()):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


def _judged(cls: Any, config: Any, attach: Attach) -> verdicts.Verdict:
    model, case, most = small_model(cls, config), Case.of(ROWS), MAX_ERROR
    try:
        error, worst = error_of(model, attach, case)
    except RuntimeError as failure:
        if not _NO_FLOAT64.search(str(failure)):
            raise
        model, most = small_model(cls, config).float(), MAX_ERROR_IN_FLOAT32
        error, worst = error_of(model, attach, case)
    if error <= most:
        return verdicts.Verdict()
    fresh = small_model(cls, config).to(next(model.parameters()).dtype)
    place = first_difference(fresh, attach, case, most) or f"none differs, but the gradient of {worst}"
    return verdicts.Verdict(f"a small copy is wrong on trees, by {error:.1g}; the first layer whose output differs: {place}")


def error_of(model: Any, attach: Attach, case: Case | None = None) -> tuple[float, str]:
    """(error, name of the parameter that has it): the largest relative error of the gradients of a loss, by parameter, and of
    the loss (""), of `model` on the rows, which are a batch once it is patched, against each row alone."""
    case = case or Case.of(ROWS)
    dtype = next(model.parameters()).dtype
    batch = case.batch()
    probe = torch.randn(*batch["input_ids"].shape, _width(model), dtype=dtype)
    with _computing_in(dtype):
        alone: Any = sum((_hidden(model, torch.tensor([row]))[0] * probe[number, :len(row)]).sum()
                    for number, row in enumerate(case.rows))  # fmt: skip
        theirs = _gradients(model, alone)
        attach(model)
        together = (_hidden(model, **batch) * probe * batch["attention_mask"].unsqueeze(-1)).sum()
        ours = _gradients(model, together)
    everything = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    errors = {name: ((ours[name] - theirs[name]).norm() / torch.clamp(theirs[name].norm(), min=1e-2 * everything)).item()
              for name in theirs}  # fmt: skip
    errors[""] = abs(together - alone).item() / abs(alone.item())
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return (errors[worst] if errors[worst] == errors[worst] else float("inf")), worst


def _computing_in(dtype: torch.dtype) -> Any:
    return InFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def _width(model: Any) -> int:
    with torch.no_grad():
        return int(_hidden(model, torch.tensor([[7]])).shape[-1])


def _hidden(model: Any, input_ids: Tensor, **more: Any) -> Tensor:
    hidden: Tensor = model(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), found)}  # fmt: skip


def first_difference(model: Any, attach: Attach, case: Case, most: float) -> str | None:
    """The first layer of Transformers, in the order in which they end, whose output for some row differs by more than `most`
    once `model` is patched: its path and class. None: no output does."""
    seen: dict[tuple[str, int], Tensor] = {}
    counts: dict[str, int] = {}

    def keep(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            counts[name] = counts.get(name, -1) + 1
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                seen[name, counts[name]] = first.detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]

    def outputs_of(**batch: Any) -> dict[tuple[str, int], Tensor]:
        seen.clear()
        counts.clear()
        _hidden(model, **batch)
        return dict(seen)

    with torch.no_grad(), _computing_in(next(model.parameters()).dtype):
        alone = [outputs_of(input_ids=torch.tensor([row])) for row in case.rows]
        attach(model)
        together = outputs_of(**case.batch())
    for handle in handles:
        handle.remove()
    for key, output in together.items():
        if any(_differs(output, theirs[key], case.layout, number, most)
               for number, theirs in enumerate(alone) if key in theirs):  # fmt: skip
            return _layer_of(model, key[0])
    return None


def _differs(output: Tensor, alone: Tensor, layout: Layout, number: int, most: float) -> bool:
    path = torch.as_tensor(layout.path(number)).long()
    output, alone = (values.squeeze(0) if values.dim() > 2 and len(values) == 1 else values for values in (output, alone))
    if len(output) != layout.num_tokens or len(alone) != len(path) or output.shape[1:] != alone.shape[1:]:
        return False  # not by tokens
    error, size = (output[path] - alone).norm(), alone.norm()
    return bool(error > most * torch.clamp(size, min=1e-6)) or not bool(torch.isfinite(error))


def _layer_of(model: Any, path: str) -> str:
    """The innermost layer of Transformers around the module, as its path and class."""
    while "." in path and not type(model.get_submodule(path)).__module__.startswith("transformers."):
        path = path.rpartition(".")[0]
    return f"{path} ({type(model.get_submodule(path)).__name__})"


def _proven_itself(backbone: Any, attach: Attach, reason: str) -> verdicts.Verdict:
    """The proof of a model of which there is no small copy: on the model itself, without gradients. It is left as it was."""
    own = f"no small copy can be made ({reason}), and the model itself "
    first = next(backbone.parameters())
    if first.device.type == "meta":
        return verdicts.Verdict(own + "has no weights yet: patch it once it has")
    longest = longest_window(original_of(backbone.config).to_dict())
    if longest > _MOST_TOKENS:
        return verdicts.Verdict(own + f"would need rows longer than a window or chunk of {longest} tokens")
    case = Case.of(_longer_rows(longest))
    try:
        with torch.inference_mode(False), torch.no_grad():
            error = _error_of_outputs(backbone, attach, case, first.device)
    except Exception as failure:  # whatever any model may do
        return verdicts.Verdict(own + f"fails on trees: {_told(failure)}")
    if not error <= 100 * torch.finfo(first.dtype).eps:
        return verdicts.Verdict(own + f"is wrong on trees, by {error:.1g}")
    warnings.warn(f"espalier.hf.patch: {type(backbone).__name__} is proven on the model itself, without gradients: no small "
                  f"copy can be made ({reason})", stacklevel=2)  # fmt: skip
    return verdicts.Verdict()


def _longer_rows(length: int) -> list[list[int]]:
    """ROWS with a trunk that is longer than `length`."""
    lead = [3 + number * 7 % 40 for number in range(length)]
    return [lead + row if row[:len(_TRUNK)] == _TRUNK else row for row in ROWS]


def _error_of_outputs(backbone: Any, attach: Attach, case: Case, device: Any) -> float:
    given = backbone.__dict__.get("_espalier")
    if given is None:
        alone = [_hidden(backbone, torch.tensor([row], device=device))[0] for row in case.rows]
        attach(backbone)
    else:  # a copy of a patched model
        with given.rest.here():
            alone = [_hidden(backbone, torch.tensor([row], device=device))[0] for row in case.rows]
        given.is_proven = True
    try:
        together = _hidden(backbone, **case.batch(device))
    finally:
        if given is None:
            backbone._espalier.detach(backbone)
            del backbone._espalier
        else:
            given.is_proven = False
    errors = [(together[number, :len(row)] - alone[number]).norm() / alone[number].norm()
              for number, row in enumerate(case.rows)]  # fmt: skip
    return float(torch.stack(errors).max())


def _told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
