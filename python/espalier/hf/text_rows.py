# SPDX-License-Identifier: Apache-2.0
"""Models for text and images whose language model is patched where it stands: batches of text alone run on trees, and batches
with images are refused.

Such a model hands embeddings to its language model, in which images may stand. Hooks on it tell the language model which rows
of tokens these embeddings are of."""

import inspect
import re
import threading
from collections.abc import Mapping
from typing import Any

from ..errors import Unsupported

_OF_IMAGES = re.compile(r"pixel|image|video|audio|input_features|mm_encoder")
_KINDS = ("token_type_ids", "mm_token_type_ids")  # 0 where text is
_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")  # that images take the place of
_ROWS = ("input_ids", "attention_mask", "position_ids")
_MADE = ("inputs_embeds", "per_layer_inputs", *_ROWS, *_KINDS)  # of the rows, by the model around

_told = threading.local()  # .rows: by id of a language model


def attach(composite: Any) -> None:
    """Adds the hooks to a model whose language model is patched; harmless where they are."""
    if composite is not None and not any(hook is _tell for hook in composite._forward_pre_hooks.values()):
        composite.register_forward_pre_hook(_tell, with_kwargs=True)
        composite.register_forward_hook(_forget, always_call=True)


def detach(composite: Any) -> None:
    """Takes back `attach`."""
    if composite is None:
        return
    for hooks, own in ((composite._forward_pre_hooks, _tell), (composite._forward_hooks, _forget)):
        for key in [key for key, hook in hooks.items() if hook is own]:
            del hooks[key]
            composite._forward_pre_hooks_with_kwargs.pop(key, None)
            composite._forward_hooks_always_called.pop(key, None)


def of_rows(backbone: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a language model with the rows that its embeddings are of; the same where nobody told."""
    rows: Mapping[str, Any] | None = getattr(_told, "rows", {}).get(id(backbone))
    if rows is None:
        return arguments
    return {name: value for name, value in arguments.items() if name not in _MADE} | dict(rows)


def _tell(composite: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = composite.language_model.__dict__.get("_espalier")
    if given is None or given.rest.is_on():
        return
    named = inspect.signature(type(composite).forward).bind(composite, *args, **kwargs).arguments
    named = {name: value for name, value in (named | named.get("kwargs", {})).items() if value is not None}
    if "espalier_tree" in named or named.get("use_cache") or "past_key_values" in named or "cache" in named:
        return
    for name, value in named.items():
        if _OF_IMAGES.search(name) or (name in _KINDS and bool((value != 0).any())):
            raise Unsupported(f"{name}: expected rows of text alone with a patched model, received images or the like; call "
                              "espalier.hf.unpatch(model) for batches with images")  # fmt: skip
    rows = {name: named[name] for name in _ROWS if name in named}
    for name in _TOKENS:
        token = getattr(composite.config, name, None)
        if token is not None and "input_ids" in rows and bool((rows["input_ids"] == token).any()):
            raise Unsupported(f"input_ids: expected rows of text alone with a patched model, received {token}, the {name} of "
                              "the config")  # fmt: skip
    if "input_ids" in rows:
        _told.rows = {**getattr(_told, "rows", {}), id(composite.language_model): rows}


def _forget(composite: Any, _args: Any, _output: Any) -> None:
    getattr(_told, "rows", {}).pop(id(composite.language_model), None)
