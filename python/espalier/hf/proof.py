# SPDX-License-Identifier: Apache-2.0
"""The proof that trees are exact for a model: a small copy of it, patched against unpatched, before its first batch.

It decides for every family and version of Transformers that the tests do not cover."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported, in_one_line
from ..trees import Layout, build
from . import verdicts, versions
from .changes import Change, NotCarriedOver, Role, Snapshot, carry_over, cure_of, functions_of
from .config_view import original_of
from .families import FAMILIES
from .float64 import InFloat64, OnCpu
from .for_now import with_values
from .gpu_kernels import naming_layers, what_needs_a_gpu
from .plain_layers import by_torch, by_torch_on_cpus
from .reference import gradients_of, rows_alone, without_gradients, without_renorm
from .small_copy import NotSmall, longest_window, small_model

MAX_ERROR = 1e-6  # relative; exact models are at 1e-12, and mistakes above 1e-3
MAX_ERROR_OF_CHANGES = 1e-9  # their mistakes may be of any size
MAX_ERROR_IN_FLOAT32 = 1e-4  # where layers compute in nothing wider
_MOST_TOKENS = 2048  # of a row by which a model itself is proven
_MOST_NOISE = 1000  # units of rounding of the dtype, of a deep model
_MOST_OF_NOISE = 8  # errors on trees are of that size where rounding is all

_TRUNK = [7, 13, 41, 5, 19, 2]
# As many tokens each, so that a batch of them has no padding.
EQUAL_ROWS = [[*_TRUNK, 11, 4, 30, 12], [*_TRUNK, 11, 4, 9, 9], [*_TRUNK, 17, 8, 22, 6]]
# Branches next to each other, shorter than windows and kernels; single tokens; rows longer than windows; rows in rows.
ROWS = [[*_TRUNK, 11, 4, 30, 12, 6, 8], [*_TRUNK, 11, 4, 9, 9, 22, 6], _TRUNK, [*_TRUNK, 40], [*_TRUNK, 17, 8],
        [*_TRUNK, 21], [5, 33, 21, 4], [5, 33, 14, 17, 2, 9, 30, 6, 12, 3, 41, 7, 22, 19, 1, 35], [5, 10], [29],
        _TRUNK]  # fmt: skip

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
        ids, mask = (torch.zeros(size, dtype=torch.int64, device="cpu") for _ in range(2))
        for number, row in enumerate(self.rows):
            ids[number, :len(row)], mask[number, :len(row)] = torch.tensor(row, device="cpu"), 1
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def is_known(backbone: Any) -> bool:
    """Whether the tests cover models like `backbone`, with all options of their config."""
    return versions.is_tested() and backbone.config.model_type in FAMILIES


def check_family(backbone: Any, attach: Attach, snapshot: Snapshot) -> None:
    """Raises Unsupported where the tests do not cover `backbone` with its code, and a small copy of it is not exact on trees.
    Takes a few seconds, once for each class, kind of config and code; then the verdict is known, in later processes as well."""
    changes = snapshot.of_role(Role.PATHS)
    if is_known(backbone) and not changes:
        return
    cls, config = _class_of(backbone), original_of(backbone.config)
    key = verdicts.key_of(cls, config, functions_of(snapshot))
    found = None if key is None else _verdicts.get(key) or verdicts.read(key)
    if found is None:
        found = _proven(backbone, attach, changes)
        if key is not None:
            verdicts.write(key, found)
    if key is not None and not found.may_pass and found.doubt is None:
        _verdicts[key] = found
    if found.doubt is not None:
        with naming_layers("espalier.hf.patch"):
            found = _proven_itself(backbone, attach, found.doubt)
    if found.fault is None:
        return
    if changes:
        first = next((change for change in changes if change.module is not None), changes[0])  # functions are their helpers
        raise Unsupported(f"espalier.hf.patch: expected layers for which trees are exact, received {first}, with which "
                          f"{found.fault}; {cure_of(first)}{versions.what_to_pin()}")  # fmt: skip
    raise Unsupported(f"espalier.hf.patch: expected a model for which trees are exact, received {cls.__name__} (model_type "
                      f"{config.model_type!r}) with Transformers {versions.VERSION}, of which "
                      f"{found.fault}{versions.what_to_pin()}")  # fmt: skip


def _class_of(backbone: Any) -> Any:
    """The class of a backbone, but for those that PyTorch derives from it (FSDP2)."""
    return next(cls for cls in type(backbone).__mro__ if not cls.__module__.startswith("torch."))


def _proven(backbone: Any, attach: Attach, changes: Sequence[Change]) -> verdicts.Verdict:
    cls, config = _class_of(backbone), original_of(backbone.config)

    def make() -> Any:
        model = small_model(cls, config)
        carry_over(changes, model)
        return model

    try:
        with _as_in_a_fresh_process():
            return _judged(make, attach, bool(changes))
    except (NotSmall, NotCarriedOver) as reason:
        return verdicts.Verdict(doubt=str(reason))
    except Unsupported as refusal:
        return verdicts.Verdict(f"a small copy is refused: {refusal}")
    except Exception as failure:  # whatever any model may do
        what = what_needs_a_gpu(failure)
        if what is None and not changes:
            return verdicts.Verdict(f"a small copy fails: {in_one_line(failure)}", may_pass=True)
        return verdicts.Verdict(doubt=what or f"it fails: {in_one_line(failure)}")


@contextlib.contextmanager
def _as_in_a_fresh_process() -> Iterator[None]:
    """Inside, models are made and run whatever the modes around are; random numbers are as before afterwards."""
    with (torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]), OnCpu(),
          torch.autocast("cpu", enabled=False), by_torch(), warnings.catch_warnings()):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


def _judged(make: Callable[[], Any], attach: Attach, is_changed: bool) -> verdicts.Verdict:
    """The verdict on the small models that `make` makes. is_changed: their code is not Transformers' own, which may look at whole
    batches: then a batch unpatched is compared with rows alone as well."""
    case, dtype, most = Case.of(ROWS), torch.float64, MAX_ERROR_OF_CHANGES if is_changed else MAX_ERROR

    def errors() -> tuple[float, float, str]:
        in_batch = error_of(make().to(dtype), lambda _: None, Case.of(EQUAL_ROWS))[0] if is_changed else 0.0
        return in_batch, *error_of(make().to(dtype), attach, case)

    try:
        in_batch, error, worst = errors()
    except Unsupported:
        raise
    except Exception:  # layers that know no float64 say so in many ways
        dtype, most = torch.float32, MAX_ERROR_IN_FLOAT32
        in_batch, error, worst = errors()
    reference = f"a small copy in {str(dtype).removeprefix('torch.')}"
    if not in_batch <= most:
        return verdicts.Verdict(f"a small copy, unpatched, gives rows other results in a batch than alone, by {in_batch:.1g}",
                                reference)  # fmt: skip
    if error <= most:
        return verdicts.Verdict(reference=reference)
    place = first_difference(make().to(dtype), attach, case, most) or f"none differs, but the gradient of {worst}"
    return verdicts.Verdict(f"a small copy is wrong on trees, by {error:.1g}; the first layer whose output differs: {place}",
                            reference)  # fmt: skip


def error_of(model: Any, attach: Attach, case: Case | None = None) -> tuple[float, str]:
    """(error, name of the parameter that has it): the largest relative error of the gradients of a loss, by parameter, and of
    the loss (""), of `model` on the rows, which are a batch once it is patched, against each row alone."""
    case = case or Case.of(ROWS)
    dtype = next(model.parameters()).dtype
    batch = case.batch()
    with torch.no_grad():
        width = _hidden(model, torch.tensor([[7]], device="cpu")).shape[-1]
    probe = torch.randn(*batch["input_ids"].shape, width, dtype=dtype, device="cpu")

    def measure(number: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        loss = (_hidden(model, ids)[0] * probe[number, :ids.shape[1]]).sum()
        return loss, loss

    with _computing_in(dtype):
        values, theirs = rows_alone(model, [torch.tensor([row], device="cpu") for row in case.rows], measure)
        attach(model)
        together = (_hidden(model, **batch) * probe * batch["attention_mask"].unsqueeze(-1)).sum()
        ours = gradients_of(model, together)
    loss = sum(value.item() for value in values)
    everything = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    errors = {name: ((ours[name] - theirs[name]).norm() / torch.clamp(theirs[name].norm(), min=1e-2 * everything)).item()
              for name in theirs}  # fmt: skip
    errors[""] = abs(together.item() - loss) / abs(loss)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return (errors[worst] if errors[worst] == errors[worst] else float("inf")), worst


def _computing_in(dtype: torch.dtype) -> Any:
    return InFloat64() if dtype == torch.float64 else contextlib.nullcontext()


def _hidden(model: Any, input_ids: Tensor, **more: Any) -> Tensor:
    hidden: Tensor = model(input_ids=input_ids, use_cache=False, **more).last_hidden_state
    return hidden


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

    def outputs_of(**batch: Any) -> dict[tuple[str, int], Tensor]:
        seen.clear()
        counts.clear()
        _hidden(model, **batch)
        return dict(seen)

    with torch.no_grad(), _computing_in(next(model.parameters()).dtype), contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(keep(name)))
        alone = [outputs_of(input_ids=torch.tensor([row], device="cpu")) for row in case.rows]
        attach(model)
        together = outputs_of(**case.batch())
    for key, output in together.items():
        if any(_differs(output, theirs[key], case.layout, number, most)
               for number, theirs in enumerate(alone) if key in theirs):  # fmt: skip
            return _layer_of(model, key[0])
    return None


def _differs(output: Tensor, alone: Tensor, layout: Layout, number: int, most: float) -> bool:
    path = torch.as_tensor(layout.path(number), device="cpu").long()
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


def _proven_itself(backbone: Any, attach: Attach, doubt: str) -> verdicts.Verdict:
    """The proof of a model of which there is no small copy: on the model itself, in its dtype and on its device, against the
    noise that rounding has there. It is left as it was."""
    own = f"no small copy can be made ({doubt}), and the model itself "
    first = next(backbone.parameters())
    if first.device.type == "meta":
        return verdicts.Verdict(own + "has no weights yet: patch it once it has")
    longest = longest_window(original_of(backbone.config).to_dict())
    if longest > _MOST_TOKENS:
        return verdicts.Verdict(own + f"would need rows longer than a window or chunk of {longest} tokens")
    case = Case.of(_longer_rows(longest))
    try:
        with (torch.inference_mode(False), by_torch_on_cpus(first.device), _computing_in(first.dtype),
              with_values((layer, "gradient_checkpointing", False) for layer in backbone.modules()
                          if getattr(layer, "gradient_checkpointing", False)),
              without_renorm(backbone), without_gradients(backbone)):  # fmt: skip
            error, noise = _error_on_device(backbone, attach, case, first.device)
    except Exception as failure:  # whatever any model may do
        if what_needs_a_gpu(failure) is not None:
            raise
        return verdicts.Verdict(own + f"fails on trees: {in_one_line(failure)}")
    epsilon = max(torch.finfo(first.dtype).eps, 1e-13)
    if not noise <= _MOST_NOISE * epsilon:
        return verdicts.Verdict(own + f"gives a token other results when other tokens follow it, by {noise:.1g}")
    if not error <= _MOST_OF_NOISE * max(noise, epsilon):
        return verdicts.Verdict(own + f"is wrong on trees, by {error:.1g}, where rounding explains {noise:.1g}")
    reference = f"the model itself in {str(first.dtype).removeprefix('torch.')}"
    warnings.warn(f"espalier.hf.patch: {type(backbone).__name__} is proven on {reference}: no small copy can be made ({doubt})",
                  stacklevel=2)  # fmt: skip
    return verdicts.Verdict(reference=reference)


def _longer_rows(length: int) -> list[list[int]]:
    """ROWS with trunks that are longer than `length`."""
    lead, other = ([start + number * 7 % 40 for number in range(length)] for start in (3, 4))
    return [lead + row if row[:len(_TRUNK)] == _TRUNK else other + row for row in ROWS]


def _error_on_device(backbone: Any, attach: Attach, case: Case, device: Any) -> tuple[float, float]:
    """(error, noise): the largest relative error of the outputs of a row, and of the gradients of the embeddings of tokens, on
    trees; and how far the outputs of tokens are apart in rows of different lengths."""
    patch = backbone.__dict__.get("_espalier")
    rows = [torch.tensor([row], device=device) for row in case.rows]
    with contextlib.nullcontext() if patch is None else patch.rest.here():
        outputs, gradients = zip(*[_with_embeddings(backbone, {"input_ids": row}) for row in rows], strict=True)
        equal = torch.tensor(EQUAL_ROWS, device=device)
        in_batch = _with_embeddings(backbone, {"input_ids": equal}, [equal.shape[1]] * len(equal))
        equal_alone = [_with_embeddings(backbone, {"input_ids": row.unsqueeze(0)}) for row in equal]
    was_on_trial, sharing = (False, None) if patch is None else (patch.is_on_trial, patch.sharing)
    attach(backbone)
    try:
        together, ours = _with_embeddings(backbone, case.batch(device), [len(row) for row in case.rows])
    finally:
        if patch is None:
            backbone._espalier.take_back(backbone)
            del backbone._espalier
        else:
            patch.is_on_trial, patch.sharing = was_on_trial, sharing
    errors = [(together[number, :len(row)] - outputs[number][0]).norm() / outputs[number].norm()
              for number, row in enumerate(case.rows)]  # fmt: skip
    if ours is not None:
        theirs = torch.zeros_like(ours[0], dtype=torch.float64)
        for number, gradient in enumerate(gradients):
            theirs.index_add_(0, torch.as_tensor(case.layout.path(number), device="cpu").long().to(device), gradient[0].double())
        errors.append((ours[0].double() - theirs).norm() / theirs.norm() / 4)
    for number, row in enumerate(equal_alone):
        errors += [(batch[number] - alone[0]).norm() / alone.norm() / slack
                   for batch, alone, slack in zip(in_batch, row, (1, 4), strict=True) if batch is not None and alone is not None]
    longest = max(range(len(rows)), key=lambda number: len(case.rows[number]))
    noise = [(outputs[number][0] - outputs[longest][0, :len(row)]).norm() / outputs[number].norm()
             for number, row in enumerate(case.rows) if case.rows[longest][:len(row)] == row]  # fmt: skip
    return float(torch.stack(errors).max()), float(torch.stack(noise).max())


def _with_embeddings(backbone: Any, batch: Mapping[str, Tensor], lengths: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
    """(hidden states, gradients by embeddings) of a loss that is the same for all arrangements of rows. None for gradients where
    embeddings are not called once."""
    leaves: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> Any:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    with backbone.get_input_embeddings().register_forward_hook(keep), torch.enable_grad():
        hidden = _hidden(backbone, **batch)
        if len(leaves) != 1 or not hidden.requires_grad:
            return hidden.detach(), None
        ids = batch["input_ids"]
        total: Tensor = sum(  # type: ignore[assignment]
            (hidden[number, :length] * _probe(ids[number, :length], hidden)).sum()
            for number, length in enumerate(lengths or [ids.shape[1]]))  # fmt: skip
        return hidden.detach(), torch.autograd.grad(total, leaves)[0]


def _probe(row: Tensor, like: Tensor) -> Tensor:
    """Random weights [n, H] of the tokens of a row, by what is in it."""
    seed = int((row.cpu() * torch.arange(1, 1 + len(row), device="cpu")).sum())
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(len(row), like.shape[-1], generator=generator, device="cpu").to(like)
