"""Convert columns of PostgreSQL's texts to Arrow arrays. A whole column is cast at once. Values are cast one by one only if that fails.

The cast of a whole column takes some ten nanoseconds for each value. A value that the Arrow type cannot hold (``NaN`` in a decimal,
``infinity`` or BC in a date) makes the cast fail. Then the column is halved repeatedly until these values are found. They become NULL in
the column. Their texts are returned, and stored in ``_special``, so that no value is lost or changed.

The texts are those of our sessions: DateStyle ISO, sufficient ``extra_float_digits``, UTF-8. Array literals have one dimension here.
Source: manual, Arrays, Array Input and Output Syntax.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["NotText", "Specials", "cast_text", "parse_array", "to_arrow"]

Specials = dict[int, str]
"""Maps the row number to the text of a value that the column's type cannot hold."""

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 -- of both kinds of timestamp
_MICROSECOND: Final = timedelta(microseconds=1)


class NotText(ValueError):
    """A text value is not UTF-8."""


def to_arrow(values: Sequence[bytes | None], arrow: pa.DataType) -> tuple[pa.Array, Specials]:
    """Cast a column of texts to one of the lake's types. Also return the values that the type cannot hold.

    Raises:
        NotText: bytes are not UTF-8, which is possible in a database with encoding SQL_ASCII.
    """
    try:
        text = pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        raise NotText("not UTF-8") from None
    return _column(text, arrow)


def cast_text(text: pa.Array, arrow: pa.DataType) -> tuple[pa.Array, Specials]:
    """Cast a column like :func:`to_arrow`, from an Arrow array of texts, which may not be UTF-8."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raise NotText("not UTF-8") from None
    return _column(text, arrow)


def _column(text: pa.Array, arrow: pa.DataType) -> tuple[pa.Array, Specials]:
    if pa.types.is_string(arrow):
        return text, {}
    if pa.types.is_boolean(arrow):
        return pc.equal(text, "t"), {}
    if pa.types.is_list(arrow):
        return _lists(text, arrow)
    if pa.types.is_binary(arrow):
        return pa.array([None if value is None else _bytea(value) for value in text.to_pylist()], arrow), {}
    specials: Specials = {}
    return _cast(text, arrow, 0, specials), specials


def _cast(text: pa.Array, arrow: pa.DataType, first: int, specials: Specials) -> pa.Array:
    try:
        cast = text.cast(arrow)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(text) > 1:
            half = len(text) // 2
            parts = [_cast(text[:half], arrow, first, specials), _cast(text[half:], arrow, first + half, specials)]
            return pa.concat_arrays(parts)
        value = text[0].as_py()
        moment = _moment(value) if pa.types.is_timestamp(arrow) else None
        if moment is None:
            specials[first] = value
        return pa.array([moment], pa.int64()).cast(arrow) if moment is not None else pa.nulls(1, arrow)
    return cast


def _moment(text: str) -> int | None:
    """Microseconds since 1970. Time zones before standard time have offsets with seconds, which Arrow's cast does not support."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    offset = moment.utcoffset() or timedelta()
    return (moment.replace(tzinfo=None) - _EPOCH - offset) // _MICROSECOND


def _bytea(text: str) -> bytes:
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    # bytea_output = escape
    found, position = bytearray(), 0
    while position < len(text):
        if text[position] != "\\":
            found.append(ord(text[position]))
            position += 1
        elif text[position + 1] == "\\":
            found.append(0x5C)
            position += 2
        else:
            found.append(int(text[position + 1 : position + 4], 8))
            position += 4
    return bytes(found)


def _lists(text: pa.Array, arrow: pa.DataType) -> tuple[pa.Array, Specials]:
    specials: Specials = {}
    offsets: list[int | None] = []
    elements: list[str | None] = []
    owners: list[int] = []
    texts: list[str | None] = text.to_pylist()
    for row, value in enumerate(texts):
        found = None if value is None else parse_array(value)
        offsets.append(None if found is None else len(elements))
        if found is None:
            if value is not None:
                specials[row] = value
            continue
        elements += found
        owners += [row] * len(found)
    offsets.append(len(elements))
    cast, refused = _column(pa.array(elements, pa.string()), arrow.value_type)
    result = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), cast).cast(arrow)
    spoiled = {owners[element] for element in refused}
    if spoiled:
        specials |= {row: texts[row] or "" for row in spoiled}
        result = result.take(pa.array([None if row in spoiled else row for row in range(len(result))], pa.int64()))
    return result, dict(sorted(specials.items()))


_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"([,}])', re.DOTALL)
_PLAIN: Final = re.compile(r'([^",{}\\]*)([,}])')
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


def parse_array(text: str) -> list[str | None] | None:
    """The elements' texts. None if it has several dimensions, or a lower bound that is not 1.

    Raises:
        ValueError: not an array literal.
    """
    if text == "{}":
        return []
    if text.startswith(("[", "{{")):
        return None
    if not text.startswith("{"):
        raise ValueError("an array literal starts with a brace")
    elements: list[str | None] = []
    position, end = 1, ""
    while end != "}":
        if match := _QUOTED.match(text, position):
            elements.append(_ESCAPE.sub(r"\1", match[1]))
        elif match := _PLAIN.match(text, position):
            elements.append(None if match[1] == "NULL" else match[1])
        else:
            raise ValueError(f"malformed array literal at offset {position}")
        position, end = match.end(), match[2]
    if position != len(text):
        raise ValueError(f"junk behind an array literal at offset {position}")
    return elements
