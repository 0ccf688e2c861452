# SPDX-License-Identifier: Apache-2.0
"""Models whose heads and vocabulary are divided over ranks (tensor parallelism), as Transformers does it by `tp_plan`.

Attention and recurrent layers of such a model have a rank's heads as plain tensors, and need nothing more. Here is what
does: parameters that every rank has whole and uses for its heads only, and log-probabilities by a part of the vocabulary.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import ops
from ..errors import Unsupported
from ..rank_group import TENSOR
from . import deepspeed
from .attention import as_autocast

_KEPT = "_espalier_tensor_parallel"  # of a module: the forward that it had


def is_parallel(parameter: Any) -> bool:
    """Whether ranks have different parts of a parameter, whatever FSDP2 does to it beside."""
    return _place(parameter) is not None and not _place(parameter).is_replicate()


def group_of(model: nn.Module) -> Any:
    """The process group over which heads are divided; None for other models."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    return next((_group(parameter) for parameter in model.parameters() if is_parallel(parameter)), None)


def check_whole(model: Any, caller: str) -> None:
    """Raises Unsupported for models that are divided over ranks, of which none could make a copy in float64."""
    deepspeed.check_whole(model, caller)
    if group_of(model) is not None:
        raise Unsupported(f"{caller}: expected a model that one process has whole, received one that is divided over ranks; "
                          "load it without tp_size for that")  # fmt: skip


def attach(model: Any) -> None:
    """Makes gradients of a tensor parallel model those of the whole one, for any number of backward passes between two updates.

    Transformers sums such a gradient over ranks whenever something is added to it, with all that was there before."""
    detach(model)
    _check_heads(model)
    for module, group in _partial_users(model):
        own = module.__dict__.get("forward")
        if own is not None and not _is_by_transformers(module, "ReplicatedWithGradAllReduce"):
            raise Unsupported(f"tp_plan: expected {type(module).__name__} with its own forward or that of Transformers, received "
                              "one that another library has set")  # fmt: skip
        setattr(module, _KEPT, (own, [_hooks_taken(parameter) for parameter in module.parameters(recurse=False)]))
        module.forward = _summing(module, group)
    for module in model.modules():
        if any(_is_packed(parameter) for parameter in module.parameters(recurse=False)):
            setattr(module, _KEPT, (module.__dict__.get("forward"), []))
            module.forward = _with_contiguous_gradients(module, module.forward)


def _check_heads(model: Any) -> None:
    group = group_of(model)
    if group is None:
        return
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", 0)
    if not isinstance(heads, int) or heads % dist.get_world_size(group) == 0:
        return
    if any(_gives_own_heads(module) for module in model.modules()):
        raise Unsupported(f"num_key_value_heads: expected a multiple of tp_size, {dist.get_world_size(group)} ranks, received "
                          f"{heads}; load the model with a smaller tp_size")  # fmt: skip


def detach(model: Any) -> None:
    """Gives the modules back what `attach` has replaced."""
    for module in model.modules():
        if _KEPT in module.__dict__:
            own, hooks = module.__dict__.pop(_KEPT)
            del module.forward
            if own is not None:
                module.forward = own
            for parameter, parameter_hooks in zip(module.parameters(recurse=False), hooks):
                for hook in parameter_hooks:
                    parameter.register_post_accumulate_grad_hook(hook)


def _hooks_taken(parameter: nn.Parameter) -> list[Any]:
    """The hooks of Transformers that sum a gradient over ranks, which the parameter no longer has."""
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    taken = [number for number, hook in hooks.items() if hook.__qualname__.startswith("ReplicatedWithGradAllReduce")]
    return [hooks.pop(number) for number in taken]


def has_own_forward(head: nn.Module) -> bool:
    """Whether a Linear is called as PyTorch or a plan of Transformers has it, and nothing else is around it."""
    return "forward" not in head.__dict__ or _is_by_transformers(head, "TensorParallelLayer", "ColwiseParallel")


class VocabularyPart:
    """This rank's part of the weight [V, C] of an output layer, rows [begin, begin + N)."""

    def __init__(self, head: nn.Linear) -> None:
        whole: Any = head.weight
        bias: Any = head.bias
        self.group = _group(whole)
        self.weight: Tensor = whole.to_local()
        self.bias: Tensor | None = None if bias is None else bias.to_local()
        size = dist.get_world_size(self.group)
        part = -(-len(whole) // size)  # as Shard divides
        self.begin = dist.get_rank(self.group) * part
        if (size - 1) * part >= len(whole):
            raise Unsupported(f"tp_size: expected fewer ranks, so that each has tokens of the vocabulary, received {size} for "
                              f"{len(whole)} tokens")  # fmt: skip

    def edge_logprobs(self, hidden: Tensor, edge_row: Tensor, edge_target: Tensor, *, temperature: float, scale: float,
                      entropy: bool) -> Any:  # fmt: skip
        """ops.edge_logprobs of hidden [R, C], which all ranks have, by all parts of the vocabulary.

        With the parts' normalisers lse_p and weights w_p = exp(lse_p - lse),
            lse = log sum_p exp(lse_p),    entropy = lse - sum_p w_p (lse_p - entropy_p).
        The operator gives log p of tokens and not lse_p, so that each row has one more edge, to the part's first token, whose
        logit is one product.
        """
        hidden, weight = as_autocast(_Spread.apply(hidden, self.group), self.weight)  # type: ignore[no-untyped-call]
        hidden, bias = hidden.to(weight.dtype), None if self.bias is None else self.bias.to(weight.dtype)
        rows = torch.arange(len(hidden), device=hidden.device)
        first = torch.searchsorted(edge_row, rows) + rows
        place = torch.arange(len(edge_row), device=hidden.device) + edge_row + 1
        target = edge_target - self.begin
        is_own = (target >= 0) & (target < len(weight))
        all_rows, all_targets = (edge_row.new_zeros(len(rows) + len(edge_row)) for _ in range(2))
        all_rows[first], all_rows[place] = rows, edge_row
        all_targets[place] = torch.where(is_own, target, 0)
        found: Any = ops.edge_logprobs(hidden, weight, all_rows, all_targets, bias=bias, temperature=temperature,
                                       logit_scale=scale, entropy=entropy)  # fmt: skip
        logprobs, entropies = found if entropy else (found, None)
        dtype = logprobs.dtype
        logit = hidden.to(dtype) @ weight[0].to(dtype)
        if bias is not None:
            logit = logit + bias[0].to(dtype)
        lse = logit * (scale / temperature) - logprobs[first]
        logits = self._sum(torch.where(is_own, logprobs[place] + lse[edge_row], 0))
        peak = lse.detach().clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        whole = peak + self._sum((lse - peak).exp()).log()
        logprobs = logits - whole[edge_row]
        if entropies is None:
            return logprobs
        share = (lse - _Spread.apply(whole, self.group)).exp()  # type: ignore[no-untyped-call]
        mean = self._sum(share * (lse - entropies[first]))
        return logprobs, (whole - mean)[edge_row]

    def _sum(self, values: Tensor) -> Tensor:
        found: Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return found


class _Sum(torch.autograd.Function):
    """The sum over ranks of what each has, which all go on with alike."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Spread(torch.autograd.Function):
    """What all ranks have alike, and each uses for its own part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _place(parameter: Any) -> Any:
    """The placement of a parameter along the dimension of tensor parallelism; None where it has none."""
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
    return parameter.placements[names.index(TENSOR)] if TENSOR in names else None


def _group(parameter: Any) -> Any:
    return parameter.device_mesh.get_group(TENSOR)


def _partial_users(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(module, group): those that every rank has whole and calls with its own heads alone. Transformers names some of them in its
    plans; all others are beside a projection to heads."""
    for module in model.modules():
        group = group_of(module)
        if group is None:
            continue
        has_own_heads = any(_gives_own_heads(child) for child in module.children())
        for child in module.children():
            is_whole = group_of(child) is None and any(True for _ in child.parameters(recurse=False))
            if is_whole and (has_own_heads or _is_by_transformers(child, "ReplicatedWithGradAllReduce")):
                yield child, group


def _gives_own_heads(module: nn.Module) -> bool:
    module = getattr(module, "base_layer", module)  # below an adapter
    if not isinstance(module, nn.Linear) or not is_parallel(module.weight):
        return False
    style: Any = _closure_of(module).get("self")
    place = getattr(style, "output_layouts", None)
    return _is_by_transformers(module, "TensorParallelLayer") and place is not None and place.is_shard()


def _closure_of(module: nn.Module) -> dict[str, Any]:
    forward: Any = module.__dict__.get("forward")
    code, cells = getattr(forward, "__code__", None), getattr(forward, "__closure__", None)
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)} if code and cells else {}


def _is_by_transformers(module: nn.Module, *styles: str) -> bool:
    """Whether the module has the forward of one of these styles of plans."""
    forward = module.__dict__.get("forward")
    return (getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"
            and getattr(forward, "__qualname__", "").split(".")[0] in styles)  # fmt: skip


def _summing(module: nn.Module, group: Any) -> Callable[..., Any]:
    """A forward of `module` whose parameters have gradients that are summed over ranks, each time."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        try:
            for name, parameter in own.items():
                if parameter is not None and parameter.requires_grad:
                    module._parameters[name] = _Spread.apply(parameter, group)  # type: ignore[no-untyped-call]
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


def _is_packed(parameter: Any) -> bool:
    return type(_place(parameter)).__name__ == "_StridedShard"


def _with_contiguous_gradients(module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward after which gradients of packed projections are not transposed: PyTorch 2.11 cannot copy them. Only then, since
    FSDP2 has another parameter then."""

    def contiguous(gradient: Any) -> Any:
        with torch.no_grad():
            return type(gradient).from_local(gradient.to_local().contiguous(), gradient.device_mesh, gradient.placements,
                                             run_check=False, shape=gradient.shape,
                                             stride=torch.empty(gradient.shape, device="meta").stride())  # fmt: skip

    def forward(*args: Any, **kwargs: Any) -> Any:
        for parameter in module.parameters(recurse=False):
            if _is_packed(parameter) and parameter.requires_grad and not hasattr(parameter, _KEPT):
                setattr(parameter, _KEPT, parameter.register_hook(contiguous))
        return own(*args, **kwargs)

    return forward
