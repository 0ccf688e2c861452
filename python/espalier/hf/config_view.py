# SPDX-License-Identifier: Apache-2.0
"""Another attention implementation for one model, though its config may be that of other models as well."""

import copy
import functools
from typing import Any

from .resting import Rest


def tree_view(config: Any, name: str, rest: Rest) -> Any:
    """A config of the same class with the same values, now and later, but for `_attn_implementation`, which is
    `name` wherever `rest`, a Rest, is not on."""
    config_class: Any = type(config)
    view: Any = object.__new__(_view_class(config_class))
    object.__setattr__(view, "__dict__", config.__dict__)
    view.espalier_original, view.espalier_name, view.espalier_rest = config, name, rest
    return view


def original_of(config: Any) -> Any:
    """What tree_view was given; any other config itself."""
    return config.espalier_original if is_view(config) else config


def is_view(config: object) -> bool:
    return bool(getattr(type(config), "espalier_is_view", False))


@functools.cache
def _view_class(config_class: Any) -> Any:
    """A subclass whose objects share the values of an object of `config_class`."""

    def attention(view: Any) -> Any:
        return view.espalier_original._attn_implementation if view.espalier_rest.is_on() else view.espalier_name

    def set_attention(view: Any, value: Any) -> None:
        if value != view.espalier_name:  # which somebody has read here before, to set it again
            view.espalier_original._attn_implementation = value

    # Copies and pickles hold a view of the config's copy.
    def copied(view: Any, memo: dict[int, Any]) -> Any:
        return tree_view(copy.deepcopy(view.espalier_original, memo), view.espalier_name,
                         copy.deepcopy(view.espalier_rest, memo))  # fmt: skip

    def reduced(view: Any, _protocol: Any) -> tuple[Any, ...]:
        return tree_view, (view.espalier_original, view.espalier_name, view.espalier_rest)

    def made(_view_class: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call of the class makes, as older Transformers call it to save a config: one that is no view."""
        return config_class(*args, **kwargs)

    # Slots, since the values live in the original's dictionary.
    members = {"__slots__": ("espalier_original", "espalier_name", "espalier_rest"), "espalier_is_view": True,
               "__module__": config_class.__module__, "__qualname__": config_class.__qualname__,
               "__new__": made, "__deepcopy__": copied, "__reduce_ex__": reduced,
               "__eq__": config_class.__eq__, "__hash__": config_class.__hash__,
               "_attn_implementation": property(attention, set_attention)}  # fmt: skip
    return type(config_class.__name__, (config_class,), members)
