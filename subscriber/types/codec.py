"""Read the values of a type.

There are two results, and both formats of the protocol give the same result:

* ``text``: PostgreSQL's own text, as the output function writes it with datestyle ISO, intervalstyle postgres, extra_float_digits 3 and
  time zone UTC. Every type has it, and it loses nothing.
* ``value``: a Python object that holds the value without loss, or that text where there is none.

=============================================  ======================================================================================
type                                           Python
=============================================  ======================================================================================
bool                                           bool
int2, int4, int8, oid, xid, cid, xid8          int
float4, float8                                 float (float4: the exact double)
numeric                                        Decimal, with its scale; NaN and infinities included
bytea                                          bytes
uuid                                           UUID
date, time, timetz, timestamp, timestamptz     from datetime (timestamptz in UTC); text for infinity, BC, years past 9999, 24:00
arrays                                         list of these, nested; text if an index does not start at 1
all others                                     text
=============================================  ======================================================================================
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from struct import error as StructError
from types import MappingProxyType
from typing import Any, Final, TypeVar
from uuid import UUID

from subscriber.types import containers, scalars
from subscriber.types.pg_type import TypeKind
from subscriber.types.registry import PgType
from subscriber.types.value_errors import ValueRefused

__all__ = ["READ_ERRORS", "WITHOUT_BINARY", "Codec", "Value", "binary_problem", "codec"]

Value = bool | int | float | Decimal | bytes | UUID | datetime.date | datetime.time | datetime.datetime | str | list[Any]

_T = TypeVar("_T")
_Text = Callable[[bytes], str]
_Read = Callable[[bytes], Value]

_VECTORS: Final = MappingProxyType({"int2vector": "int2", "oidvector": "oid"})

READ_ERRORS: Final = (ValueError, ArithmeticError, LookupError, StructError)
"""Errors that the functions of a codec raise for bytes that are not a value of the type (a UnicodeDecodeError is a ValueError)."""


@dataclass(frozen=True, slots=True, eq=False)
class Codec:
    """The functions that read a type's values. They are called once per value, and raise :data:`READ_ERRORS`.

    Attributes:
        source: the type of the values.
        text_from_text, text_from_binary: PostgreSQL's own text.
        value_from_text, value_from_binary: the Python object.
        python: class of those objects. A value that the class cannot hold is a ``str``.
    """

    source: PgType
    text_from_text: Callable[[bytes], str]
    text_from_binary: Callable[[bytes], str]
    value_from_text: Callable[[bytes], Value]
    value_from_binary: Callable[[bytes], Value]
    python: type = str

    def text(self, data: bytes, *, binary: bool) -> str:
        """Return PostgreSQL's own text of a value.

        Raises:
            ValueRefused: the bytes are not a value of the type, or are in the binary format of an unknown type.
        """
        return self._read(self.text_from_binary if binary else self.text_from_text, data)

    def value(self, data: bytes, *, binary: bool) -> Value:
        """Return the Python object of a value.

        Raises:
            ValueRefused: as :meth:`text`.
        """
        return self._read(self.value_from_binary if binary else self.value_from_text, data)

    def _read(self, read: Callable[[bytes], _T], data: bytes) -> _T:
        try:
            return read(data)
        except ValueRefused:
            raise
        except READ_ERRORS as error:
            raise ValueRefused(f"invalid value for type {self.source}") from error


def codec(type_: PgType) -> Codec:
    """Return the codec of a type."""
    match type_.kind:
        case TypeKind.ARRAY if type_.element is not None:
            return _array(type_, codec(type_.element))
        case TypeKind.RANGE | TypeKind.MULTIRANGE if type_.element is not None:
            read = codec(type_.element).text_from_binary
            whole = containers.range_text if type_.kind is TypeKind.RANGE else containers.multirange_text
            return _textual(type_, lambda data: whole(data, read))
        case TypeKind.COMPOSITE:
            return _composite(type_)
        case TypeKind.ENUM:
            return _textual(type_, bytes.decode)
    return _base(type_)


def binary_problem(type_: PgType) -> str | None:
    """Return why the binary format of a type, or of one of its parts, cannot be read; None if it can."""
    if type_.builtin in WITHOUT_BINARY:
        # the publisher always sends text for such a column, and cannot send the type inside another one
        return None
    parts = [attribute.type for attribute in type_.attributes]
    if type_.element is not None:
        parts.append(type_.element)
    for part in parts:
        problem = binary_problem(part)
        if problem is not None:
            return problem
    if type_.kind is not TypeKind.BASE:
        return None
    if type_.builtin is None:
        return f"the binary format of type {type_} is unknown"
    reason = scalars.NO_BINARY.get(type_.builtin)
    return None if reason is None else f"type {type_} cannot be read in the binary format: {reason}"


WITHOUT_BINARY: Final = frozenset({"aclitem", "gtsvector"})
"""Types that have no binary format."""


def _textual(type_: PgType, text_from_binary: _Text, text_from_text: _Text = bytes.decode) -> Codec:
    return Codec(type_, text_from_text, text_from_binary, text_from_text, text_from_binary)


def _base(type_: PgType) -> Codec:
    name = type_.builtin
    if name is None:
        # of an extension, or unknown
        return _textual(type_, scalars.refuse_binary(str(type_), "its binary format is unknown"))
    if name in scalars.NO_BINARY:
        return _textual(type_, scalars.refuse_binary(name, scalars.NO_BINARY[name]))
    if name in _VECTORS:
        read_number = scalars.BINARY_TEXT[_VECTORS[name]]
        return _textual(type_, lambda data: containers.vector_text(data, read_number))
    text_from_text = scalars.TEXT_CANONICAL.get(name, bytes.decode)
    text_from_binary = scalars.BINARY_TEXT.get(name, bytes.decode)
    if name not in scalars.TEXT_VALUE:
        return _textual(type_, text_from_binary, text_from_text)
    python, value_from_text = scalars.TEXT_VALUE[name]
    value_from_binary = scalars.BINARY_VALUE.get(name) or _by_text(value_from_text, text_from_binary)
    return Codec(type_, text_from_text, text_from_binary, value_from_text, value_from_binary, python)


def _by_text(value_from_text: _Read, text_from_binary: _Text) -> _Read:
    def read(data: bytes) -> Value:
        return value_from_text(text_from_binary(data).encode())

    return read


def _array(type_: PgType, element: Codec) -> Codec:
    delimiter = element.source.delimiter
    reader = containers.ArrayReader(delimiter)

    def convert(text: str) -> Value:
        return element.value_from_text(text.encode())

    def value_from_text(data: bytes) -> Value:
        return containers.array_value(data, reader, convert)

    def text_from_binary(data: bytes) -> str:
        return containers.array_text(data, element.text_from_binary, delimiter)

    return Codec(type_, bytes.decode, text_from_binary, value_from_text, _by_text(value_from_text, text_from_binary), list)


def _composite(type_: PgType) -> Codec:
    readers = [codec(attribute.type).text_from_binary for attribute in type_.attributes]

    def reader_of(index: int, oid: int) -> _Text:
        if index >= len(readers) or oid != type_.attributes[index].type.oid:
            raise ValueError("incorrect binary data format: an attribute that the composite type does not have")
        return readers[index]

    return _textual(type_, lambda data: containers.record_text(data, reader_of))
