# SPDX-License-Identifier: Apache-2.0
"""The proof on a user's own model and batch: errors beside those of ordinary training, each row alone."""

import contextlib
import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..error_ratio import MAX_RATIO, error_ratio
from ..errors import Unsupported, in_one_line
from ..trees import Layout
from . import routes
from .decisions import Own, RouterChoices, gradients_through_clamps
from .dropout import switched_off
from .families import backbone_of, inside_trainer
from .float64 import InFloat64
from .gpu_kernels import naming_layers
from .patching import apply_patch, forest_of, patch_of, unpatch
from .plain_layers import by_torch_on_cpus
from .reference import gradients_of, moved_by_rounding, rows_alone, to_float64
from .resting import Rest
from .rows import Rows
from .tensor_parallel import check_whole

MIN_VALUES = 256  # errors of fewer are a matter of luck, so they are judged together
VANISHING = 1e-6  # a gradient so small beside all others is rounding alone
MAX_RATIO_TO_NOISE = 8  # rounding of weights alone is less than that of all operations
FLIPS = 8  # so many choices of experts more or less are a matter of luck


class VerificationError(AssertionError):
    """A patched model is less exact than ordinary training; the message is the report.

    Examples:
        >>> import espalier
        >>> issubclass(espalier.hf.VerificationError, AssertionError)
        True
    """


@dataclass(frozen=True)
class Judgement:
    """Root mean square errors against float64, relative to the exact values.

    Attributes:
        name: What is judged.
        patched: The error of the patched model.
        unpatched: The error of the unpatched model.
        roundoff: The unit roundoff of the model's dtype.
        num_values: Values that the errors are of.
    """

    name: str
    patched: float
    unpatched: float
    roundoff: float
    num_values: int

    @property
    def ratio(self) -> float:
        """The error of the patched model over that of the unpatched one, both at least half a roundoff."""
        return error_ratio(self.patched, self.unpatched, self.roundoff)


@dataclass(frozen=True)
class Flips:
    """Choices of experts, for each token of the forest and each router, that differ from those in float64.

    Attributes:
        patched: Choices of the patched model that differ.
        unpatched: Choices of the unpatched model that differ.
        num_choices: All choices.
    """

    patched: int
    unpatched: int
    num_choices: int
    name = "choices of experts"

    @property
    def ratio(self) -> float:
        """The flips of the patched model over those of the unpatched one, eight more each."""
        return (self.patched + FLIPS) / (self.unpatched + FLIPS)


@dataclass(frozen=True)
class Report:
    """What `verify` has found: `passed`, `check()`, or print it.

    Attributes:
        flat_tokens: Tokens of the rows of the batch.
        tree_tokens: Those of their forest.
        losses: Means of -log p: "exact" (float64), "unpatched", "patched".
        logprobs: The Judgement of the log-probabilities of labels: root mean square errors against float64 of the patched and
            of the unpatched model, relative to the exact values, and their ratio.
        gradients: A Judgement of the parameters of each kind of module.
        flips: Choices of experts that differ from those in float64; None for a model without routers.
        no_float64: Why there is no reference in float64: what a layer said, such as a kernel of another library. Then "exact" is
            the unpatched model in its own dtype, and "unpatched" a copy with each weight moved by one unit of rounding, so that
            errors are compared with what rounding does. None: there is one.

    Examples:
        >>> report = espalier.hf.verify(model, {"input_ids": torch.tensor([[11, 12, 13], [11, 12, 14]])})
        >>> report.check() is report, report.tree_tokens
        (True, 4)
    """

    flat_tokens: int
    tree_tokens: int
    losses: dict[str, float]  # mean of -log p: "exact" (float64), "unpatched", "patched"
    logprobs: Judgement
    gradients: tuple[Judgement, ...]  # Judgements of the parameters of each kind of module
    flips: Flips | None  # None for a model without routers
    no_float64: str | None = None  # why there is no reference in float64

    @property
    def worst(self) -> Judgement | Flips:
        """The Judgement, or Flips, of the highest ratio."""
        judged: list[Judgement | Flips] = [self.logprobs, *self.gradients]
        judged += [] if self.flips is None else [self.flips]
        return max(judged, key=lambda each: each.ratio)

    @property
    def passed(self) -> bool:
        """Whether no ratio is above 2, or above 8 without a reference in float64."""
        return self.worst.ratio <= self._most

    @property
    def _most(self) -> float:
        return MAX_RATIO if self.no_float64 is None else MAX_RATIO_TO_NOISE

    def check(self) -> "Report":
        """Raises unless the report has passed.

        Returns:
            The report.

        Raises:
            VerificationError: An error is more than twice that of the unpatched model.

        Examples:
            >>> espalier.hf.verify(model, batch).check()   # doctest: +SKIP
        """
        if not self.passed:
            raise VerificationError(f"expected errors of at most {self._most:g} times those of the unpatched "
                                    f"model\n{self}")  # fmt: skip
        return self

    def __str__(self) -> str:
        lines = [f"flat tokens / tree tokens     {self.flat_tokens:,} / {self.tree_tokens:,}"]
        lines += [f"loss, {kind:<23} {value:.9f}" for kind, value in self.losses.items()]
        if self.no_float64 is None:
            lines.append("relative errors against float64 (patched, unpatched, ratio)")
        else:
            lines.append(f"no layers in float64: {self.no_float64}")
            lines.append("relative errors against the unpatched model (patched, unpatched with rounded weights, ratio)")
        for judged in (self.logprobs, *sorted(self.gradients, key=lambda judged: -judged.ratio)):
            lines.append(f"  {judged.patched:.2e}  {judged.unpatched:.2e}  {judged.ratio:5.2f}  {judged.name}")
        if (flips := self.flips) is not None:
            lines.append(f"other experts than in float64, of {flips.num_choices:,} choices (patched, unpatched)")
            lines.append(f"  {flips.patched:8,}  {flips.unpatched:8,}")
        return "\n".join([*lines, "passed" if self.passed else f"FAILED: {self.worst.name}"])


@dataclass(frozen=True)
class Results:
    logprobs: Tensor  # [E] float64 on the CPU
    gradients: dict[str, Tensor]  # by name, float64 on the CPU


def verify(model: Any, batch: Mapping[str, Any]) -> Report:
    """Judges the patched model on a batch.

    The same losses, means of -log p over the labels, and gradients of all parameters that require them are computed three
    times: by a copy of the model in float64, unpatched, each row alone; by the model unpatched, each row alone; and by the
    model patched, the batch at once. The model is left as it was, its `grad` too. Needs memory for the copy and the gradients.

    In low precision routers of a mixture of experts choose other experts than in float64, where scores are close. In the
    comparison all take the experts that float64 chooses, and how often a router would have chosen others (a flip) is counted:
    patched, at most twice as often as unpatched, where eight more each are left to luck. Gradients of experts with a clamp
    (gpt-oss) are taken as if they passed it everywhere, in all three. Recorded routes (routed_experts) are taken by all three
    as well, patched as they are replayed in training; nothing is counted for them. A model that was patched with
    dropout="shared" is compared without dropout and noise. Where hooks have batches run unshared, all three run the batch as it
    is. On a CPU recurrent layers compute by PyTorch in all three, whatever libraries for GPUs are there. Where layers know no
    float64, as kernels of other libraries, errors are compared with those that weights moved by one unit of rounding give, and
    the report says so.

    Args:
        model: A model as `patch` takes it, patched or not.
        batch: A dict of input_ids [B, S] and optionally attention_mask, position_ids, routed_experts and labels (as a head
            would take them, -100 for no loss; all tokens by default).

    Returns:
        A Report: it has passed where no error against float64, over a few hundred values or more, is above twice that of the
        unpatched model.

    Raises:
        Unsupported: As `patch` does, and for models whose output has no logits.

    Examples:
        >>> espalier.hf.verify(model, {"input_ids": torch.tensor([[11, 12, 13], [11, 12, 14]])}).passed
        True
    """
    model = inside_trainer(model)
    backbone = backbone_of(model)
    check_whole(model, "espalier.hf.verify")
    before = patch_of(backbone)
    is_dropping = before is not None and before.dropout is not None
    with (torch.enable_grad(), switched_off(model) if is_dropping else contextlib.nullcontext(),
          naming_layers("espalier.hf.verify"), by_torch_on_cpus(next(backbone.parameters()).device)):  # fmt: skip
        twin = unpatch(copy.deepcopy(model))
        try:
            if before is None:
                apply_patch(model)
            reason = backbone._espalier.look(backbone, batch.get("input_ids"))
            comparison = (_Unshared if reason else _Shared)(model, batch)
            return comparison.report(twin)
        finally:
            if before is None:
                unpatch(model)


class _Shared:
    """The comparison of a model whose batches run on trees with each row alone."""

    def __init__(self, model: Any, batch: Mapping[str, Any]) -> None:
        self.model, self.backbone, self.batch = model, backbone_of(model), batch
        arguments = dict(batch)
        if routes.NAME in batch:
            arguments[routes.NAME] = routes.checked_routes(self.backbone, batch)
        self.rows, self.layout = forest_of(arguments)
        self.edges = Edges(self.rows, batch, self.layout)
        recorded = None
        if routes.NAME in batch:
            recorded = routes.of_batch(self.backbone, arguments[routes.NAME], self.rows.places, self.layout)
        self.choices = RouterChoices(self.backbone, self.layout.num_tokens, recorded)

    def report(self, twin: Any) -> Report:
        """twin: an unpatched copy of the model."""
        rest: Rest = self.backbone._espalier.rest
        exact, failure = self._exact(twin)
        with rest.everywhere(), gradients_through_clamps(self.model), self.choices.taken(self.backbone) as own:
            unpatched = self._unpatched(self.model, own)
        if exact is None:
            exact, unpatched = unpatched, self._with_moved_weights()
        with gradients_through_clamps(self.model), self.choices.without_recorded().taken(self.backbone) as patched_own:
            patched_own.begin(range(self.layout.num_tokens))
            patched = _of_batch(self.model, self.edges, self.batch)
        flips = Flips(patched_own.num_different(), own.num_different(), self.choices.num_free)
        return self._judged(exact, unpatched, patched, failure, flips if flips.num_choices else None)

    def _exact(self, twin: Any) -> tuple[Results | None, str | None]:
        """(results in float64, None), or (None, why there are none): kernels of some libraries know no float64."""
        try:
            to_float64(twin)
            with (torch.autocast(self.batch["input_ids"].device.type, enabled=False), InFloat64(), gradients_through_clamps(twin),
                  self.choices.taken(backbone_of(twin)) as own):  # fmt: skip
                return self._unpatched(twin, own), None
        except (Unsupported, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as failure:  # whatever layers of other libraries say
            return None, in_one_line(failure)

    def _with_moved_weights(self) -> Results:
        """Results of an unpatched copy whose weights are each moved by one unit of rounding: how far rounding goes."""
        twin = moved_by_rounding(unpatch(copy.deepcopy(self.model)))
        with gradients_through_clamps(twin), self.choices.taken(backbone_of(twin)) as own:
            return self._unpatched(twin, own)

    def _unpatched(self, model: Any, own: Own) -> Results:
        return _of_rows(model, self.edges, own)

    def _judged(self, exact: Results, unpatched: Results, patched: Results, failure: str | None, flips: Flips | None) -> Report:
        roundoff = torch.finfo(next(self.backbone.parameters()).dtype).eps / 2
        logprobs = _judged("log-probabilities of labels", patched.logprobs, unpatched.logprobs, exact.logprobs, roundoff)
        losses = {name: result.logprobs.mean().neg().item()
                  for name, result in (("exact", exact), ("unpatched", unpatched), ("patched", patched))}  # fmt: skip
        gradients = _judged_gradients(patched, unpatched, exact, roundoff)
        return Report(len(self.rows.tokens), self.layout.num_tokens, losses, logprobs, gradients, flips, failure)


class _Unshared(_Shared):
    """The comparison of a model whose batches run unshared with the unpatched model on the same batch."""

    def __init__(self, model: Any, batch: Mapping[str, Any]) -> None:
        super().__init__(model, batch)
        self.choices = RouterChoices(nn.Module(), 0)  # all routers choose

    def _unpatched(self, model: Any, own: Own) -> Results:
        return _of_batch(model, self.edges, self.batch)


class Edges:
    """The labelled tokens of a batch and what predicts them: of each row its tokens [1, n], the indices in it of the
    labels, their places in the batch, and those of its tokens in the forest."""

    def __init__(self, rows: Rows, batch: Mapping[str, Any], layout: Layout) -> None:
        ids = batch["input_ids"].reshape(-1)
        labels = batch.get("labels", batch["input_ids"]).detach().cpu().reshape(-1)
        self.rows = []
        for number, (begin, end) in enumerate(zip(rows.offsets, rows.offsets[1:])):
            places = torch.from_numpy(rows.places[begin:end])
            labelled = (1 + torch.nonzero(labels[places[1:]] != -100).squeeze(1)).to(ids.device)
            places = places.to(ids.device)
            self.rows.append((ids[places].unsqueeze(0), labelled, places, layout.path(number)))
        self.count = sum(len(labelled) for _, labelled, *_ in self.rows)
        if self.count == 0:
            raise Unsupported("labels: expected at least one token with a loss that is not the first of its row, "
                              "received none")  # fmt: skip


def _of_rows(model: Any, edges: Edges, own: Own) -> Results:
    """Results of each row alone. own: of its routers."""

    def measure(number: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        _, labelled, _, path = edges.rows[number]
        own.begin(path)
        found = _logprobs(_logits(model, {"input_ids": ids})[0], ids[0], labelled - 1, labelled)
        return found, -found.sum() / edges.count

    values, gradients = rows_alone(model, [ids for ids, *_ in edges.rows], measure)
    return Results(torch.cat(values), gradients)


def _of_batch(model: Any, edges: Edges, batch: Mapping[str, Any]) -> Results:
    """Results of the batch at once."""
    logits = _logits(model, {name: value for name, value in batch.items() if name != "labels"}).flatten(0, 1)
    ids = batch["input_ids"].reshape(-1)
    found = torch.cat([_logprobs(logits, ids, places[labelled - 1], places[labelled])
                       for _, labelled, places, _ in edges.rows])  # fmt: skip
    return Results(found.detach().cpu().double(), gradients_of(model, -found.sum() / edges.count))


def _logits(model: Any, arguments: Mapping[str, Any]) -> Tensor:
    logits: Tensor | None = getattr(model(**arguments), "logits", None)
    if logits is None or logits.dim() != 3:
        raise Unsupported(f"espalier.hf.verify: expected a model with a head that gives logits [B, S, V], received "
                          f"{type(model).__name__}")  # fmt: skip
    return logits


def _logprobs(logits: Tensor, ids: Tensor, predicting: Tensor, predicted: Tensor) -> Tensor:
    """Of tokens ids[predicted], each by logits[predicting]; in float32 at least."""
    rows = logits[predicting].to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(rows, -1).gather(1, ids[predicted].long().unsqueeze(1)).squeeze(1)


def _judged(name: str, patched: Tensor, unpatched: Tensor, exact: Tensor, roundoff: float,
            least: float = 0.0) -> Judgement:  # fmt: skip
    scale = max(_size(exact), least)
    patched_error, unpatched_error = (_size(found - exact) / (scale or 1.0) for found in (patched, unpatched))
    return Judgement(name, patched_error, unpatched_error, roundoff, exact.numel())


def _size(values: Tensor) -> float:
    """Root of the mean square."""
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def _judged_gradients(patched: Results, unpatched: Results, exact: Results, roundoff: float) -> tuple[Judgement, ...]:
    """Parameters of one kind of module in all layers are judged together, and modules of few values as one: errors of
    parameters that follow from a few sums are a matter of luck. Each parameter's error is relative to its own size."""
    squares = sum(gradient.square().sum().item() for gradient in exact.gradients.values())
    everything = math.sqrt(squares / sum(gradient.numel() for gradient in exact.gradients.values()))
    modules: dict[str, list[Judgement]] = {}
    for name, gradient in exact.gradients.items():
        least = everything if _size(gradient) <= VANISHING * everything else 0.0
        judged = _judged(name, patched.gradients[name], unpatched.gradients[name], gradient, roundoff, least)
        modules.setdefault(re.sub(r"\.\d+\.(\w+)\..*", r".*.\1", name), []).append(judged)
    result: list[Judgement] = []
    few: list[Judgement] = []
    for name, parts in modules.items():
        if sum(map(_weight, parts)) < MIN_VALUES:
            few += parts
        else:
            result.append(_pooled(name, parts))
    return tuple(result + ([_pooled("parameters of few values", few)] if few else []))


def _weight(judged: Judgement) -> int:
    """What a parameter counts for in its module: large ones no more than others."""
    return min(judged.num_values, MIN_VALUES)


def _pooled(name: str, parts: Sequence[Judgement]) -> Judgement:
    total = sum(map(_weight, parts))

    def mean(kind: str) -> float:
        return math.sqrt(sum(_weight(part) * getattr(part, kind) ** 2 for part in parts) / total)

    num_values = sum(part.num_values for part in parts)
    return Judgement(name, mean("patched"), mean("unpatched"), parts[0].roundoff, num_values)
