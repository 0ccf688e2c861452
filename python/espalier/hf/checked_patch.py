# SPDX-License-Identifier: Apache-2.0
"""`espalier.hf.patch`: patching, and the proof on the first batch where it is asked for."""

from collections.abc import Mapping
from typing import Any, TypeVar

from .patching import apply_patch
from .verification import verify

Model = TypeVar("Model")


def patch(model: Model, *, backend: str = "auto", check: bool = False) -> Model:
    """Makes `model` run on the forest of the rows of each batch, with the same losses and gradients; returns it.

    model    a model of Transformers with or without a head, or one wrapped by PEFT or torch.compile;
             espalier.hf.families lists the families. It is changed in place. Its config is not, and models that share
             the config stay as they are.
    backend  what computes attention: "espalier" (torch.ops.espalier), "flex" (FlexAttention), "sdpa" (torch's attention
             with a mask [T, T]); "auto" is "espalier" on a CPU, and on a GPU where the compiled trainer is there and has
             proven the kernels; else "flex".
    check    verify the first batch that is trained on (`verify`), and raise VerificationError where it fails; for
             models whose head gives logits.

    With a version of Transformers that the package is not tested with, and without `check`, a small random model of the
    class proves first that trees are exact.

    Batches are as before: input_ids [B, S] with an attention_mask [B, S] for padding on either side, or rows packed
    into one with position_ids that restart; labels and what else a head takes are up to the head. Outputs are as before
    as well: hidden states [B, S, H], zeros at padding; no cache is returned. With a cache (use_cache=True or
    past_key_values, as in `generate`) the model runs as Transformers has it, which needs torch.no_grad().

    Models with a mixture of experts also take routed_experts, integers [B, S, L, K] (L: the routers, or all layers):
    their routers take these K experts of each token, with weights from their own scores, instead of choosing. -1
    everywhere leaves the choice to the router. Tokens with different routes are not shared.

    Raises Unsupported, naming what, for models here, and for batches before they run: dropout in training, reentrant
    gradient checkpointing, softcap, masks [B, 1, S, S], inputs_embeds, and tensors of which it is not known whether
    they may be shared. Patching a patched model changes its backend."""
    return apply_patch(model, backend, _check_batch if check else None)


def _check_batch(model: Any, batch: Mapping[str, Any]) -> None:
    verify(model, batch).check()
