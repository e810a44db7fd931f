"""Binds values: converts columns of bytes from the publisher to parameters for the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from subscriber.errors import ApplyError
from subscriber.protocol.messages import BINARY, TEXT
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan
from subscriber.types import ValueRefused
from subscriber.types.codec import READ_ERRORS

__all__ = ["Bind", "UnfitValue", "bind_columns", "binds_of", "copy_binds", "picked"]

_HINT: Final = "make the column text in the target, or compare its type with the publisher's"

Bind = Callable[[bytes], object]


class UnfitValue(ApplyError):
    """A value that the target's column cannot hold.

    Attributes:
        column: the name of the column.
    """

    def __init__(self, message: str, *, hint: str | None, column: str) -> None:
        super().__init__(message, sqlstate="22000", hint=hint)
        self.column = column


def _nothing(_value: bytes) -> None:
    """The parameter for a column that the target lacks: None."""


def binds_of(plans: Sequence[ColumnPlan], kinds: bytes) -> list[Bind]:
    """The function of each column that binds its values. ``kinds``: of the values; other kinds than text and binary: no values."""
    return [_bind_of(plan, kind) for plan, kind in zip(plans, kinds, strict=True)]


def copy_binds(plans: Sequence[ColumnPlan], *, binary: bool) -> list[Bind]:
    """The function of each column of a copy that binds its values."""
    return binds_of(plans, bytes([BINARY if binary else TEXT]) * len(plans))


def _bind_of(plan: ColumnPlan, kind: int) -> Bind:
    if plan.column is None or kind not in (TEXT, BINARY):
        return _nothing
    return plan.binary if kind == BINARY else plan.text


def bind_columns(binds: Sequence[Bind], plans: Sequence[ColumnPlan], columns: Sequence[Sequence[bytes | None]]) -> list[Sequence[object]]:
    """Bind columns, each with its own function. ``plans``: the columns, for errors.

    Raises:
        UnfitValue: a value is not valid for its column's type, or does not fit into the target's column.
    """
    try:
        return list(map(_bound, binds, columns))
    except READ_ERRORS:
        raise _refusal(binds, plans, columns) from None


def _bound(bind: Bind, values: Sequence[bytes | None]) -> Sequence[object]:
    if bind is _nothing:
        return [None] * len(values)
    # all() takes a third of the time of a search for None
    if not all(values) and None in values:
        return [None if value is None else bind(value) for value in values]
    return list(map(bind, values))  # type: ignore[arg-type]


def picked(vector: Sequence[Sequence[object]], pick: Callable[[Any], Any], count: int) -> Iterable[Any]:
    """Pick the parameters of a statement from columns, for each of their rows.

    Args:
        vector: columns.
        pick: picks the columns of the parameters, as :attr:`~subscriber.sinks.sqlalchemy.apply.statements.Statement.pick`.
        count: the number of rows.
    """
    columns = pick(vector)
    if isinstance(columns, dict):
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)] if columns else [{}] * count
    return zip(*columns, strict=True) if columns else [()] * count


def _refusal(binds: Sequence[Bind], plans: Sequence[ColumnPlan], columns: Sequence[Sequence[bytes | None]]) -> ApplyError:
    """The error of the first column with a value that cannot be bound."""
    for plan, bind, values in zip(plans, binds, columns, strict=True):
        try:
            _bound(bind, values)
        except ValueRefused as error:
            # its text never shows the value
            return UnfitValue(str(error), hint=error.hint or _HINT, column=plan.name)
        except READ_ERRORS:
            return UnfitValue("a value is not of its column's type", hint=_HINT, column=plan.name)
    return ApplyError("a value was rejected", sqlstate="22000", hint=_HINT)
