"""The names of Cython that the modules of the compiled core use, while Python runs them.

:mod:`subscriber._implementation` tells how these modules are compiled. The compiler replaces this module with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["Py_ssize_t", "cast", "cfunc", "compiled", "inline", "longlong", "p_Py_ssize_t", "p_char", "p_uchar", "ulonglong"]

compiled: Final[bool] = bool(0)
"""Whether this is the compiled form."""
Py_ssize_t = int
longlong = int
ulonglong = int
p_char = bytes
# pointers, also to write through
p_uchar = Any
p_Py_ssize_t = Any

_F = TypeVar("_F", bound=Callable[..., Any])


def cfunc(function: _F) -> _F:
    """A function of C, for this module only."""
    return function


def inline(function: _F) -> _F:
    """A function that is copied to where it is called."""
    return function


def cast(_: object, pointer: object) -> Any:
    """The same address as a pointer of another type."""
    return pointer
