"""Determines the column whose value PostgreSQL rejected. PostgreSQL names the column for constraints, but not for invalid values.

A column with the publisher's type accepts every value of the publisher. So only columns of other types are suspects. This module checks
their values by PostgreSQL's rules for types with a range or a length. If no value breaks a rule and there is only one suspect, it returns
that one. If the server's encoding lacks a character, the suspects are the columns whose values are not ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Final

from subscriber.sinks.sqlalchemy.schema.named_type import MODIFIER, NamedType
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan
from subscriber.sinks.sqlalchemy.session.error_codes import UNTRANSLATABLE
from subscriber.types import PgType, ValueRefused, codec

__all__ = ["suspect"]

_INTEGERS: Final[Mapping[str, tuple[int, int]]] = {
    "int2": (-(2**15), 2**15 - 1),
    "int4": (-(2**31), 2**31 - 1),
    "int8": (-(2**63), 2**63 - 1),
    "oid": (0, 2**32 - 1),
}
_LARGEST_FLOAT4: Final = 3.4028235677973366e38
_SMALLEST_FLOAT4: Final = 7.006492321624085e-46


def suspect(columns: Sequence[ColumnPlan], rows: Iterable[Sequence[object]], sqlstate: str | None) -> str | None:
    """Return the name of the column whose value PostgreSQL rejected; None: it cannot be determined.

    Args:
        columns: the columns of the rows.
        rows: the rows that were rejected together, with PostgreSQL's text of each value; anything else counts as NULL.
        sqlstate: the SQLSTATE of the error.
    """
    possible = set[str]()
    for texts in rows:
        if sqlstate == UNTRANSLATABLE:
            possible.update(_not_ascii(columns, texts))
            continue
        certain, others = _suspects(columns, texts)
        if certain is not None:
            return certain
        possible.update(others)
    return possible.pop() if len(possible) == 1 else None


def _not_ascii(columns: Sequence[ColumnPlan], texts: Sequence[object]) -> Iterator[str]:
    """Return the columns whose values the server's encoding may lack."""
    for plan, text in zip(columns, texts, strict=True):
        if isinstance(text, str) and not text.isascii() and plan.column is not None:
            yield plan.name


def _suspects(columns: Sequence[ColumnPlan], texts: Sequence[object]) -> tuple[str | None, list[str]]:
    """Return the first column whose value certainly does not fit, and the columns whose values may not fit."""
    others = []
    for plan, text in zip(columns, texts, strict=True):
        if not isinstance(text, str) or plan.column is None or not isinstance(plan.column.type, NamedType):
            continue
        target = PgType(0, plan.column.type.namespace, plan.column.type.name, modifier=plan.column.info.get(MODIFIER, -1))
        named = plan.source.domain or (plan.source.namespace, plan.source.name)
        if (*named, plan.source.modifier) == (target.namespace, target.name, target.modifier):
            continue
        others.append(plan.name)
        if not _fits(text, target):
            return plan.name, others
    return None, others


def _fits(text: str, target: PgType) -> bool:
    """Whether a value may fit. False: it certainly does not."""
    name = target.builtin or ""
    rule = _RULES.get(name)
    try:
        if rule is not None:
            return rule(text, target)
        if name:
            codec(target).value(text.encode(), binary=False)
    except (ValueRefused, ArithmeticError, ValueError):
        return False
    return True


def _integer(text: str, target: PgType) -> bool:
    low, high = _INTEGERS[target.name]
    return low <= int(text) <= high


def _numeric(text: str, target: PgType) -> bool:
    value = Decimal(text)
    declared = target.precision_and_scale
    if declared is None or value.is_nan():
        return True
    precision, scale = declared
    return value.is_finite() and abs(round(value, scale)) < Decimal(10) ** (precision - scale)


def _float(text: str, target: PgType) -> bool:
    exact = Decimal(text)
    if not exact.is_finite():
        return True
    value = float(exact)
    if target.name == "float4":
        return abs(value) < _LARGEST_FLOAT4 and (exact == 0 or abs(value) > _SMALLEST_FLOAT4)
    return math.isfinite(value) and (exact == 0 or value != 0)


def _characters(text: str, target: PgType) -> bool:
    # PostgreSQL cuts off blanks at the end that exceed the length
    return target.length is None or len(text) <= target.length or len(text.rstrip(" ")) <= target.length


def _bits(text: str, target: PgType) -> bool:
    if set(text) - {"0", "1"}:
        return False
    if target.length is None:
        return True
    return len(text) == target.length if target.name == "bit" else len(text) <= target.length


_RULES: Final[Mapping[str, Callable[[str, PgType], bool]]] = {
    **dict.fromkeys(_INTEGERS, _integer),
    "numeric": _numeric,
    "float4": _float,
    "float8": _float,
    "varchar": _characters,
    "bpchar": _characters,
    "bit": _bits,
    "varbit": _bits,
}
