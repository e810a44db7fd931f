"""The parameter ``where``: row filters by table.

It is given as ``where.SCHEMA.TABLE=EXPRESSION``, once for each table, or as a mapping in Python. It is kept, and stored in the target's
catalog, as one text: a JSON object with a filter for each table, in the order of the tables' names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from subscriber.config.table_names import read_name, written_name
from subscriber.errors import ConfigurationError

__all__ = ["filters_of", "parse_where", "with_filters"]

_MOST: Final = 4000
"""Characters in the target's catalog."""
_EXAMPLE: Final = 'where.public.orders="amount > 100"'


def filters_of(where: str) -> dict[tuple[str, str], str]:
    """Return the filters by schema and name of the table."""
    return {read_name(name, _EXAMPLE): expression for name, expression in json.loads(where).items()} if where else {}


def with_filters(where: str, changes: Mapping[str, str]) -> str:
    """Return the filters with changes by table (``SCHEMA.TABLE``). An empty filter removes the table's.

    Raises:
        ConfigurationError: a name is not of this form, or the filters are too long.
    """
    if not isinstance(changes, Mapping):
        raise ConfigurationError("where is not a mapping", hint='as in where={"public.orders": "amount > 100"}')
    filters = filters_of(where)
    for name, expression in changes.items():
        if "\0" in expression:
            raise ConfigurationError(f'the row filter of table "{name}" has a null character')
        filters[read_name(name, _EXAMPLE)] = expression.strip()
    kept = {written_name((schema, name)): filters[schema, name] for schema, name in sorted(filters) if filters[schema, name]}
    text = json.dumps(kept, ensure_ascii=False) if kept else ""
    if len(text) > _MOST:
        raise ConfigurationError(f"the row filters are longer than {_MOST} characters", hint="use publications with row filters instead")
    return text


def parse_where(name: str, text: str) -> str:
    """Read the stored text.

    Raises:
        ConfigurationError: it is not one.
    """
    try:
        filters = json.loads(text) if text not in {"", "none"} else {}
    except ValueError:
        filters = None
    if not isinstance(filters, dict) or not all(isinstance(expression, str) for expression in filters.values()):
        raise ConfigurationError(f"{name} requires the name of a table", hint=f'as in {name}.public.orders="amount > 100"')
    return with_filters("", filters)
