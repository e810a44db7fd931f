"""Values that hold for a block of code, and for the tasks that it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["holding"]

_Value = TypeVar("_Value")


@contextlib.contextmanager
def holding(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a context variable a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
