# SPDX-License-Identifier: Apache-2.0
"""Adapters over the weights of an Engine."""

from .native_engine import native


class Adapter:
    """An adapter of an `Engine`: its matrices, gradients and optimiser state. Made by `Engine.new_adapter`.

    Args:
        engine: Whose weights it adapts.
        adapter: What the engine works with.

    Examples:
        >>> adapter = engine.new_adapter(lora_rank=2)
        >>> type(adapter).__name__
        'Adapter'
    """

    def __init__(self, engine: "native.Engine", adapter: "native.Adapter") -> None:
        self._engine, self._adapter = engine, adapter

    def copy(self) -> "Adapter":
        """A copy of the matrices as they are, without gradients and optimiser: to sample from while training goes on.

        It takes the memory of the matrices alone, and cannot be trained. `Engine.save` saves it.

        Returns:
            The copy.

        Raises:
            InputError: The engine is at work, or the last load or optimiser step of the adapter failed half-way.

        Examples:
            >>> adapter = engine.new_adapter(lora_rank=2)
            >>> snapshot = adapter.copy()
            >>> engine.use(adapter)
            >>> metrics = engine.forward_backward([[11, 12, 13, 14]])
            >>> update = engine.optim_step(learning_rate=1e-2)
            >>> trained = engine.logprobs([[11, 12, 13]])[0]
            >>> engine.use(snapshot)
            >>> bool((engine.logprobs([[11, 12, 13]])[0] == trained).all())
            False
            >>> engine.use(None)
        """
        return Adapter(self._engine, self._engine.copy(self._adapter))
