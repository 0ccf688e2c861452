# SPDX-License-Identifier: Apache-2.0
"""Other values of attributes, and hooks of modules, for as long as a block runs."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def with_values(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, attributes have other values, given as (object, name, value); afterwards they have those of before."""
    changed = [(each, name, getattr(each, name), value) for each, name, value in values]
    for each, name, _, value in changed:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, name, before, _ in changed:
            setattr(each, name, before)


def remove_hooks(module: Any, *own: Any) -> None:
    """Removes these functions from the hooks of forward passes of a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in own]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
