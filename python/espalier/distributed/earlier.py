# SPDX-License-Identifier: Apache-2.0
"""Gradients that were there before a step."""

from collections.abc import Iterable

from torch import Tensor


class EarlierGradients:
    """Sets the gradients of `parameters` aside, so that a step has only its own gradients."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._parameters = list(parameters)
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def add_back(self) -> None:
        """Adds them to those of the step."""
        for parameter, earlier in zip(self._parameters, self._gradients):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def put_back(self) -> None:
        """Drops those of the step."""
        for parameter, earlier in zip(self._parameters, self._gradients):
            parameter.grad = earlier
