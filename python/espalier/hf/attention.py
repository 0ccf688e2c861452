# SPDX-License-Identifier: Apache-2.0
"""Attention of Transformers' layers over a forest: token j attends to token i iff i <= j < subtree_end[i]."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .. import ops
from ..errors import Unsupported
from ..kernels import gated_delta, libraries, ssm_scan
from . import told
from .asked_attention import Attention, in_groups
from .run import TreeRun

NAME = "espalier"  # by which configs ask for it
LIBRARIES = ("cudnn", "fla", "mamba_ssm")  # backends that need one; the rest is as of "auto"
BACKENDS = ("auto", "espalier", "flex", "sdpa", *LIBRARIES)


def tree_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
                   dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
                   s_aux: Tensor | None = None, softcap: float | None = None, espalier_tree: TreeRun | None = None,
                   **_: Any) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function named "espalier" of Transformers' AttentionInterface.

    query [1, H, T, D], key [1, K, T, D], value [1, K, T, E]; s_aux: a sink [H] per head; espalier_tree: the TreeRun, where the
    layer hands it on. Returns ([1, T, H, E], None). Raises Unsupported for what changes the result and is not served."""
    run = told.run_of_layer() if espalier_tree is None else espalier_tree
    if run is None:
        raise Unsupported('attn_implementation="espalier": expected a model patched by espalier.hf.patch, received a '
                          "forward without a forest; load it with another one and patch it")  # fmt: skip
    if dropout:
        raise Unsupported(f"dropout: expected 0, received {dropout}: tokens that rows share would share "
                          "what is dropped")  # fmt: skip
    if query.shape[0] != 1 or query.shape[2] != run.num_tokens or key.shape[2] != run.num_tokens:
        raise Unsupported(f"attention: expected queries and keys of the {run.num_tokens} tokens of the forest, "
                          f"received {list(query.shape)} and {list(key.shape)}")  # fmt: skip
    if attention_mask is not None:
        raise Unsupported(f"attention: expected no mask, since the forest says which tokens see which, received one that "
                          f"{type(module).__name__} was handed by the code around it")  # fmt: skip
    declared = getattr(getattr(module, "config", None), "sliding_window", sliding_window)
    if sliding_window is not None and isinstance(declared, int | None) and declared != sliding_window:
        raise Unsupported(f"sliding_window: expected {declared}, by which the config makes masks, received {sliding_window} "
                          f"from {type(module).__name__}; set both")  # fmt: skip
    run.count_attention(module)
    if getattr(module, "attn_temperature_tuning", False):
        query = _at_positions(module, run, query)
    query, key, value = as_autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = Attention(query, key, value, scale, sliding_window or 0, _chunk_of(module, run), softcap or 0.0, s_aux)
    return _BY_BACKEND[run.backend](run, asked).contiguous(), None


def _chunk_of(module: Any, run: TreeRun) -> int:
    """The size of the chunks of positions in which the layer attends (llama4); 0 where one chunk holds all, or there are none."""
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    if config is None or size is None or run.longest <= size:
        return 0
    return int(size) if config.layer_types[module.layer_idx] == "chunked_attention" else 0


def _at_positions(module: Any, run: TreeRun, query: Tensor) -> Tensor:
    """Queries of a layer of llama4 without rope, which has scaled them by the numbers of their rows, scaled by their positions
    instead."""
    if module.use_rope:
        return query

    def factor(positions: Tensor) -> Tensor:
        found: Tensor = torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        return found

    numbers = torch.arange(run.num_tokens, device=query.device)
    ratio = factor(run.position.to(query.device)) / factor(numbers)
    return (query * ratio[:, None]).to(query.dtype)


def resolved(backend: str, device: torch.device) -> str:
    """The backend that "auto" stands for on `device`, and those of libraries, which must be there; any other itself. Kernels that
    are asked for by name are checked as well, so that one that is wrong is left out."""
    if backend == "espalier" and device.type == "cuda":
        libraries.is_attention_right(_index(device))
    if backend in LIBRARIES:
        _check_library(backend, device)
    elif backend != "auto":
        return backend
    elif device.type == "cuda":
        _tell_what_is_missing(_index(device))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("espalier::tree_attention", device.type.upper())
    is_ours = has_kernel and (device.type != "cuda" or libraries.is_attention_right(_index(device)))
    return "espalier" if is_ours else "flex"


@functools.cache
def _check_library(backend: str, device: torch.device) -> None:
    """Raises Unsupported where the library of a backend is not there, does not serve the device, or is wrong on it."""
    index = _index(device)
    library = {"fla": gated_delta.LIBRARY, "mamba_ssm": ssm_scan.LIBRARY}.get(backend)
    is_there = functools.partial(libraries.has_operator, library) if library else libraries.has_attention
    if device.type == "cuda" and is_there(index):
        return
    wanted, command = {"cudnn": ("cudnn-frontend 1.32 on a GPU of compute capability 9.0, 10.0 or 10.3", libraries.EXTRA),
                       "fla": ("flash-linear-attention 0.6 on a GPU", gated_delta.LIBRARY.command),
                       "mamba_ssm": ("mamba-ssm 2.3 on a GPU", ssm_scan.LIBRARY.command)}[backend]  # fmt: skip
    raise Unsupported(f'backend="{backend}": expected {wanted}, which has passed its checks there, received {device} without; '
                      f"{command}, see `python -m espalier.kernels`, or leave backend out")  # fmt: skip


@functools.cache
def _tell_what_is_missing(index: int) -> None:
    if missing := libraries.missing_on(index):
        warnings.warn(f"espalier.hf.patch: {missing}, which are made for this GPU", stacklevel=2)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of the arguments of torch's own attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _by_espalier(run: TreeRun, asked: Attention) -> Tensor:
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in asked[:3])
    run.leave(key=key, value=value)
    contexts, device = run.attention_contexts(key, value, asked.window, asked.chunk), query.device
    chunks = run.in_chunks(asked.chunk) if asked.chunk else None
    if chunks is not None:
        query, key, value = (tensor.index_select(0, chunks.order.to(device)) for tensor in (query, key, value))
    forest, position = (run if chunks is None else chunks), run.position.to(device) if asked.window else None
    head_groups = [in_groups(tensor, len(contexts), 1) for tensor in (query, key, value)]
    sinks = [None] * len(contexts) if asked.sinks is None else in_groups(asked.sinks, len(contexts), 0)
    found = []
    for context, q, k, v, sink in zip(contexts, *head_groups, sinks):
        given = context() if chunks is None else chunks.context(context())
        found.append(ops.tree_attention(
            q, k, v, forest.subtree_end.to(device), softmax_scale=asked.scale, sliding_window=asked.window, position=position,
            sinks=sink, softcap=asked.softcap, **given))  # fmt: skip
    out = found[0] if len(found) == 1 else torch.cat(found, 1)
    if chunks is not None:
        out = out.index_select(0, chunks.rank.to(device))
    return out.unsqueeze(0)


def _by_sdpa(run: TreeRun, asked: Attention) -> Tensor:
    if asked.softcap:  # which torch's function does not have
        return _by_espalier(run, asked)
    if asked.sinks is not None:
        raise Unsupported('backend="sdpa": expected a model without sinks, received s_aux; take backend="espalier" or '
                          '"flex"')  # fmt: skip
    query, key, value = asked[:3]
    mask = run.masks.get(("sdpa", asked.window, asked.chunk))
    if mask is None:
        number = torch.arange(run.num_tokens, device=run.subtree_end.device)
        mask = asked.visible(run)(number[:, None], number[None, :])
        run.masks["sdpa", asked.window, asked.chunk] = mask
    mask = mask.to(query.device)
    is_grouped = key.shape[1] != query.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=asked.scale, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def _by_flex(run: TreeRun, asked: Attention) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    query, key, value = asked[:3]
    if query.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise Unsupported('backend="flex": expected a GPU, received gradients on a CPU, for which FlexAttention has '
                          'no backward; take backend="espalier" or "sdpa"')  # fmt: skip
    mask = run.masks.get(("flex", asked.window, asked.chunk))
    if mask is None:
        visible, size = asked.visible(run), run.num_tokens
        mask = run.masks["flex", asked.window, asked.chunk] = create_block_mask(
            lambda _batch, _head, i, j: visible(i, j), None, None, size, size, device=query.device)  # fmt: skip
    out: Tensor
    out, aux = _flex_attention(query.device.type)(
        query, key, value, score_mod=_capped(asked.softcap) if asked.softcap else None, block_mask=mask,
        scale=asked.scale, enable_gqa=True, return_aux=AuxRequest(lse=True))  # fmt: skip
    if asked.sinks is not None:  # a key without a value takes its share of the weights
        share = torch.sigmoid(aux.lse - asked.sinks.to(aux.lse.dtype)[None, :, None])
        out = out * share.unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2)


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, *_numbers: softcap * torch.tanh(score / softcap)


@functools.cache
def _flex_attention(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


_BY_BACKEND = {"espalier": _by_espalier, "flex": _by_flex, "sdpa": _by_sdpa}
AttentionInterface.register(NAME, tree_attention)
