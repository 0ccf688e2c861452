# SPDX-License-Identifier: Apache-2.0
"""The head and the loss of a patched model, once for each distinct token instead of once for each row.

A patched model with a head has a Head as its forward. It tells the backbone which rows the batch is made of, and runs the
forward of Transformers. Where the head can be shared, the backbone gives that the hidden states of distinct tokens alone
(asked.py), and results are made into those of the rows. With labels the loss is that of Transformers' ForCausalLMLoss, of the
distinct (token, label) pairs, weighted by how often they occur.
"""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils
from transformers.loss import loss_utils

from . import fused_head, liger, text_rows
from .asked import Asked, Given, asked_of, asking
from .attention import as_autocast
from .changes import hooks_of
from .deferred_logits import Deferred, with_deferred
from .dropout import has_dropout
from .families import FAMILIES, backbone_of, unwrapped
from .head_state import HeadState
from .heads import edge_logprobs, logit_scale
from .origin import is_library_code
from .run import Expand

CACHED = ("past_key_values", "cache_params", "cache", "use_cache")
_GATHERING = ("torch.distributed.", "deepspeed.")  # whose hooks gather parameters
OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")


def attach(model: Any, backbone: Any) -> None:
    """Gives the head of `model`, which may be wrapped, its Head; does nothing where it has none, or has it already, and where
    another library has set a forward that the tests do not cover, unless that drops position_ids."""
    inner = unwrapped(model)
    if inner is backbone or _head_of(inner) is not None:
        return
    own = inner.__dict__.get("forward")
    if own is None or _is_tested(own) or "position_ids" not in inspect.signature(type(inner).forward).parameters:
        inner.forward = Head(inner, own)


def detach(model: Any) -> None:
    """Takes that back. A Head that another library has wrapped does nothing any more."""
    inner = unwrapped(model)
    head = _head_of(inner)
    if head is None:
        return
    if head.stock is None:
        del inner.forward
    else:
        inner.forward = head.stock


def foreign_forward(inner: Any) -> Any:
    """The forward that another library has set on a model; None where there is none, or Liger's, which only adds a loss."""
    head = _head_of(inner)
    forward = inner.__dict__.get("forward") if head is None else head.stock
    return None if liger.is_fused(forward) else forward


def attach_around_liger(inner: Any, backbone: Any) -> None:
    """Gives a patched model its Head again where Liger has set a forward since."""
    if inner is not None and liger.is_fused(inner.__dict__.get("forward")):
        attach(inner, backbone)


def _head_of(inner: Any) -> "Head | None":
    """The Head of a model; None where it has none, or another library has wrapped it."""
    forward = inner.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)  # Accelerate binds what it unwraps
    return forward if isinstance(forward, Head) else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _may_be_shared(inner: Any, own: Any, backbone: Any, batch: Mapping[str, Any]) -> bool:
    """Whether the tests cover the forward of a model: the proof of other families looks at backbones alone, and a head may shift
    labels in another way. Liger's shifts them in the same way for all, and a small copy says whether logits are plain."""
    is_covered = backbone.config.model_type in FAMILIES
    if liger.is_fused(own or type(inner).forward):
        if not liger.is_served(batch):
            return False
        is_covered = is_covered or backbone._espalier.around_of(inner).has_plain_head(backbone)
    return is_covered and _is_known(inner) and (own is None or _is_tested(own))


def _is_tested(own: Any) -> bool:
    return fused_head.is_tested(own) or liger.is_fused(own)


def _is_known(inner: Any) -> bool:
    """Whether it is a causal language model of Transformers with the forward that Transformers has given it."""
    if not isinstance(inner, PreTrainedModel):
        return False
    named = any(cls.__name__.endswith("ForCausalLM") and cls.__module__.startswith("transformers.models.")
                for cls in type(inner).__mro__)  # fmt: skip
    if named and liger.is_fused(type(inner).forward):
        return True
    return named and str(inspect.unwrap(type(inner).forward).__globals__["__name__"]).startswith("transformers.models.")


class Head:
    """What a patched model with a head has as its forward. Does not keep the model alive; copies of the model and what is
    unpickled have their own.

    stock  a forward that was set on the model itself before; None where there was none"""

    def __init__(self, model: Any, stock: Callable[..., Any] | None) -> None:
        self._model = weakref.ref(model)
        self.stock = stock
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # bound to a model, as Accelerate does to what it unwraps
            return forward(args[0], self.stock, *args[1:], **kwargs)
        return forward(self._model(), self.stock, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        return Head(memo[id(self._model())], copy.deepcopy(self.stock, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Head, (self._model(), self.stock)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def forward(model: Any, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched model with a head. own: as Head.stock."""
    stock = functools.partial(type(model).forward, model) if own is None else own
    backbone = torch.compiler.disable(backbone_of)(model)
    given = backbone.__dict__.get("_espalier")
    if given is None or given.rest.is_entered() or asked_of(backbone) is not None:
        return stock(*args, **kwargs)
    batch = _named(model, args, kwargs)
    if batch is None or "espalier_tree" in batch or any(batch.get(name) for name in CACHED):
        return stock(*args, **kwargs)
    with text_rows.of_head(backbone, batch):
        is_shared = given.look(backbone, batch.get("input_ids")) is None
        if is_shared and _may_be_shared(model, own, backbone, batch) and _may_share(model, backbone):
            if own is not None and kwargs.get("fused_lm_head"):
                return fused_head.forward(backbone, given.forest_of, own, args, kwargs)
            if isinstance(batch.get("input_ids"), Tensor) and batch["input_ids"].dim() == 2:
                call = _Call(model, backbone, stock, batch, given.skip_logits)
                output = call.with_loss() if "labels" in batch else call.with_logits()
                if output is not None:
                    return output
        return stock(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _may_share(model: Any, backbone: Any) -> bool:
    """Whether nobody looks at what goes from the backbone to the head, or changes it, but FSDP2 and ZeRO 3, which do not mind,
    and the head drops nothing of it."""
    head = model.get_output_embeddings()
    if head is None or any(map(has_dropout, head.modules())) or not backbone._espalier.may_share_head(model, backbone):
        return False
    return not any(_has_hooks(module) for module in (backbone, *head.modules()))


def _has_hooks(module: Any) -> bool:
    return any(not str(getattr(hook, "__module__", "")).startswith(_GATHERING) for hook in hooks_of(module))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments that are not None by their names; None where they do not fit, as the model itself will say."""
    try:
        return text_rows.named_arguments(model, args, kwargs)
    except (TypeError, ValueError):  # or a forward without a signature
        return None


class _Call:
    """One forward pass of a model with a head."""

    def __init__(self, model: Any, backbone: Any, stock: Callable[..., Any], batch: dict[str, Any], skips: bool) -> None:
        self.model, self.backbone, self.stock, self.batch, self.skips = model, backbone, stock, batch, skips
        self.shape = batch["input_ids"].shape
        self.returns_dict = bool(batch.get("return_dict", getattr(backbone.config, "return_dict", True)))
        self.num_keep = batch.get("logits_to_keep", 0)
        self.is_fused = liger.is_fused(getattr(stock, "func", stock))
        ours = (*OF_THE_LOSS, "logits_to_keep", "return_dict", *(liger.OPTIONS if self.is_fused else ()))
        self.inputs = {name: value for name, value in batch.items() if name not in ours} | {"return_dict": True}

    def with_logits(self) -> Any:
        """The output without labels."""
        places = _kept(self.shape, self.num_keep)
        asked = Asked(self.backbone, places.reshape(-1))
        with asking(asked):
            output = self.stock(**self.inputs)
        output.logits = _of_rows(output.logits[0], asked.found, places.shape)
        return output if self.returns_dict else output.to_tuple()

    def with_loss(self) -> Any:
        """The output with the loss of the labels; None where that is not the loss that is known here."""
        targets = self._targets()
        if targets is None:
            return None
        places = np.flatnonzero(targets != self.batch.get("ignore_index", -100))
        wanted = targets[places]
        if len(places) == 0 or wanted.min() < 0 or wanted.max() >= self.model.config.vocab_size:
            return None
        head = plain_head(self.model, self.batch["input_ids"].device)
        asked = Asked(self.backbone, places, held_back=head is not None)
        with asking(asked):
            output = self.stock(**self.inputs)
        if output.logits.shape[-1] != self.model.config.vocab_size:
            return None
        edges = Edges.of(asked.found, wanted, asked.hidden.device)
        if head is None:
            logprobs = edges.of_logits(output.logits[0])
        else:
            logprobs = edges.of_hidden(asked.hidden, head, logit_scale(self.model))
        loss = self._loss(logprobs, edges, len(places))
        aux_loss = getattr(output, "aux_loss", None)
        if aux_loss is not None:
            loss = loss + self.model.router_aux_loss_coef * aux_loss.to(loss.device)
        output = with_deferred(output, loss=loss, logits=None if self._skips_logits() else self._deferred(asked, output.logits))
        return output if self.returns_dict else output.to_tuple()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _targets(self) -> NDArray[np.int64] | None:
        """[B * S]: the label of the prediction at each place, where the loss is that of Transformers; else None."""
        if not isinstance(self.num_keep, int) or self.num_keep != 0 or not _is_stock_loss(self.model):
            return None
        ignored = self.batch.get("ignore_index", -100)
        labels, shifted = self.batch["labels"], self.batch.get("shift_labels")
        if shifted is not None:
            return shifted.detach().cpu().long().numpy().reshape(-1) if shifted.numel() == self.shape.numel() else None
        if labels.shape != self.shape:
            return None
        return nn.functional.pad(labels.detach().cpu().long(), (0, 1), value=ignored)[..., 1:].numpy().reshape(-1)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _loss(self, logprobs: Tensor, edges: "Edges", num_labels: int) -> Tensor:
        total = -(logprobs * edges.counts.to(logprobs.dtype)).sum()
        number = self.batch.get("num_items_in_batch", num_labels)
        return (total / (number.to(total.device) if isinstance(number, torch.Tensor) else number)).float()

    def _skips_logits(self) -> bool:
        by_liger = self.is_fused and self.batch.get("skip_logits", self.model.training)
        return bool(by_liger or (self.skips and self.model.training))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _deferred(self, asked: Asked, sample: Tensor) -> Deferred:
        """The logits of all places, as the model computes them. sample: logits of some of them, maybe none."""
        kind = asked.values.device.type
        is_cast, dtype, has_graph = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_grad_enabled()
        inputs = {"input_ids": self.batch["input_ids"], "use_cache": False, "return_dict": True}
        if "output_router_logits" in inspect.signature(type(self.model).forward).parameters:
            inputs["output_router_logits"] = False

        values, index, output_class, backbone, shape = asked.values, asked.index, asked.output_class, self.backbone, self.shape
        state = HeadState(self.model)

        def compute() -> Tensor:
            model = state.model()
            with torch.set_grad_enabled(has_graph), torch.autocast(kind, dtype=dtype, enabled=is_cast):
                hidden = torch.cat([values, values.new_zeros(1, values.shape[1])])
                with asking(Given(backbone, hidden, output_class)):
                    logits: Tensor = _of_rows(type(model).forward(model, **inputs).logits[0], index, shape)
                    return logits.detach() if state.is_copy else logits

        return Deferred(compute, torch.Size([*shape, sample.shape[-1]]), sample.dtype, values.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_stock_loss(model: Any) -> bool:
    """Whether the loss of `model` is cross-entropy as Transformers and PyTorch have it, replaced by nobody at any level."""
    return (is_library_code(model.loss_function, "ForCausalLMLoss")
            and is_library_code(loss_utils.fixed_cross_entropy, "fixed_cross_entropy")
            and is_library_code(loss_utils.nn.functional.cross_entropy, "cross_entropy"))  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _kept(shape: torch.Size, keep: Any) -> NDArray[np.int64]:
    """The places of a batch [B, S] whose logits are wanted, in the shape of the logits without the vocabulary."""
    places = torch.arange(shape.numel(), device="cpu").view(*shape, 1)
    return slice_of(places, keep.detach().cpu() if isinstance(keep, torch.Tensor) else keep).squeeze(-1).numpy()


def slice_of(values: Tensor, keep: Any) -> Tensor:
    """What of values [B, S, H] Transformers gives to a head with `logits_to_keep`."""
    if hasattr(modeling_utils, "slice_logits_to_keep"):
        return modeling_utils.slice_logits_to_keep(values, keep)
    return values[:, slice(-keep, None) if isinstance(keep, int) else keep, :]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_rows(values: Tensor, found: NDArray[np.int64], shape: Any) -> Tensor:
    """values [P, V] at each of the places, [*shape, V]."""
    if not np.array_equal(found, np.arange(len(values))):
        index = torch.from_numpy(found).to(values.device)
        values = Expand.apply(values, index)  # type: ignore[no-untyped-call]
    return values.view(*shape, values.shape[-1])


@dataclass(frozen=True)
class Edges:
    """Distinct pairs of a token and a label: row [E] int64, ascending, target [E] int64, and counts [E] int64, how often each
    occurs."""

    row: Tensor
    target: Tensor
    counts: Tensor

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(rows: NDArray[np.int64], targets: NDArray[np.int64], device: torch.device) -> "Edges":
        size = int(targets.max()) + 1
        pairs, counts = np.unique(rows * size + targets, return_counts=True)
        row, target = np.divmod(pairs, size)
        return Edges(*(torch.from_numpy(each).to(device) for each in (row, target, counts)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of_logits(self, logits: Tensor) -> Tensor:
        """Log-probabilities [E] by logits [P, V]."""
        logits = logits.float()
        return logits[self.row, self.target] - torch.logsumexp(logits, -1)[self.row]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of_hidden(self, hidden: Tensor, linear: nn.Linear, scale: float) -> Tensor:
        """Log-probabilities [E] by hidden states [P, H], without logits."""
        found: Tensor = edge_logprobs(hidden, linear, self.row, self.target, logit_scale=scale)
        return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def plain_head(model: Any, device: torch.device) -> nn.Linear | None:
    """The head of `model` where espalier.ops can compute its log-probabilities without logits on `device`; else None. Logits are
    logit_scale(model) times what it gives."""
    config, linear = model.base_model.config, _active(model.get_output_embeddings())
    if type(linear).forward is not nn.Linear.forward:
        return None
    hooks = (*linear._forward_hooks.values(), *linear._forward_pre_hooks.values())  # of FSDP2, which gathers the weights there
    if "forward" in linear.__dict__ or hooks or type(linear.weight) not in (Tensor, nn.Parameter):
        return None
    (sample,) = as_autocast(linear.weight[:0])
    is_served = sample.dtype in (torch.float64, torch.float32, torch.bfloat16) and sample.device.type == device.type
    if not is_served or len(linear.weight) != config.vocab_size:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("espalier::edge_logprobs", device.type.upper())
    return linear if has_kernel else None


def _active(head: Any) -> Any:
    """The linear layer inside of PEFT's modules_to_save; any other head itself."""
    if type(head).__name__ != "ModulesToSaveWrapper":
        return head
    names = head.active_adapters
    if head.disable_adapters or not names:
        return head.original_module
    return head.modules_to_save[names[0]] if len(names) == 1 and names[0] in head.modules_to_save else head
