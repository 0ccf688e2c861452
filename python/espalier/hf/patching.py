# SPDX-License-Identifier: Apache-2.0
"""Making a model of Transformers run on the trees of its batches, and taking that back."""

import contextlib
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ..errors import Unsupported
from ..trees import Layout, build
from . import attention, deepspeed, mixers, older_mixers, proof, routes, shared_head, tensor_parallel, text_rows, told
from .argument_names import may_be_read
from .asked import Asked, Given, asked_of, asking, index_of
from .config_view import is_view, original_of, tree_view
from .dropout import noise_of_batch
from .around import Around
from .changes import Role, Snapshot, attention_modules, functions_of, refuse_attention
from .families import (backbone_of, check_followed, check_model, check_training, composite_of, is_tested_family, mixer_of,
                       modules_with_settings, unwrapped)  # fmt: skip
from .for_now import with_values
from .resting import Rest
from .rows import BOUNDARIES, INPUTS, Rows, check_boundaries, read_rows
from .run import Expand, TreeRun
from .tokenwise import check_tokenwise, keeps_packed_rows_apart

CACHES = ("past_key_values", "cache_params", "cache")  # "cache" since Transformers 5.24
OUTPUTS = ("output_hidden_states", "output_router_logits")  # passed on to the model
# No result of a backbone depends on these.
UNUSED = ("num_items_in_batch", "shift_labels", "ignore_index", "logits_to_keep", "max_length_q", "max_length_k")

Model = TypeVar("Model")


def apply_patch(model: Model, backend: str = "auto", check: Callable[[Any, Mapping[str, Any]], None] | None = None,
                dropout: str | None = None) -> Model:  # fmt: skip
    """What espalier.hf.patch does. check(model, batch) raises where the first batch that is trained on is not exact; None
    asks for none."""
    if backend not in attention.BACKENDS:
        raise Unsupported(f"backend: expected {', '.join(attention.BACKENDS)}, received {backend!r}")
    backbone = backbone_of(model)
    check_model(backbone)
    if dropout not in (None, "shared"):
        raise Unsupported(f'dropout: expected None or "shared", received {dropout!r}')
    if backbone.training:
        check_training(modules_with_settings(backbone), dropout)
    snapshot = Snapshot(backbone)
    refuse_attention(snapshot)
    if check is None or snapshot.of_role(Role.PATHS):
        check_family(backbone, snapshot)
    tensor_parallel.attach(model)
    given = patch_of(backbone) or _attached(backbone, bool(snapshot.of_role(Role.PATHS)))
    text_rows.attach(composite_of(model))
    given.backend, given.dropout = backend, dropout
    given.proven.append(functions_of(snapshot))
    given.check = check
    given.unchecked = None if check is None else weakref.ref(model)
    shared_head.attach(model, backbone)
    inner = unwrapped(model)
    given.around = None if inner is backbone else Around(inner)
    return model


def _attached(backbone: Any, has_changed_code: bool = False) -> "Patch":
    given = backbone._espalier = Patch(backbone.__dict__.get("forward"), has_changed_code)
    try:
        given.attach(backbone)
    except BaseException:
        del backbone._espalier
        raise
    return given


def check_family(backbone: Any, snapshot: Snapshot) -> None:
    """Raises Unsupported where the tests do not cover models like `backbone` with the code of its Snapshot, and a proof finds
    that trees are not exact for them."""
    attach = functools.partial(attach_for_proof, has_changed_code=bool(snapshot.of_role(Role.PATHS)))
    proof.check_family(backbone, attach, snapshot)


def attach_for_proof(backbone: Any, *, has_changed_code: bool = False) -> None:
    """Patches a backbone, which then runs on trees whatever its code is."""
    given = patch_of(backbone) or _attached(backbone, has_changed_code)
    given.is_on_trial = True


def unpatch(model: Model) -> Model:
    """Makes `model` what it was before `espalier.hf.patch`. Harmless where it is not patched.

    Args:
        model: A model that `patch` took.

    Returns:
        The model.

    Raises:
        Unsupported: A backward that recomputes layers of the patched model is still to come, or another library has wrapped
            the patched forward since.

    Examples:
        >>> espalier.hf.unpatch(espalier.hf.patch(model)) is model
        True
    """
    backbone = backbone_of(model)
    given = patch_of(backbone)
    if given is not None:
        given.detach(backbone)
        shared_head.detach(model)
        tensor_parallel.detach(model)
        del backbone._espalier
        text_rows.detach(composite_of(model))
    return model


@dataclass(frozen=True)
class Sharing:
    """What a patched model has shared in the batches that ran on trees; padding does not count.

    Attributes:
        batches: Their number.
        flat_tokens: Tokens of the rows.
        tree_tokens: Those that were encoded.

    Examples:
        >>> import espalier
        >>> print(espalier.hf.Sharing(batches=1, flat_tokens=8, tree_tokens=5))
        1 batch, 8 tokens, 5 encoded: 1.60x
    """

    batches: int = 0
    flat_tokens: int = 0
    tree_tokens: int = 0

    @property
    def ratio(self) -> float:
        """Flat tokens over tree tokens; 1 before the first batch."""
        return self.flat_tokens / self.tree_tokens if self.tree_tokens else 1.0

    def __str__(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        return f"{batches}, {self.flat_tokens:,} tokens, {self.tree_tokens:,} encoded: {self.ratio:.2f}x"


def sharing(model: Any) -> Sharing:
    """The Sharing of all batches since `model` was patched, those of `verify` among them.

    Generation and other forwards with a cache are not in it.

    Args:
        model: A patched model.

    Returns:
        A Sharing, which does not change with later batches.

    Raises:
        Unsupported: The model is not patched.

    Examples:
        >>> espalier.hf.sharing(espalier.hf.patch(model)).ratio >= 1
        True
    """
    given = patch_of(backbone_of(model))
    if given is None:
        raise Unsupported("espalier.hf.sharing: expected a patched model, received one that is not; call "
                          "espalier.hf.patch(model) first")  # fmt: skip
    return given.sharing


def patch_of(backbone: Any) -> "Patch | None":
    """The Patch of a backbone, None where there is none."""
    given: Patch | None = backbone.__dict__.get("_espalier")
    return given


class Patch:
    """What patching has done to one backbone. Copies of the backbone hold copies of it."""

    def __init__(self, stock_forward: Callable[..., Any] | None, has_changed_code: bool = False) -> None:
        self.stock_forward = stock_forward  # set on the object itself by another library; usually None
        self.has_changed_code = has_changed_code  # in what mixes tokens
        self.snapshot: Snapshot | None = None  # of the code that was looked at last
        self.settings: list[tuple[str, Any]] | None = None  # modules with settings, as of the snapshot
        self.around: Around | None = None  # the model with a head
        self.said: set[str] = set()  # why batches have run unshared
        self.unshared: str | None = None  # why batches run unshared
        self.tokenwise: set[Any] = set()  # kinds of modules that have passed their test
        self.is_on_trial = False  # while a proof runs
        self.attention: dict[int, str] = {}  # modules that must attend along the forest: id -> path
        self.backend = "auto"
        self.rest = Rest()
        self.proven: list[Any] = []  # code that a version, a proof, or a first batch to be verified stands for
        self.check: Callable[[Any, Mapping[str, Any]], None] | None = None  # what judges the first batch
        self.unchecked: Any = None  # a weak reference to the model whose first batch is to be verified
        self.runs: weakref.WeakSet[TreeRun] = weakref.WeakSet()  # that graphs of autograd still hold on to
        self.replay: routes.Replay | None = None  # routes.Replay, since the first batch with routes
        self.sharing = Sharing()
        self.meter: Any = None  # SharingMeter of the batches that are trained on
        self.partial_gradients: str | None = None  # which of a step, where a loop over a Step was left early
        self.skip_logits = False  # in training with labels
        self.dropout: str | None = None  # "shared": one draw for each distinct token
        self.is_told = False  # by told.attach

    def attach(self, backbone: Any) -> None:
        self._attach_layers(backbone)
        self._attach_views(backbone)
        backbone.forward = Forward(backbone)
        backbone._replicate_for_data_parallel = refuse_replicas

    def _attach_views(self, backbone: Any) -> None:
        """Gives configs another name for attention; harmless where they have it."""
        views: dict[int, Any] = {}  # one for each config
        for module in backbone.modules():
            config = module.__dict__.get("config")
            if hasattr(config, "_attn_implementation") and not is_view(config):
                module.config = views.setdefault(id(config), tree_view(config, attention.NAME, self.rest))

    def _attach_layers(self, backbone: Any) -> None:
        self.install_mixers(backbone)
        self.is_told = not is_tested_family(backbone) and told.attach(backbone, every_layer=mixer_of(backbone) is not None)

    def _detach_layers(self, backbone: Any) -> None:
        told.detach(backbone)
        if older_mixers.is_older(backbone):
            older_mixers.detach(backbone)
        elif (mixer := mixer_of(backbone)) is not None:
            mixers.uninstall(*mixer, backbone)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(self, backbone: Any, input_ids: Any = None) -> str | None:
        """Why batches have to run unshared, None where they need not. input_ids: of the batch, on its device.

        Code that has changed since the last look is proven or tested first. Raises Unsupported by name where tokens cannot be
        shared with it."""
        if self.is_on_trial:
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a transform of torch.func"
        if self.snapshot is None or not self.snapshot.is_current(backbone):
            device = input_ids.device if isinstance(input_ids, torch.Tensor) else next(backbone.parameters()).device
            self._look_again(backbone, device)
        return self.unshared

    def _look_again(self, backbone: Any, device: torch.device) -> None:
        snapshot, self.snapshot, self.rest.is_lasting = Snapshot(backbone), None, False
        refuse_attention(snapshot)
        has_changed_code = bool(snapshot.of_role(Role.PATHS))
        if has_changed_code != self.has_changed_code:
            self._detach_layers(backbone)
            self.has_changed_code = has_changed_code
            self._attach_layers(backbone)
        code = functions_of(snapshot)
        if code not in self.proven:
            if has_changed_code or not self.proven:
                check_family(backbone, snapshot)
            self.proven.append(code)
        self._attach_views(backbone)  # of modules that are new
        hooks, modules = snapshot.of_role(Role.ROWS), snapshot.of_role(Role.TOKENS)
        if modules and not hooks and device.type != "meta":
            with self.rest.here():
                check_tokenwise(backbone, modules, device, self.dropout, self.tokenwise)
        self.unshared = str(hooks[0]) if hooks else None
        self.attention = attention_modules(backbone)
        self.settings = modules_with_settings(backbone)
        self.snapshot = Snapshot(backbone)  # without what was attached for the tests

    def may_share_head(self, model: Any, backbone: Any) -> bool:
        """Whether `model` calls the patched backbone, and its head, with code that the tests cover."""
        if not isinstance(backbone.__dict__.get("forward"), Forward):
            return False
        return self.around_of(model).may_share_head(backbone)

    def around_of(self, model: Any) -> Around:
        self.around = self.around or Around(model)
        return self.around

    def detach(self, backbone: Any) -> None:
        if not isinstance(backbone.__dict__.get("forward"), Forward):
            raise Unsupported("espalier.hf.unpatch: expected the forward that espalier.hf.patch has set, received one "
                              "that another library has wrapped around it; undo that first")  # fmt: skip
        if self.runs:
            gc.collect()
        if self.runs:
            raise Unsupported("espalier.hf.unpatch: expected no backward to come that computes layers of the patched "
                              "model again; run it, or delete its loss, first")  # fmt: skip
        self.take_back(backbone)

    def take_back(self, backbone: Any) -> None:
        """Takes back `attach`, whatever autograd still waits for."""
        if self.replay is not None:
            self.replay.remove()
            self.replay = None
        del backbone._replicate_for_data_parallel
        if self.stock_forward is None:
            del backbone.forward
        else:
            backbone.forward = self.stock_forward
        for module in backbone.modules():
            if is_view(module.__dict__.get("config")):
                module.config = original_of(module.config)
        self._detach_layers(backbone)

    def install_mixers(self, backbone: Any) -> None:
        if older_mixers.is_older(backbone):
            older_mixers.attach(backbone)
        elif (mixer := mixer_of(backbone)) is not None:
            mixers.install(*mixer, backbone, not is_tested_family(backbone))

    def replay_routes(self, backbone: Any) -> None:
        """Call before the first forward pass of a run with routes."""
        self.replay = self.replay or routes.Replay(backbone)

    def count(self, rows: Rows, layout: Layout) -> None:
        so_far = self.sharing
        self.sharing = Sharing(so_far.batches + 1, so_far.flat_tokens + len(rows.tokens),
                               so_far.tree_tokens + layout.num_tokens)  # fmt: skip
        if self.meter is not None and torch.is_grad_enabled():
            self.meter.count(rows, layout)

    def forest_of(self, arguments: Mapping[str, Any]) -> tuple[Rows, Layout]:
        return forest_of(arguments)

    def call_stock(self, backbone: Any, arguments: Mapping[str, Any]) -> Any:
        if not self.is_told:
            return self._call_stock(backbone, arguments)
        with told.of_model(arguments.get("espalier_tree")):
            return self._call_stock(backbone, arguments)

    def _call_stock(self, backbone: Any, arguments: Mapping[str, Any]) -> Any:
        return self.stock_forward(**arguments) if self.stock_forward else type(backbone).forward(backbone, **arguments)

    def __getstate__(self) -> dict[str, Any]:
        model = None if self.unchecked is None else self.unchecked()
        looked_at: dict[str, Any] = {"snapshot": None, "settings": None, "around": None, "attention": {}, "proven": []}
        return self.__dict__ | looked_at | {"unchecked": model, "meter": None, "said": set(), "tokenwise": set(), "runs": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.runs = weakref.WeakSet()
        if self.unchecked is not None:
            self.unchecked, self.proven = weakref.ref(self.unchecked), [None]


def refuse_replicas() -> NoReturn:
    """What DataParallel calls to copy a patched backbone, whose copies would run on the first GPU."""
    raise Unsupported("nn.DataParallel: expected a patched model on one GPU for each process, received a model to be "
                      "copied to several; start one process for each GPU, by torchrun, or make one GPU visible")  # fmt: skip


class Forward:
    """What a patched backbone has as its forward. Does not keep the backbone alive; copies of the backbone and what is
    unpickled have their own."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = weakref.ref(backbone)
        self.__signature__ = inspect.signature(backbone.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):  # bound to a backbone, as Accelerate does to what it unwraps
            return forward(*args, **kwargs)
        return forward(self._backbone(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        return Forward(memo[id(self._backbone())])

    def __reduce__(self) -> tuple[Any, ...]:
        return Forward, (self._backbone(),)


def forward(backbone: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a patched backbone (see espalier.hf.patch)."""
    given = backbone._espalier
    arguments = text_rows.named_arguments(backbone, args, kwargs)
    if given.rest.is_entered():
        return given.call_stock(backbone, arguments)
    asked = asked_of(backbone)
    if isinstance(asked, Given):
        return asked.output()
    if type(arguments.get("cache")).__module__.startswith("transformers.generation.continuous_batching"):
        raise Unsupported("continuous batching (generate_batch): expected an unpatched model, received a patched one; "
                          "call espalier.hf.unpatch(model) before, or take model.generate")  # fmt: skip
    if "espalier_tree" in arguments:  # a micro-batch of a Step
        return given.call_stock(backbone, arguments)
    if _wants_cache(arguments):
        if routes.NAME in arguments:
            raise Unsupported(f"{routes.NAME}: expected none with a cache, with which the model runs as Transformers "
                              "has it; give use_cache=False")  # fmt: skip
        with given.rest.here():
            return given.call_stock(backbone, arguments)
    if asked is None and (reason := given.look(backbone, arguments.get("input_ids"))) is not None:
        return _unshared(backbone, given, arguments, reason)
    original, arguments = arguments, text_rows.of_rows(backbone, arguments)
    if asked is None and given.around is not None:
        shared_head.attach_around_liger(given.around.model(), backbone)
        if (reason := given.around.sees_padding(backbone)) and _has_padding(arguments):
            return _unshared(backbone, given, original, reason)
    batch = dict(arguments)
    passed_on = _checked(backbone, arguments, given.dropout)
    if given.unchecked is not None and torch.is_grad_enabled():
        with asking(None):
            _check_first_batch(given, batch)
    return _run(backbone, given, arguments, passed_on, asked)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _has_padding(arguments: Mapping[str, Any]) -> bool:
    mask = arguments.get("attention_mask")
    return isinstance(mask, torch.Tensor) and bool((mask == 0).any())


def _unshared(backbone: Any, given: Patch, arguments: dict[str, Any], reason: str) -> Any:
    """What the backbone computes unpatched. Raises Unsupported where that would mix packed rows, or know nothing of routes."""
    batch = text_rows.of_rows(backbone, arguments)
    is_packed = any(name in batch for name in BOUNDARIES) or _has_restarts(batch)
    given.rest.is_lasting = True  # so that checkpointing computes the same again
    if reason not in given.said:
        given.said.add(reason)
        warnings.warn(f"espalier.hf.patch: batches run unshared, as they would unpatched: {reason} may look at rows of the "
                      "batch, or at padding; remove it to share tokens", stacklevel=2)  # fmt: skip
    if routes.NAME in arguments:
        raise Unsupported(f"{routes.NAME}: expected layers that take tokens one at a time, received {reason}, with which batches "
                          "run unshared; remove it")  # fmt: skip
    with given.rest.here():
        if is_packed:
            arguments["use_cache"] = False  # with one Transformers sees no packed rows
            if not keeps_packed_rows_apart(backbone, batch["input_ids"].device):
                raise Unsupported(f"packed rows: expected a model that keeps them apart where batches run unshared, received a "
                                  f"{type(backbone).__name__} that mixes them, and {reason}; pad the rows, or remove "
                                  "that")  # fmt: skip
        return given.call_stock(backbone, arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _has_restarts(batch: Mapping[str, Any]) -> bool:
    """Whether positions of tokens, padding aside, do not go up by one."""
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if not isinstance(positions, torch.Tensor):
        return False
    restarts = positions.diff(dim=-1) != 1
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        restarts = restarts & (mask[:, 1:] * mask[:, :-1] != 0)
    return bool(restarts.any())


def _wants_cache(arguments: Mapping[str, Any]) -> bool:
    cached = [name for name in CACHES if name in arguments] + (["use_cache=True"] if arguments.get("use_cache") else [])
    if cached and torch.is_grad_enabled():
        raise Unsupported(f"expected no cache where gradients are wanted, received {cached[0]}; leave it out to train, "
                          "or generate under torch.no_grad()")  # fmt: skip
    return bool(cached)


def _checked(backbone: Any, arguments: dict[str, Any], dropout: str | None) -> dict[str, Any]:
    """What to pass on to the model. Raises Unsupported for arguments that do not fit a forest."""
    if "input_ids" not in arguments:
        raise Unsupported("expected input_ids [B, S], by which rows are compared, received none"
                          + (", but inputs_embeds" if "inputs_embeds" in arguments else ""))  # fmt: skip
    if arguments.get("output_attentions", getattr(backbone.config, "output_attentions", False)):
        raise Unsupported("output_attentions: expected False with a patched model, received True: weights are not kept")
    known = {routes.NAME, *INPUTS, *OUTPUTS, *UNUSED, *BOUNDARIES, "output_attentions", "use_cache", "return_dict"}
    for name, value in arguments.items():
        is_plain = isinstance(value, torch.Tensor | bool | int | float | str)  # other objects may do anything
        if name not in known and not (is_plain and not may_be_read(backbone, name)):
            raise Unsupported(f"{name}: expected none with a patched model, received {_described(value)}: it is not "
                              "known whether tokens that differ in it may be shared")  # fmt: skip
    for name in (*INPUTS, *BOUNDARIES):
        if name in arguments and not isinstance(arguments[name], torch.Tensor):
            raise Unsupported(f"{name}: expected a tensor, received {_described(arguments[name])}")
    settings = backbone._espalier.settings
    check_training(modules_with_settings(backbone) if settings is None else settings, dropout)
    if routes.NAME in arguments:
        arguments[routes.NAME] = routes.checked_routes(backbone, arguments)
    return {name: arguments[name] for name in OUTPUTS if name in arguments}


def _described(value: object) -> str:
    shape = f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return f"{type(value).__name__}{shape}"


def _check_first_batch(given: Patch, batch: Mapping[str, Any]) -> None:
    model, given.unchecked = given.unchecked(), None
    if model is not None and given.check is not None:
        known = (*INPUTS, *BOUNDARIES, routes.NAME)
        with with_values([(given, "meter", None)]):
            given.check(model, {name: batch[name] for name in known if name in batch})


def _run(backbone: Any, given: Patch, arguments: dict[str, Any], passed_on: Mapping[str, Any], asked: Asked | None) -> Any:
    given.rest.is_lasting = False
    run, inputs, index = _planned(backbone, given, arguments, asked)
    inputs |= {**passed_on, "use_cache": False, "return_dict": True, "espalier_tree": run}
    length = arguments["input_ids"].shape[1]
    with noise_of_batch(backbone, length, run.num_tokens) if given.dropout else contextlib.nullcontext():
        output = given.call_stock(backbone, inputs)
    routes.check_replayed(run)
    check_followed(backbone, run)
    if asked is not None:
        hidden = asked.answer(output.last_hidden_state.squeeze(0), index.numpy(), type(output))
    _expand_output(output, index, arguments["input_ids"].shape, is_last_wanted=asked is None)
    if asked is not None:
        output["last_hidden_state"] = hidden
    return output if arguments.get("return_dict", getattr(backbone.config, "return_dict", True)) else output.to_tuple()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _planned(backbone: Any, given: Patch, arguments: dict[str, Any],
             asked: Asked | None) -> tuple[TreeRun, dict[str, Any], Tensor]:  # fmt: skip
    """(TreeRun, inputs of the model, index): index [B * S] on the CPU says where the batch's tokens are in the forest, of
    which padding is one past the end."""
    deepspeed.refuse_deepcompile()
    given.install_mixers(backbone)  # a copy of a patched model was not there when that was patched
    input_ids = arguments["input_ids"]
    rows, layout = forest_of(arguments) if asked is None or asked.forest is None else asked.forest
    run = TreeRun(layout, input_ids.device, attention.resolved(given.backend, input_ids.device))
    given.runs.add(run)
    given.count(rows, layout)
    inputs = {"input_ids": torch.tensor(layout.input_ids, device=input_ids.device, dtype=input_ids.dtype).unsqueeze(0)}
    if "position_ids" in inspect.signature(type(backbone).forward).parameters:
        inputs["position_ids"] = run.position.long().unsqueeze(0)
    index = torch.from_numpy(index_of(rows, layout, input_ids.numel()))
    if routes.NAME in arguments:
        run.routes = routes.of_batch(backbone, arguments[routes.NAME], rows.places, layout).to(input_ids.device)
        given.replay_routes(backbone)
    return run, inputs, index


def forest_of(arguments: Mapping[str, Any]) -> tuple[Rows, Layout]:
    """(rows, layout of their forest) of a batch, by the tensors of `arguments` that say what its rows are."""
    arrays = {name: arguments[name].detach().cpu().numpy() for name in (*INPUTS, *BOUNDARIES) if name in arguments}
    rows = read_rows(arrays["input_ids"], arrays.get("attention_mask"), arrays.get("position_ids"))
    if len(rows.tokens) == 0:
        raise Unsupported("attention_mask: expected at least one token, received padding alone")
    for name in BOUNDARIES:
        if name in arrays:
            check_boundaries(name, arrays[name], rows)
    keys = None
    if routes.NAME in arguments:
        keys = routes.merge_keys(arguments[routes.NAME][torch.from_numpy(rows.places)])
    is_on_gpu = arguments["input_ids"].is_cuda  # where attention may be by intervals
    return rows, build((rows.offsets, rows.tokens), merge_keys=keys, most_leaves_first=is_on_gpu).layout()


def _expand_output(output: Any, index: Tensor, shape: torch.Size, is_last_wanted: bool) -> None:
    """Replaces what `output` holds for the tokens of the forest by the same for those of the batch."""
    done: dict[int, Tensor] = {}  # the last hidden state may stand there twice

    def expanded(values: Tensor) -> Tensor:
        if id(values) not in done:
            width = values.shape[-1]
            rows: Tensor = Expand.apply(values.reshape(-1, width), index.to(values.device))  # type: ignore[no-untyped-call]
            done[id(values)] = rows.view(*shape, width) if values.dim() == 3 else rows
        return done[id(values)]

    for name, value in list(output.items()):
        if isinstance(value, tuple):
            output[name] = tuple(expanded(part) for part in value)
        elif isinstance(value, torch.Tensor) and (is_last_wanted or name != "last_hidden_state"):
            output[name] = expanded(value)
