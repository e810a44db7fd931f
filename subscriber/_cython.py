"""The names of Cython that the modules of the compiled core use, while Python runs them.

:mod:`subscriber._implementation` tells how these modules are compiled. The compiler replaces this module with its own.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Py_ssize_t", "compiled", "p_char"]

compiled: Final[bool] = bool(0)
"""Whether this is the compiled form."""
Py_ssize_t = int
p_char = bytes
