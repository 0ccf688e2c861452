# SPDX-License-Identifier: Apache-2.0
"""Which rows a batch is made of, for backbones that are not handed all that says so.

Some heads drop position_ids, by which packed rows are told apart. Models for text and images hand embeddings to their language
model, in which images may stand: hooks on them tell the language model which rows of tokens these embeddings are of. So batches
of text alone run on trees, and batches with images are refused."""

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import Unsupported
from .for_now import remove_hooks
from .rows import BOUNDARIES, INPUTS

_OF_IMAGES = re.compile(r"pixel|image|video|audio|input_features|mm_encoder")
_KINDS = ("token_type_ids", "mm_token_type_ids")  # 0 where text is
_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")  # that images take the place of
_MADE = ("inputs_embeds", "per_layer_inputs", *INPUTS, *_KINDS)  # of the rows, by the model around

_told = threading.local()  # .rows: by id of a language model, .heads: by id of a backbone


def named_arguments(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `module` that are not None, by their names; those that its forward takes as **kwargs among them.
    Raises TypeError where they do not fit its forward."""
    signature = inspect.signature(type(module).forward)
    named = dict(list(signature.bind(module, *args, **kwargs).arguments.items())[1:])  # without self
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return {name: value for name, value in named.items() if value is not None}


def attach(composite: Any) -> None:
    """Adds the hooks to a model whose language model is patched; harmless where they are."""
    if composite is not None and not any(hook is _tell for hook in composite._forward_pre_hooks.values()):
        composite.register_forward_pre_hook(_tell, with_kwargs=True)
        composite.register_forward_hook(_forget, always_call=True)


def detach(composite: Any) -> None:
    """Takes back `attach`."""
    if composite is not None:
        remove_hooks(composite, _tell, _forget)


@contextlib.contextmanager
def of_head(backbone: Any, batch: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `of_rows` knows the tensors of a batch, which a head may not hand on to its backbone."""
    before: Mapping[int, Any] = getattr(_told, "heads", {})
    _told.heads = {**before, id(backbone): {name: batch[name] for name in (*INPUTS, *BOUNDARIES) if name in batch}}
    try:
        yield
    finally:
        _told.heads = before


@torch.compiler.disable  # type: ignore[untyped-decorator]
def of_rows(backbone: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a backbone with the tensors that say which rows it runs on; the same where it was handed all."""
    rows: Mapping[str, Any] | None = getattr(_told, "rows", {}).get(id(backbone))
    if rows is not None:
        arguments = {name: value for name, value in arguments.items() if name not in _MADE} | dict(rows)
    batch: Mapping[str, Any] = getattr(_told, "heads", {}).get(id(backbone), {})
    ids, of_batch = arguments.get("input_ids"), batch.get("input_ids")
    is_same = isinstance(ids, torch.Tensor) and isinstance(of_batch, torch.Tensor) and ids.shape == of_batch.shape
    return {**batch, **arguments} if is_same else arguments


def _tell(composite: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = composite.language_model.__dict__.get("_espalier")
    if given is None or given.rest.is_entered():
        return
    named = named_arguments(composite, args, kwargs)
    if "espalier_tree" in named or named.get("use_cache") or "past_key_values" in named or "cache" in named:
        return
    for name, value in named.items():
        if _OF_IMAGES.search(name) or (name in _KINDS and bool((value != 0).any())):
            raise Unsupported(f"{name}: expected rows of text alone with a patched model, received images or the like; call "
                              "espalier.hf.unpatch(model) for batches with images")  # fmt: skip
    rows = {name: named[name] for name in INPUTS if name in named}
    for name in _TOKENS:
        token = getattr(composite.config, name, None)
        if token is not None and "input_ids" in rows and bool((rows["input_ids"] == token).any()):
            raise Unsupported(f"input_ids: expected rows of text alone with a patched model, received {token}, the {name} of "
                              "the config")  # fmt: skip
    if "input_ids" in rows:
        _told.rows = {**getattr(_told, "rows", {}), id(composite.language_model): rows}


def _forget(composite: Any, _args: Any, _output: Any) -> None:
    getattr(_told, "rows", {}).pop(id(composite.language_model), None)
