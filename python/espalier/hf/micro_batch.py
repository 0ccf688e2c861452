# SPDX-License-Identifier: Apache-2.0
"""Running a patched model on a micro-batch: log-probabilities or hidden states in place of its logits."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, Unsupported
from . import deepspeed, shared_head, tensor_parallel
from .attention import resolved
from .changes import is_hook_of_wrapper
from .dropout import NOISE
from .families import (backbone_of, check_followed, check_training, inside_trainer, mixer_of, modules_with_settings, refuse_alora,
                       stock_class, unwrapped)  # fmt: skip
from .gradient_sync import drop_whole_gradients
from .heads import edge_logprobs, logit_scale
from .patching import Patch, apply_patch, patch_of
from .run import TreeRun


class MicroBatchModel:
    """A model of Transformers with a head, patched where it is not yet, as a function of micro-batches.

    It is called from its outermost module down, so that the hooks of wrappers run: FSDP2 gathers parameters, PEFT
    enables adapters. Raises Unsupported for models that `patch` refuses, and for compiled ones, wrapped forwards and
    losses of routers."""

    def __init__(self, model: Any) -> None:
        self.model, self.inner, self.backbone = model, unwrapped(model), backbone_of(model)
        self._check()
        if patch_of(self.backbone) is None:
            apply_patch(model)
        self._patch: Patch = self.backbone._espalier
        self._takes_positions = "position_ids" in inspect.signature(stock_class(self.backbone).forward).parameters

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.backbone.parameters()).device
        return device

    @property
    def dtype_of_sums(self) -> torch.dtype:
        return torch.promote_types(next(self.backbone.parameters()).dtype, torch.float32)

    @property
    def backend(self) -> str:
        return resolved(self._patch.backend, self.device)

    @property
    def has_dropout(self) -> bool:
        """Whether it may be in layers, as `patch` was told."""
        return self._patch.dropout is not None

    @property
    def is_recurrent(self) -> bool:
        """Whether it has layers that pass on states along paths."""
        return mixer_of(self.backbone) is not None

    def check_dividing(self) -> None:
        """Raises Unsupported where ranks cannot each run a part of a micro-batch."""
        if self.has_dropout:
            raise Unsupported('dropout="shared": expected none on a mesh with the dimension cp, received it: every rank '
                              "would drop something else of what others read; patch without it")  # fmt: skip

    def prepare(self, has_context: bool, has_routes: bool) -> None:
        """Call before the first micro-batch. Raises Unsupported for what has become of the model, as `patch` does for
        settings of training, and for a backend without context where that is needed; and InputError where gradients
        are those of a part of a step."""
        self._check()
        if self._patch.unchecked is not None:
            raise Unsupported("espalier.hf.patch(check=True): expected a first batch that has been verified, received a "
                              "step before one; call model(**batch) once, or espalier.hf.verify and patch without "
                              "check")  # fmt: skip
        self._refuse_partial_gradients()
        self._patch.install_mixers(self.backbone)
        if has_routes:
            self._patch.replay_routes(self.backbone)  # before the layers are named: its hooks come first
        check_training(modules_with_settings(self.backbone), self._patch.dropout)
        refuse_alora(self.backbone)
        if (reason := self._patch.look(self.backbone)) is not None:
            raise Unsupported(f"espalier.Step: expected layers that take tokens one at a time, received {reason}, which may look "
                              "at rows; remove it, or train without a Step")  # fmt: skip
        if self.has_dropout and (noise := getattr(self.backbone.get_input_embeddings(), NOISE, None)):
            raise Unsupported(f"neftune_noise_alpha: expected none with espalier.Step, received {noise}: its scale is that of "
                              "a batch [B, S], which micro-batches are not; leave it out")  # fmt: skip
        self._parameters = list(self.model.parameters())
        if has_context and self.backend != "espalier":
            raise Unsupported(f"backend: expected espalier under partition, received {self.backend}, which does not "
                              "read keys of other micro-batches; patch the model again with it, or plan with "
                              'strategy="tree-packing"')  # fmt: skip

    def mark_partial(self, progress: str) -> None:
        """Call where `.grad` holds gradients of a part of a step; progress: of which, as text. Those that FSDP2 has not
        reduced are dropped: no zero_grad() would reach them."""
        drop_whole_gradients(self.model)
        self._patch.partial_gradients = progress

    def discard(self) -> None:
        """Forgets all gradients."""
        self.model.zero_grad(set_to_none=True)
        self._patch.partial_gradients = None

    def _refuse_partial_gradients(self) -> None:
        progress = self._patch.partial_gradients
        if progress is None or not torch.is_grad_enabled():
            return
        if any(_has_values(parameter.grad) for parameter in self.model.parameters()):
            raise InputError("espalier.Step: expected gradients of whole steps or none, received those of a loop that "
                             f"was left after {progress} had run backward; call step.discard(), or zero them")  # fmt: skip
        self._patch.partial_gradients = None

    def versions(self) -> list[int]:
        """Numbers that change with the parameters."""
        return [parameter._version for parameter in self._parameters]

    def __call__(self, run: TreeRun, input_ids: Tensor, result: Callable[[Tensor], Any]) -> Any:
        """What `result` makes of the hidden states [T, H]. run: the ContextRun; input_ids [T]."""
        inputs: dict[str, Any] = {"input_ids": input_ids.unsqueeze(0), "use_cache": False, "return_dict": True,
                                  "espalier_tree": run}  # fmt: skip
        if self._takes_positions:
            inputs["position_ids"] = run.position.long().unsqueeze(0)
        self._patch.runs.add(run)
        self._patch.rest.is_lasting = False

        def forward(*args: Any, **kwargs: Any) -> Any:
            _check_handed_on(inputs["input_ids"], *args, **kwargs)
            return result(self.backbone(**inputs).last_hidden_state.squeeze(0))

        with _forward_of(self.inner, forward):
            found = self.model(input_ids=inputs["input_ids"])
        check_followed(self.backbone, run)
        return found

    def edge_logprobs(self, hidden: Tensor, edge_row: Tensor, edge_target: Tensor, *, temperature: float,
                      entropy: bool) -> Any:  # fmt: skip
        """ops.edge_logprobs of hidden [S, H] by the head of the model."""
        head = self.inner.get_output_embeddings()
        if not all(map(is_hook_of_wrapper, (*head._forward_hooks.values(), *head._forward_pre_hooks.values()))):
            raise Unsupported("espalier.Step.logprobs: expected a head without hooks of others, received some, which would see "
                              "no rows; remove them, or take step.hidden(batch) and apply the head yourself")  # fmt: skip
        if not isinstance(head, nn.Linear) or not tensor_parallel.has_own_forward(head):
            raise Unsupported("espalier.Step.logprobs: expected torch.nn.Linear with its own forward as the head, "
                              f"received {type(head).__module__}.{type(head).__name__}; take step.hidden(batch) and "
                              "apply it yourself")  # fmt: skip
        if not self._patch.around_of(self.inner).has_plain_head(self.backbone):
            raise Unsupported("espalier.Step.logprobs: expected logits that are those of the output layer, received a "
                              f"{type(self.inner).__name__}, which changes them, by a softcap or a scale; take "
                              "step.hidden(batch) and apply both yourself")  # fmt: skip
        scale = logit_scale(self.inner)

        def forward(hidden: Tensor) -> Any:
            if tensor_parallel.is_parallel(head.weight):
                part = tensor_parallel.VocabularyPart(head)
                return part.edge_logprobs(hidden, edge_row, edge_target, temperature=temperature, scale=scale, entropy=entropy)
            return edge_logprobs(hidden, head, edge_row, edge_target, temperature=temperature, logit_scale=scale, entropy=entropy)

        with _forward_of(head, forward):
            return head(hidden)

    def _check(self) -> None:
        model = self.model
        deepspeed.refuse_engine(model, "espalier.Step")
        if (inside := inside_trainer(model)) is not model:
            raise Unsupported(f"espalier.Step: expected a model of Transformers, received {type(model).__name__} around a "
                              f"{type(inside).__name__}, which is called in another way; give the model inside")  # fmt: skip
        if self.inner is self.backbone:
            raise Unsupported("espalier.Step: expected a model with a head, as AutoModelForCausalLM gives it, received "
                              f"{type(self.inner).__name__} alone")  # fmt: skip
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise Unsupported("espalier.Step: expected a model that reduces nothing by itself, or fully_shard of "
                              "FSDP2, received DistributedDataParallel; give model.module, and all-reduce gradients "
                              "after the loop")  # fmt: skip
        for name, module in (("model", model), *model.named_modules()):
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise Unsupported(f"espalier.Step: expected a model that is not compiled, received a compiled {name}")
        adapter: Any = getattr(model, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise Unsupported(f"espalier.Step: expected adapters in the layers of the model, such as LoRA, received "
                              f"{getattr(adapter.peft_type, 'value', adapter.peft_type)}, which adds virtual tokens "
                              "before each row")  # fmt: skip
        if (foreign := shared_head.foreign_forward(self.inner)) is not None:
            raise Unsupported(f"espalier.Step: expected the forward of {type(self.inner).__name__} itself, received "
                              f"{_advice_on(foreign)}")  # fmt: skip
        if getattr(self.backbone.config, "output_router_logits", False):
            raise Unsupported("output_router_logits: expected False for espalier.Step, received True: load-balancing "
                              "losses depend on all micro-batches at once")  # fmt: skip


def _advice_on(forward: Any) -> str:
    """What has been set as the forward of a model, and what to do about it."""
    if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
        return ("the fused head that a trainer of TRL has set; train by espalier.trl.patch(trainer) and "
                "trainer.train(), or give a model that no trainer has been made of")  # fmt: skip
    return ("one that another library has wrapped around it; with Accelerate, give "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False), and run the loop under "
            "accelerator.autocast()")  # fmt: skip


def _check_handed_on(expected: Tensor, input_ids: Tensor | None = None, **others: Any) -> None:
    """Raises Unsupported where wrappers pass on more to a model than the tokens [1, T] of a micro-batch."""
    for name, value in others.items():
        if value is not None and name not in ("return_dict", "output_hidden_states", "output_attentions"):
            raise Unsupported(f"{name}: expected a model whose wrappers pass on input_ids alone, received "
                              f"{type(value).__name__}, which micro-batches of espalier.Step do not have")  # fmt: skip
    if input_ids is not expected and (input_ids is None or not torch.equal(input_ids.to(expected.device), expected)):
        raise Unsupported("input_ids: expected a model whose wrappers pass on the tokens of a micro-batch, received "
                          f"{'none' if input_ids is None else 'others'}")  # fmt: skip


def _has_values(gradient: Any) -> bool:
    """Whether any element is not 0: of a sharded gradient on this rank, since others may not be asking."""
    if gradient is None:
        return False
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return bool((local != 0).any())


@contextlib.contextmanager
def _forward_of(module: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, `function` is the forward of `module`, where only shared_head may have replaced it. Hooks still run. Only in
    this thread: others may generate meanwhile."""
    thread, own = threading.get_ident(), module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return function(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
