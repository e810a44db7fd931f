"""Take CopyData messages from libpq.

psycopg makes several objects for each message. For narrow rows, that takes most of the time that this process needs for a copy. So the
compiled form calls the functions of libpq itself (``copy_data.pxd``), in the library that psycopg has loaded.

Source: PostgreSQL manual, libpq, Functions Associated with the COPY Command.
"""

from __future__ import annotations

import sys
from typing import Any

import psycopg
from psycopg import pq

from subscriber import _cython as cython

__all__ = ["drain"]


def _addresses() -> tuple[int, int]:
    """Where PQgetCopyData and PQfreemem are; zeros: messages are taken by psycopg."""
    if not cython.compiled or pq.__impl__ == "python":
        return 0, 0
    try:
        # a Python that was built without libffi does not have it
        import ctypes  # noqa: PLC0415

        # psycopg's module in C depends on libpq: so its functions are found there, unless libpq is linked into it and hidden
        library = ctypes.CDLL(sys.modules[pq.PGconn.__module__].__file__)
        get_copy_data, free_memory = (ctypes.cast(each, ctypes.c_void_p).value for each in (library.PQgetCopyData, library.PQfreemem))
        # psycopg is bound to a libpq that was preloaded or is a part of the program, and its connections have another layout
        if hasattr(ctypes.CDLL(None), "PQgetCopyData"):
            return 0, 0
    except (ImportError, OSError, AttributeError):
        return 0, 0
    return get_copy_data or 0, free_memory or 0


_GET_COPY_DATA, _FREE_MEMORY = _addresses()


def drain(pgconn: Any, messages: list[bytes], size: int, reads: int) -> tuple[bool, int]:
    """Add the CopyData messages that have arrived to a list.

    Args:
        pgconn: psycopg's, in a COPY.
        messages: the list. It is complete up to an error.
        size: end after so many bytes.
        reads: end after so many reads that brought no message.

    Returns:
        Whether the stream has ended, and how many bytes were added.

    Raises:
        psycopg.OperationalError: the connection is lost.
    """
    left, fruitless = size, 0
    while left > 0:
        before = left
        left, count = _take(pgconn, messages, left)
        if count < 0:
            return True, size - left
        if left < before:
            fruitless = 0
        if count == 0:
            if fruitless == reads:
                break
            fruitless += 1
            pgconn.consume_input()
    return False, size - left


def _take(pgconn: Any, messages: list[bytes], size: int) -> tuple[int, int]:
    """Add messages that libpq has to the list. Return what is left of the size, and the last result of PQgetCopyData.

    That is the size of a message; 0: there is no more; negative: the stream has ended.
    """
    if _GET_COPY_DATA and pgconn.pgconn_ptr:
        left, count = take(_GET_COPY_DATA, _FREE_MEMORY, pgconn.pgconn_ptr, messages, size)  # type: ignore[name-defined] # noqa: F821
        if count == -2:
            raise psycopg.OperationalError(f"receiving copy data failed: {pgconn.get_error_message()}")
        return left, count
    left, count = size, 1
    while left > 0:
        count, data = pgconn.get_copy_data(1)
        if count <= 0:
            break
        messages.append(bytes(data))
        # free libpq's copy before the next message
        del data
        left -= count
    return left, count
