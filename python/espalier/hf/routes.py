# SPDX-License-Identifier: Apache-2.0
"""Recorded expert routes, replayed by the routers of a patched model.

Routers have no arguments but hidden states. So a hook on the attention or recurrent mixer of the layer, which runs
before and is handed the TreeRun, tells the router what to replay. That happens inside of what checkpointing computes
again. A hook on the router then replaces its choice, with weights from its own scores.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import Unsupported
from ..trees import Layout

if TYPE_CHECKING:
    from .run import TreeRun

NAME = "routed_experts"
MIXERS = ("self_attn", "linear_attn", "mamba")  # what layers call them


def _softmax_of_all(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Weights by the softmax of all logits (Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, which always normalises)."""
    weights = torch.softmax(logits, -1, dtype=torch.float).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Weights by the sigmoid of each logit (GLM-4-MoE); the bias of the choice is not in them."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.mul(weights, router.routed_scaling_factor)


def _softmax_of_chosen(_router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Weights by the softmax of the chosen logits (gpt-oss, GraniteMoeHybrid)."""
    return torch.softmax(logits.gather(1, experts), -1)


# Routers of Transformers return (logits [T, E], weights [T, K], experts [T, K]).
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen3MoeTopKRouter": _softmax_of_all,
    "Qwen3NextTopKRouter": _softmax_of_all,
    "Qwen3_5MoeTopKRouter": _softmax_of_all,
    "Glm4MoeTopkRouter": _sigmoid,
    "GptOssTopKRouter": _softmax_of_chosen,
    "GraniteMoeHybridTopKRouter": _softmax_of_chosen,
}


def routers_of(backbone: Any) -> dict[int, Any]:
    """{number of a layer: its router} for the layers of `backbone` that have one."""
    found = {}
    for number, layer in enumerate(getattr(backbone, "layers", ())):  # other names have none of WEIGHTS
        for module in layer.modules():
            if weights_of(module) is not None:
                found[number] = module
    return found


def checked_routes(backbone: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The routes of a batch as [B * S, R, K] int64 on the CPU, ascending in K, R the routers of `backbone`.

    They are given as integers [B, S, L, K], L the routers or all layers, of which those without a router are not read;
    all K are -1 where none are recorded. Raises Unsupported where they do not fit `backbone`."""
    given, routers = arguments[NAME], _needed_routers(backbone)
    if arguments.get("output_router_logits", getattr(backbone.config, "output_router_logits", False)):
        raise Unsupported(f"{NAME}: expected output_router_logits=False, received True: the load-balancing loss of "
                          "Transformers counts what routers would choose, not what is recorded")  # fmt: skip
    top_k = next(iter(routers.values())).top_k
    batch, layers = list(arguments["input_ids"].shape), len(backbone.layers)
    sizes = [[*batch, count, top_k] for count in sorted({len(routers), layers})]
    is_integer = isinstance(given, torch.Tensor) and not given.is_floating_point() and given.dtype != torch.bool
    if not is_integer or list(given.shape) not in sizes:
        received = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise Unsupported(f"{NAME}: expected integers {' or '.join(map(str, sizes))} ([B, S, routers or layers, "
                          f"experts of a token]), received {received}")  # fmt: skip
    return _of_routers(given.detach().cpu().long().flatten(0, 1), routers)


def routes_of_rows(backbone: Any, given: Any, offsets: NDArray[np.int64]) -> Tensor:
    """The same [N, R, K], in int32, of rows with N tokens. They are given as R rows of integers [n, L, K] or [n, L * K], or
    as all of them in one array [N, L, K] or [N, L * K], as espalier.read has them. offsets: int64 [rows + 1].

    Raises Unsupported where they do not fit `backbone`, or name experts that it does not have."""
    routers, lengths = _needed_routers(backbone), np.diff(offsets)
    top_k, layers = next(iter(routers.values())).top_k, len(backbone.layers)
    is_flat = getattr(given, "ndim", 0) in (2, 3) and len(given) == offsets[-1]
    rows = [np.asarray(row) for row in ([given] if is_flat else given)]
    if not is_flat and len(rows) != len(lengths):
        raise Unsupported(f"{NAME}: expected {len(lengths)} rows, received {len(rows)}")
    for number, (row, length) in enumerate(zip(rows, [offsets[-1]] if is_flat else lengths)):
        sizes = [(length, count, top_k) for count in sorted({len(routers), layers})]
        is_known = row.shape in sizes or row.shape in [(length, count * top_k) for _, count, _ in sizes]
        if row.dtype.kind not in "iu" or not is_known:
            place = "" if is_flat else f" in row {number}"
            raise Unsupported(f"{NAME}: expected integers {' or '.join(str(list(map(int, size))) for size in sizes)}"
                              f"{place} ([tokens, routers or layers, experts of a token]), received {row.dtype} "
                              f"{list(row.shape)}")  # fmt: skip
    routes = np.concatenate([row.reshape(len(row), -1, top_k).astype(np.int32) for row in rows])
    return check_experts(backbone, _of_routers(torch.from_numpy(routes), routers))


def check_experts(backbone: Any, routes: Tensor) -> Tensor:
    """Returns routes [N, R, K]. Raises Unsupported where they name experts that `backbone` does not have, or one
    twice."""
    experts = next(iter(routers_of(backbone).values())).num_experts
    recorded = routes >= 0
    wrong = (routes < -1) | (routes >= experts) | (recorded != recorded[..., :1])
    wrong[..., 1:] |= recorded[..., 1:] & (routes[..., 1:] == routes[..., :-1])
    if wrong.any():
        token, router, _ = torch.nonzero(wrong)[0].tolist()
        raise Unsupported(f"{NAME}: expected different experts from 0 to {experts - 1}, or -1 for all where none are "
                          f"recorded, received {routes[token, router].tolist()} for token {token} of the rows "
                          f"(padding not counted) in router {router}")  # fmt: skip
    return routes


def of_forest(routes: Tensor, tokens: NDArray[np.int64], num_tokens: int) -> Tensor:
    """[R, num_tokens, K] for the tokens of a forest, of the routes [N, R, K] of the tokens of rows; tokens [N] says
    where each of these is in the forest. Raises Unsupported where tokens that rows share have different ones."""
    index = torch.tensor(tokens, device=routes.device)
    result = routes.new_empty(num_tokens, *routes.shape[1:])
    result[index] = routes
    if not torch.equal(result[index], routes):
        raise Unsupported(f"{NAME}: expected the same routes for tokens that rows share, received others; build the "
                          f"forest from rows with {NAME}, which keeps such tokens apart")  # fmt: skip
    return result.transpose(0, 1).contiguous()


def of_batch(backbone: Any, routes: Tensor, places: NDArray[np.int64], layout: Layout) -> Tensor:
    """The same of the routes of a batch, as checked_routes gives them, whose tokens are at these places. Raises Unsupported as
    check_experts does, too."""
    recorded = check_experts(backbone, routes[torch.from_numpy(places)])
    return of_forest(recorded, layout.paths()[1], layout.num_tokens)


def check_replayed(run: "TreeRun") -> None:
    """Raises Unsupported where routers have not replayed what the TreeRun of a forward pass had for them."""
    if run.routes is not None and len(run.replayed) != len(run.routes):
        raise Unsupported(f"{NAME}: expected {len(run.routes)} routers that replay, received {len(run.replayed)}: other "
                          "layers than those of Transformers?")  # fmt: skip


def _needed_routers(backbone: Any) -> dict[int, Any]:
    routers = routers_of(backbone)
    if not routers:
        raise Unsupported(f"{NAME}: expected a model with routers of a mixture of experts, received one of model_type "
                          f"{backbone.config.model_type!r} without any")  # fmt: skip
    return routers


def _of_routers(routes: Tensor, routers: dict[int, Any]) -> Tensor:
    """Routes [N, L, K] of routers or layers as those of routers, ascending in K."""
    if routes.shape[1] != len(routers):
        routes = routes[:, list(routers)]
    return routes.sort(-1).values


def merge_keys(routes: Tensor) -> NDArray[np.int64]:
    """[N] int64, equal for tokens of equal routes [N, R, K]; others must not be shared."""
    return np.unique(routes.flatten(1).numpy(), axis=0, return_inverse=True)[1].reshape(-1)


class Replay:
    """Hooks in the layers of a backbone that have routers. A copy of the backbone has copies of them."""

    def __init__(self, backbone: Any) -> None:
        self._handles: list[Any] = []
        self._mixers: list[Any] = []
        for number, (layer, router) in enumerate(routers_of(backbone).items()):
            mixer = next(filter(None, (getattr(backbone.layers[layer], name, None) for name in MIXERS)))
            mixer.__dict__["_espalier_router"] = number, router
            self._mixers.append(mixer)
            self._handles += [mixer.register_forward_pre_hook(_tell_router, with_kwargs=True),
                              router.register_forward_hook(_replace_choice)]  # fmt: skip

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for mixer in self._mixers:
            _, router = mixer.__dict__.pop("_espalier_router")
            router.__dict__.pop("_espalier_replays", None)


def _tell_router(mixer: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    number, router = mixer._espalier_router
    run = kwargs.get("espalier_tree")
    replays = router.__dict__.setdefault("_espalier_replays", {})
    replays[_thread()] = None if run is None or run.routes is None else (weakref.ref(run), number)


def _thread() -> int:
    """So that a forward in another thread replays nothing of this one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _told(router: Any) -> Any:
    """(weak reference to a TreeRun, number of the router), or None."""
    return router.__dict__.get("_espalier_replays", {}).pop(_thread(), None)


def _replace_choice(router: Any, _args: Any, output: Any) -> Any:
    replay = _told(router)
    if replay is None:
        return None
    reference, number = replay
    run = reference()
    run.replayed.add(number)
    logits, weights, chosen = output
    experts = torch.where(run.routes[number] < 0, chosen, run.routes[number])
    return logits, weights_of(router)(router, logits, experts).to(weights.dtype), experts


def weights_of(module: Any) -> Any:
    """The function of WEIGHTS for a router of Transformers (FSDP2 derives its own classes from it), else None."""
    return next((WEIGHTS[cls.__name__] for cls in type(module).__mro__
                 if cls.__name__ in WEIGHTS and cls.__module__.startswith("transformers.models.")), None)  # fmt: skip
