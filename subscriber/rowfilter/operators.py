"""The operators, casts and functions that row filters can be evaluated with, on values without NULL.

The rules for the types of operands are those of PostgreSQL for the operators that it has: integers of different sizes compare as numbers;
with a numeric they are numeric; with a floating-point number all numbers are double precision; a date and a timestamp compare as
timestamps. Source: PostgreSQL manual, Operator Type Resolution; ``pg_operator.dat``, ``pg_cast.dat``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_UP, Context, Decimal, Inexact
from functools import lru_cache
from typing import Any, Final

from subscriber.rowfilter.filter_errors import MUTABLE_FUNCTION, NOT_SIMPLE, RowFilterError, not_allowed, unsupported
from subscriber.rowfilter.sql_types import INTEGERS, STAMPS, TEXTS, float4, in_range
from subscriber.types.builtin import SQL_NAMES

__all__ = ["NUMBERS", "Function", "arithmetic", "call", "cast", "common_type", "comparison", "convert", "like", "operand_type"]

Function = Callable[..., Any]

NUMBERS: Final = ("int2", "int4", "int8", "numeric", "float4", "float8")
"""In the order in which they are converted implicitly."""
_FLOATS: Final = frozenset({"float4", "float8"})
_DAY: Final = 86_400_000_000
_EXACT: Final = Context(prec=200_000, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[Inexact])
_MOST_DIGITS: Final = 131_072
_ORDER: Final[dict[str, Function]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _name(type_: str) -> str:
    return SQL_NAMES.get(type_, type_)


def no_operator(sign: str, left: str, right: str) -> RowFilterError:
    """PostgreSQL's error for an operator that does not exist."""
    return RowFilterError(
        f"operator does not exist: {_name(left)} {sign} {_name(right)}",
        hint="No operator matches the given name and argument types. You might need to add explicit type casts.",
        sqlstate="42883",
    )


def common_type(sign: str, left: str, right: str) -> str:
    """Return the type as which two types compare.

    Raises:
        RowFilterError: PostgreSQL has no such operator, or it is not immutable.
    """
    if left == right:
        return {"float4": "float8", "varchar": "text"}.get(left, left)
    if left in NUMBERS and right in NUMBERS:
        if left in _FLOATS or right in _FLOATS:
            return "float8"
        return NUMBERS[max(NUMBERS.index(left), NUMBERS.index(right))]
    pair = {left, right}
    if pair <= TEXTS:
        return "text" if "text" in pair else "bpchar"
    if pair == {"date", "timestamp"}:
        return "timestamp"
    if "timestamptz" in pair and pair <= {"timestamptz", "timestamp", "date"}:
        # it depends on the time zone of the session
        raise not_allowed(MUTABLE_FUNCTION)
    raise no_operator(sign, left, right)


def operand_type(type_: str, common: str) -> str:
    """Return the type that an operand of a comparison is converted to, if its operands compare as ``common``.

    Numbers of one kind, and a date with a timestamp, have operators of their own and stay as they are.
    """
    return type_ if type_ in _FLOATS or common in INTEGERS or common == "timestamp" else common


def convert(source: str, target: str) -> Function | None:
    """Return the implicit conversion between types of :func:`common_type`; None if the values stay as they are."""
    if source == target or source not in (*NUMBERS, "date", "text", "varchar"):
        return None
    if target == "bpchar":
        return _without_padding
    if target == "float8":
        return None if source == "float4" else _float8
    if target == "numeric":
        return Decimal
    return _midnight if source == "date" and target == "timestamp" else None


def _float8(value: int | Decimal) -> float:
    number = float(value)
    if (math.isinf(number) and not (isinstance(value, Decimal) and value.is_infinite())) or (value and not number):
        raise RowFilterError("value is out of range for type double precision", sqlstate="22003")
    return number


def _without_padding(text: str) -> str:
    return text.rstrip(" ")


def _midnight(days: float) -> float:
    return days * _DAY if math.isfinite(days) else days


def comparison(sign: str, type_: str) -> Function:
    """Return the comparison of two values of a type. NaN equals itself, and is larger than all other numbers."""
    compare = _ORDER[sign]
    if type_ not in {"numeric", "float8"}:
        return compare

    def numbers(left: Any, right: Any) -> bool:
        left_is, right_is = left != left, right != right  # noqa: PLR0124 (NaN)
        if left_is or right_is:
            return bool(compare(left_is, right_is))
        return bool(compare(left, right))

    return numbers


def arithmetic(sign: str, left: str, right: str) -> tuple[str, Function]:
    """Return the result type of ``left sign right``, and its function.

    Raises:
        RowFilterError: it cannot be evaluated.
    """
    if left in INTEGERS and right in INTEGERS:
        result = left if INTEGERS[left] >= INTEGERS[right] else right
        function = _INTEGER_FUNCTIONS[sign]
        return result, lambda a, b: in_range(function(a, b), result)
    if left in NUMBERS and right in NUMBERS and not _FLOATS & {left, right} and sign != "/":
        decimal = _NUMERIC_FUNCTIONS[sign]
        return "numeric", lambda a, b: _numeric_in_range(decimal(Decimal(a), Decimal(b)))
    if left in NUMBERS and right in NUMBERS:
        raise unsupported(f"operator {_name(left)} {sign} {_name(right)}")
    if not {left, right} <= {*NUMBERS, *TEXTS, "bool", "bytea", "uuid"}:
        raise unsupported(f"operator {_name(left)} {sign} {_name(right)}")
    raise no_operator(sign, left, right)


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise RowFilterError("division by zero", sqlstate="22012")
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _modulo(a: int, b: int) -> int:
    return a - _divide(a, b) * b


def _decimal_modulo(a: Decimal, b: Decimal) -> Decimal:
    if not (a.is_nan() or b.is_nan()) and b == 0:
        raise RowFilterError("division by zero", sqlstate="22012")
    return _EXACT.remainder(a, b)


_INTEGER_FUNCTIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _modulo,
}
_NUMERIC_FUNCTIONS: Final[dict[str, Callable[[Decimal, Decimal], Decimal]]] = {
    "+": _EXACT.add,
    "-": _EXACT.subtract,
    "*": _EXACT.multiply,
    "%": _decimal_modulo,
}


def _numeric_in_range(value: Decimal) -> Decimal:
    if value.is_finite() and value and value.adjusted() >= _MOST_DIGITS:
        raise RowFilterError("value overflows numeric format", sqlstate="22003")
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -1000:
        # the server would round
        raise unsupported("a numeric with more than 1000 digits after the decimal point")
    return value


# --- casts


def cast(source: str, target: str) -> Function | None:
    """Return the function of an explicit cast; None if the values stay as they are.

    Raises:
        RowFilterError: it cannot be evaluated.
    """
    if source == target or (source in TEXTS and target in {"text", "varchar"}):
        return None
    if source in TEXTS and target == "bpchar":
        return _without_padding
    if target in INTEGERS and source in (*INTEGERS, "numeric"):
        return lambda value: in_range(_rounded(value, target), target)
    if target == "numeric" and source in INTEGERS:
        return Decimal
    if target == "float8" and source in NUMBERS:
        return convert(source, target)
    if target == "float4" and source in {*INTEGERS, "numeric", "float8"}:
        return _to_float4
    if source == "bool" and target in TEXTS:
        return lambda value: "true" if value else "false"
    if (source, target) == ("date", "timestamp"):
        return _timestamp
    if (source, target) == ("timestamp", "date"):
        return lambda value: value // _DAY if math.isfinite(value) else value
    if (source, target) == ("bool", "int4"):
        return int
    if (source, target) == ("int4", "bool"):
        return bool
    if TEXTS & {source, target}:
        # such a cast calls the output and input functions of the types (CoerceViaIO)
        raise not_allowed(NOT_SIMPLE)
    raise unsupported(f"cast from {_name(source)} to {_name(target)}")


def _rounded(value: int | Decimal, target: str) -> int:
    if isinstance(value, int):
        return value
    if not value.is_finite():
        what = "NaN" if value.is_nan() else "infinity"
        raise RowFilterError(f"cannot convert {what} to {SQL_NAMES[target]}", sqlstate="0A000")
    if value and value.adjusted() > 20:
        raise RowFilterError(f"{SQL_NAMES[target]} out of range", sqlstate="22003")
    return int(value.to_integral_value(ROUND_HALF_UP))


def _timestamp(days: float) -> float:
    found = _midnight(days)
    if math.isfinite(days) and found not in STAMPS:
        raise RowFilterError("date out of range for timestamp", sqlstate="22008")
    return found


def _to_float4(value: float | Decimal) -> float:
    if isinstance(value, Decimal) and value.is_infinite():
        return float(value)
    return float4(value)


# --- functions


def call(name: str, types: Sequence[str], *, c_collation: bool) -> tuple[str, Function]:
    """Return the result type of a function call, and its function.

    Args:
        name: of the function.
        types: of the arguments; no ``unknown``.
        c_collation: whether the texts have the collation C.

    Raises:
        RowFilterError: it cannot be evaluated.
    """
    texts = tuple("text" if each in TEXTS else each for each in types)
    integers = tuple("int4" if each in {"int2", "int4"} else each for each in texts)
    if name in {"lower", "upper"} and texts == ("text",):
        if not c_collation:
            raise needs_collation(name)
        return "text", _lower if name == "lower" else _upper
    if name == "abs" and len(types) == 1 and types[0] in NUMBERS:
        type_ = types[0]
        return (type_, lambda value: in_range(abs(value), type_)) if type_ in INTEGERS else (type_, _absolute)
    found = _TEXT_FUNCTIONS.get((name, integers))
    # octet_length counts the spaces of a bpchar
    if found is None or (name == "octet_length" and "bpchar" in types):
        listed = ", ".join(map(_name, types))
        raise unsupported(f"function {name}({listed})", hint="add explicit type casts if the function takes other types")
    return found


def needs_collation(what: str) -> RowFilterError:
    """The result depends on the locale of the server."""
    return unsupported(f"{what} of text depends on its collation", hint="use the collation of bytes, as in name COLLATE \"C\" < 'm'")


def _absolute(value: float | Decimal) -> Any:
    return value.copy_abs() if isinstance(value, Decimal) else abs(value)


_LOWER: Final = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_UPPER: Final = {lower: lower - 32 for lower in range(ord("a"), ord("z") + 1)}


def _lower(text: str) -> str:
    return text.translate(_LOWER)


def _upper(text: str) -> str:
    return text.translate(_UPPER)


def _left(text: str, count: int) -> str:
    return text[:count]


def _right(text: str, count: int) -> str:
    if count == 0:
        return ""
    return text[-count:]


def _substring(text: str, start: int, length: int | None = None) -> str:
    if length is None:
        return text[max(start - 1, 0) :]
    if length < 0:
        raise RowFilterError("negative substring length not allowed", sqlstate="22011")
    return text[max(start - 1, 0) : max(start - 1 + length, 0)]


_TEXT_FUNCTIONS: Final[dict[tuple[str, tuple[str, ...]], tuple[str, Function]]] = {
    ("length", ("text",)): ("int4", len),
    ("octet_length", ("text",)): ("int4", lambda text: len(text.encode("utf-8", "surrogateescape"))),
    ("octet_length", ("bytea",)): ("int4", len),
    ("left", ("text", "int4")): ("text", _left),
    ("right", ("text", "int4")): ("text", _right),
    ("substring", ("text", "int4")): ("text", _substring),
    ("substring", ("text", "int4", "int4")): ("text", _substring),
    ("starts_with", ("text", "text")): ("bool", str.startswith),
}


def like(text: str, pattern: str) -> bool:
    """``text LIKE pattern``, for collations that compare bytes."""
    return _like_pattern(pattern).fullmatch(text) is not None


@lru_cache(maxsize=256)
def _like_pattern(pattern: str) -> re.Pattern[str]:
    # the parts between the % signs
    parts = [""]
    characters = iter(pattern)
    for character in characters:
        if character == "%":
            parts.append("")
        elif character == "_":
            parts[-1] += "."
        elif character == "\\":
            following = next(characters, None)
            if following is None:
                raise RowFilterError("LIKE pattern must not end with escape character", sqlstate="22025")
            parts[-1] += re.escape(following)
        else:
            parts[-1] += re.escape(character)
    first, *others = parts
    if others:
        *middle, last = others
        # the leftmost match of each part is enough: no other one is tried
        first += "".join(f"(?>.*?{each})" for each in middle) + f".*{last}"
    return re.compile(first, re.DOTALL)
