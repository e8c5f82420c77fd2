"""Compilation of kernels where numba is installed; without it the same functions run in the interpreter, slower and alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Flags = NDArray[np.bool_]
Kernel = Callable[[Ids, int, int, Flags], None]
F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba import njit as _njit
except ImportError:  # an extra: kvbench[curve]
    _njit = None

COMPILES = _njit is not None
"""Whether kernels run as machine code."""


def compiled(function: F) -> F:
    """`function` as machine code from its first call on, kept on disk between processes where some place can be written."""
    if _njit is None:
        return function
    try:
        machine: F = _njit(cache=True)(function)
    except RuntimeError:  # neither __pycache__ nor the user's cache directory can be written: compile in every process
        machine = _njit()(function)
    return machine
