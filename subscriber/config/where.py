"""The parameter ``where``: row filters, given as ``where.SCHEMA.TABLE=EXPRESSION`` (:mod:`subscriber.config.table_names`)."""

from __future__ import annotations

from typing import Final

from subscriber.config.table_names import Name, TableOption, read_name, written_name

__all__ = ["WHERE", "filters_of"]

_EXAMPLE: Final = 'where.public.orders="amount > 100"'

WHERE: Final = TableOption(
    name="where",
    example=_EXAMPLE,
    most=4000,
    too_long=("the row filters are longer than 4000 characters", "use publications with row filters instead"),
    key=lambda text: written_name(read_name(text, _EXAMPLE)),
)


def filters_of(where: str) -> dict[Name, str]:
    """Return the filters by schema and name of the table."""
    return {read_name(name, _EXAMPLE): expression for name, expression in WHERE.values(where).items()}
