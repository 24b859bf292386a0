"""Tell operands that are laid out like those of the call before, which costs less than to check them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _none_is(*_: Any) -> bool:
    return False


class Layout:
    """The layout of some tensors: type, dtype, device, dimensions and strides, compared by torch in one call.

    A check of operands reads nothing else but addresses. So operands laid out like some that passed it pass it, and
    whoever asks looks at the alignment of addresses alone. What is not recognised says nothing: the check decides.

    Attributes:
        same: ``same(*tensors)`` tells whether they are laid out like those that ``learn`` was given.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Recognise nothing any more."""
        self.same: Callable[..., bool] = _none_is
        self._tried = False

    def learn(self, *tensors: Tensor) -> None:
        """Recognise the layout of these, once after each ``forget``; of none, where torch has no such comparison."""
        if self._tried:
            return
        self._tried = True
        try:
            from torch._C._dynamo.guards import TensorGuards

            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self.same = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        except (ImportError, TypeError):  # it is no part of torch's promises
            self.same = _none_is
