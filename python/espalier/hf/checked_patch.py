# SPDX-License-Identifier: Apache-2.0
"""`espalier.hf.patch`: patching, and the proof on the first batch where it is asked for."""

from collections.abc import Mapping
from typing import Any, TypeVar

from .families import backbone_of
from .patching import apply_patch
from .tensor_parallel import check_whole
from .verification import verify

Model = TypeVar("Model")


def patch(model: Model, *, backend: str = "auto", check: bool = False, skip_logits: bool = False,
          dropout: str | None = None) -> Model:  # fmt: skip
    """Makes `model` run on the forest of the rows of each batch, with the same losses and gradients.

    It is changed in place. Its config is not, and models that share the config stay as they are. Patching a patched model
    changes its backend. For families and versions of Transformers that the tests do not cover, a small copy of the model proves
    first that trees are exact, in a few seconds, once for each config. Of a model for text and images the language model is
    patched, for rows of text alone.

    Batches are as before: input_ids [B, S] with an attention_mask [B, S] for padding on either side, or rows packed into one
    with position_ids that restart; labels and what else a head takes are up to the head. Outputs are as before as well:
    hidden states [B, S, H], zeros at padding; no cache is returned. With a cache (use_cache=True or past_key_values, as in
    `generate`) the model runs as Transformers has it, which needs torch.no_grad().

    Models with a mixture of experts also take routed_experts, integers [B, S, L, K] (L: the routers, or all layers): their
    routers take these K experts of each token, with weights from their own scores, instead of choosing. -1 everywhere leaves
    the choice to the router. Tokens with different routes are not shared.

    Args:
        model: A model of Transformers with or without a head, or one wrapped by PEFT or torch.compile.
        backend: What computes attention: "espalier" (torch.ops.espalier), "flex" (FlexAttention), "sdpa" (torch's attention
            with a mask [T, T]); "auto" is "espalier" on a CPU, and on a GPU where its kernels have proven themselves, else
            "flex". "cudnn", "fla" and "mamba_ssm" are "auto" where cudnn.flex_attention, flash-linear-attention, or mamba_ssm is
            there and right, and refused elsewhere; "auto" takes them where they are, and says once what the extra would add.
        check: Verify the first batch that is trained on (`verify`), and raise VerificationError where it fails; for models
            whose head gives logits. For families that the tests cover it stands in for the proof of other versions.
        skip_logits: In training with labels leave `logits` out of the output, as Liger does, instead of computing them when
            they are read, for which the hidden states of the batch are kept as long as the output is.
        dropout: None: a model in training whose layers have dropout, or noise on embeddings (NEFTune), is refused. "shared":
            both are drawn once for each distinct token of a batch, and rows that share a token share its draw. Gradients are as
            unbiased as with ordinary dropout, and equally distributed where nothing is shared; the draws of rows that share
            tokens are not independent. Dropout of attention weights stays refused. docs/transformers.md says more.

    Returns:
        The model.

    Raises:
        Unsupported: The model is none that trees are exact for, and the message names its first layer that is not; it is an
            InputError. A patched model raises it for batches
            before they run: dropout in training, reentrant gradient checkpointing, softcap, masks [B, 1, S, S], inputs_embeds,
            and tensors of which it is not known whether they may be shared.

    Examples:
        >>> import espalier, torch, transformers
        >>> config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                                   num_attention_heads=4, num_key_value_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.tensor([[11, 12, 13, 14], [11, 12, 13, 15]])
        >>> before = model(input_ids=ids, labels=ids).loss
        >>> loss = espalier.hf.patch(model)(input_ids=ids, labels=ids).loss
        >>> bool(abs(loss - before) < 1e-5), espalier.hf.sharing(model).tree_tokens
        (True, 5)
    """
    if check:
        check_whole(model, "espalier.hf.patch(check=True)")
    apply_patch(model, backend, _check_batch if check else None, dropout=dropout)
    backbone_of(model)._espalier.skip_logits = skip_logits
    return model


def _check_batch(model: Any, batch: Mapping[str, Any]) -> None:
    verify(model, batch).check()
