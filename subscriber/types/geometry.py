"""Geometric types: convert the binary format (float8s) to PostgreSQL's own text. Source: ``geo_ops.c``."""

from __future__ import annotations

from struct import Struct
from typing import Final

from subscriber.types.numerics import float8_text

__all__ = ["box_text", "circle_text", "line_text", "lseg_text", "path_text", "point_text", "polygon_text"]

_COUNT: Final = Struct(">i")
_POINT_SIZE: Final = 16


def _numbers(data: bytes, count: int) -> list[str]:
    if len(data) != count * 8:
        raise ValueError("incorrect binary data format of a geometric type")
    return [float8_text(data[start : start + 8]) for start in range(0, len(data), 8)]


def _points(data: bytes, count: int) -> str:
    numbers = _numbers(data, count * 2)
    return ",".join(f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True))


def point_text(data: bytes) -> str:
    """``(x,y)``."""
    return _points(data, 1)


def lseg_text(data: bytes) -> str:
    """``[(x,y),(x,y)]``."""
    return f"[{_points(data, 2)}]"


def box_text(data: bytes) -> str:
    """``(x,y),(x,y)``."""
    return _points(data, 2)


def line_text(data: bytes) -> str:
    """``{A,B,C}``."""
    return f"{{{','.join(_numbers(data, 3))}}}"


def circle_text(data: bytes) -> str:
    """``<(x,y),radius>``."""
    x, y, radius = _numbers(data, 3)
    return f"<({x},{y}),{radius}>"


def path_text(data: bytes) -> str:
    """``((x,y),...)``, or with brackets for an open path."""
    points = _counted(data[1:])
    return f"({points})" if data[0] else f"[{points}]"


def polygon_text(data: bytes) -> str:
    """``((x,y),...)``."""
    return f"({_counted(data)})"


def _counted(data: bytes) -> str:
    (count,) = _COUNT.unpack_from(data)
    if count < 0 or len(data) != 4 + count * _POINT_SIZE:
        raise ValueError("incorrect binary data format of a geometric type")
    return _points(data[4:], count)
