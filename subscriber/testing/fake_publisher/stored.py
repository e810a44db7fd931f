"""Values as a column stores them: read from text, limited by the column's declaration, and written as PostgreSQL writes them.

Dates, times and the types that are not named here must be given as PostgreSQL prints them.
"""

from __future__ import annotations

import re
import uuid
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from struct import error as StructError
from struct import pack, unpack
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.types import PgType, TypeKind
from subscriber.types.builtin import SQL_NAMES

__all__ = ["stored"]

_LARGEST: Final = {"int2": 2**15 - 1, "int4": 2**31 - 1, "int8": 2**63 - 1}
_HEADER: Final = 4
_EXACT: Final = Context(prec=200_000)
_FRACTION: Final = re.compile(r"\.(\d+)")
_BOOLEANS: Final = tuple(
    (word[:size], word in {"true", "yes"}) for word in ("true", "false", "yes", "no") for size in range(1, len(word) + 1)
)
_SWITCHES: Final = dict(_BOOLEANS) | {"on": True, "1": True, "of": False, "off": False, "0": False}


def stored(type_: PgType, text: str) -> str:
    """Return the text of a value as a server sends it.

    Raises:
        ConfigurationError: a server does not accept the value for this column, in its words.
    """
    if type_.kind is TypeKind.ENUM and text not in type_.labels:
        raise ConfigurationError(f'invalid input value for enum {type_.name}: "{text}"')
    match type_.builtin:
        case "bool":
            return "t" if _boolean(text) else "f"
        case "int2" | "int4" | "int8" as name:
            return _integer(name, text)
        case "float4" | "float8" as name:
            return _float(name, text)
        case "numeric":
            return _numeric(type_, text)
        case "varchar" | "bpchar" as name:
            return _limited(name, type_.modifier - _HEADER, text)
        case "uuid":
            return _uuid(text)
        case "timestamp" | "timestamptz" | "time" | "timetz" if type_.modifier >= 0:
            if any(len(digits) > type_.modifier for digits in _FRACTION.findall(text)):
                raise ConfigurationError("a time has more digits than its column", hint="the fake publisher does not round times")
    return text


def _invalid(name: str, text: str) -> ConfigurationError:
    return ConfigurationError(f'invalid input syntax for type {SQL_NAMES.get(name, name)}: "{text}"')


def _boolean(text: str) -> bool:
    found = _SWITCHES.get(text.strip().lower())
    if found is None:
        raise _invalid("bool", text)
    return found


def _integer(name: str, text: str) -> str:
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise _invalid(name, text)
    number = int(text)
    if not -_LARGEST[name] - 1 <= number <= _LARGEST[name]:
        raise ConfigurationError(f'value "{text}" is out of range for type {SQL_NAMES[name]}')
    return str(number)


def _float(name: str, text: str) -> str:
    """The shortest text that gives the same number (float8out)."""
    try:
        number = float(text)
    except ValueError:
        raise _invalid(name, text) from None
    special = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(number))
    if special is not None:
        return special
    shortest, most = repr(number), 15
    if name == "float4":
        try:
            number = unpack(">f", pack(">f", number))[0]
        except (OverflowError, StructError):
            raise ConfigurationError(f'"{text}" is out of range for type real') from None
        shortest, most = (
            next(found for size in range(1, 10) if unpack(">f", pack(">f", float(found := f"{number:.{size}g}")))[0] == number),
            6,
        )
    sign, digits, exponent = Decimal(shortest).normalize().as_tuple()
    assert isinstance(exponent, int)
    first = len(digits) + exponent - 1
    if not any(digits) or -4 <= first < most:
        return ("-" if sign else "") + format(Decimal((0, digits, exponent)), "f")
    rest = "".join(map(str, digits[1:]))
    return f"{'-' * sign}{digits[0]}{'.' * bool(rest)}{rest}e{'-' if first < 0 else '+'}{abs(first):02d}"


def _numeric(type_: PgType, text: str) -> str:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        raise _invalid("numeric", text) from None
    if number.is_nan():
        return "NaN"
    declared = type_.precision_and_scale
    if declared is not None:
        precision, scale = declared
        if number.is_finite():
            number = number.quantize(Decimal((0, (1,), -scale)), ROUND_HALF_UP, _EXACT)
        if number.is_infinite() or (number and number.adjusted() >= precision - scale):
            raise ConfigurationError("numeric field overflow")
    if number.is_infinite():
        return "-Infinity" if number < 0 else "Infinity"
    return format(number if number else abs(number), "f")


def _limited(name: str, length: int, text: str) -> str:
    if length < 0:
        return text
    if len(text) > length:
        if text[length:].strip(" "):
            raise ConfigurationError(f"value too long for type {SQL_NAMES[name]}({length})")
        text = text[:length]
    return text.ljust(length) if name == "bpchar" else text


def _uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise _invalid("uuid", text) from None
