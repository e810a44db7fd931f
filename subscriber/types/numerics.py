"""Floating point and numeric: convert the binary format to PostgreSQL's own text, and texts to Python numbers.

Both formats give a float4 as its exact double: 0.1 is 0.10000000149011612, as in PostgreSQL's own cast.

Sources: ``float4out``, ``float8out`` (shortest precise output), ``numeric_send``, ``numeric_out``.
"""

from __future__ import annotations

import math
from decimal import Decimal
from struct import Struct
from typing import Final

__all__ = ["float4_text", "float4_value", "float8_text", "numeric_text", "numeric_value"]

_FLOAT4: Final = Struct(">f")
_FLOAT8: Final = Struct(">d")
_NUMERIC: Final = Struct(">hhHH")

_POSITIVE, _NEGATIVE = 0x0000, 0x4000
_SPECIAL: Final = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_BASE: Final = 10_000


def float4_value(data: bytes) -> float:
    """From text."""
    value: float = _FLOAT4.unpack(_FLOAT4.pack(float(data)))[0]
    return value


def numeric_value(data: bytes) -> Decimal:
    """From text. All digits and the scale are kept."""
    return Decimal(data.decode("ascii"))


def float8_text(data: bytes) -> str:
    """From the binary format."""
    (value,) = _FLOAT8.unpack(data)
    return _special(value) or _general(repr(value), fixed_below=15)


def float4_text(data: bytes) -> str:
    """From the binary format."""
    (value,) = _FLOAT4.unpack(data)
    special = _special(value)
    if special is not None:
        return special
    for behind in range(8):
        text = f"{value:.{behind}e}"
        if _same_float4(text, data):
            return _general(text, fixed_below=6)
        # at a power of two, the gap below is half of the gap above: the next text above may be right where the nearest one is not
        nearest = Decimal(text)
        step = Decimal((0, (1,), nearest.adjusted() - behind))
        above = str(nearest + step if value > 0 else nearest - step)
        if _same_float4(above, data):
            return _general(above, fixed_below=6)
    return _general(f"{value:.8e}", fixed_below=6)


def _same_float4(text: str, data: bytes) -> bool:
    try:
        return _FLOAT4.pack(float(text)) == data
    except OverflowError:
        # rounded up past the largest float4
        return False


def _special(value: float) -> str | None:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None


def _general(text: str, *, fixed_below: int) -> str:
    """Write a number's digits as PostgreSQL does: with an exponent below -4 and from ``fixed_below`` on."""
    sign, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    if not written:
        return "-0" if sign else "0"
    stripped = written.rstrip("0")
    exponent += len(written) - len(stripped)
    minus = "-" if sign else ""
    leading = exponent + len(stripped) - 1
    if not -4 <= leading < fixed_below:
        fraction = f".{stripped[1:]}" if len(stripped) > 1 else ""
        return f"{minus}{stripped[0]}{fraction}e{leading:+03d}"
    if leading < 0:
        return f"{minus}0.{'0' * (-leading - 1)}{stripped}"
    if exponent >= 0:
        return f"{minus}{stripped}{'0' * exponent}"
    return f"{minus}{stripped[: leading + 1]}.{stripped[leading + 1 :]}"


def numeric_text(data: bytes) -> str:
    """From the binary format: digits of base 10000. The first one counts ``10000 ** weight``."""
    count, weight, sign, scale = _NUMERIC.unpack_from(data)
    if sign in _SPECIAL:
        return _SPECIAL[sign]
    if sign not in {_POSITIVE, _NEGATIVE} or count < 0 or len(data) != _NUMERIC.size + 2 * count:
        raise ValueError("incorrect binary data format of numeric")
    digits = [int.from_bytes(data[start : start + 2]) for start in range(_NUMERIC.size, len(data), 2)]
    if any(digit >= _BASE for digit in digits):
        raise ValueError("incorrect binary data format of numeric")
    whole = [digits[place] if place < count else 0 for place in range(weight + 1)]
    before = "".join(f"{digit:04d}" for digit in whole).lstrip("0") or "0"
    minus = "-" if sign == _NEGATIVE else ""
    if scale == 0:
        return minus + before
    # if the weight is negative, there are zeros between the point and the first digit
    behind = ["0000"] * max(-weight - 1, 0) + [f"{digit:04d}" for digit in digits[max(weight + 1, 0) :]]
    return f"{minus}{before}.{''.join(behind)[:scale].ljust(scale, '0')}"
