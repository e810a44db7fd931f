"""Read single rows of a published table by their keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from subscriber.errors import PublisherError
from subscriber.interfaces import PublishedTable
from subscriber.protocol.quoting import quote_identifier
from subscriber.walreceiver.session import Row, Session

__all__ = ["rows_by_key"]

_DATA_EXCEPTION: Final = "22"
_FIRST_OF_USERS: Final = 16384
"""Oids of types from here on are those of extensions and users."""


async def rows_by_key(session: Session, table: PublishedTable, key: Sequence[str], keys: Sequence[Sequence[str]]) -> list[Row]:
    """Return the published rows with these keys: all published columns, as text.

    A key may be one that only the target's type can hold. Then the keys are compared as texts, which reads the whole table.

    Args:
        session: to the publisher, in a transaction.
        table: as published.
        key: columns of the key.
        keys: values of these columns, as PostgreSQL's texts.

    Raises:
        PublisherError: or a subclass.
    """
    types = dict(zip(table.columns, table.column_types, strict=False))
    # no search_path has the operators of an extension's type
    names = [quote_identifier(name) if types.get(name, 0) < _FIRST_OF_USERS else f"({quote_identifier(name)})::text" for name in key]
    await session.execute("SAVEPOINT keys")
    try:
        rows = await _rows(session, table, names, keys)
        await session.execute("RELEASE SAVEPOINT keys")
        return rows
    except PublisherError as error:
        if (error.sqlstate or "")[:2] != _DATA_EXCEPTION:
            raise
    await session.execute("ROLLBACK TO SAVEPOINT keys; RELEASE SAVEPOINT keys")
    return await _rows(session, table, [f"({quote_identifier(name)})::text" for name in key], keys)


async def _rows(session: Session, table: PublishedTable, names: Sequence[str], keys: Sequence[Sequence[str]]) -> list[Row]:
    columns = ", ".join(map(quote_identifier, table.columns))
    parameters = itertools.count(1)
    wanted = " OR ".join("(" + " AND ".join(f"{name} = ${next(parameters)}" for name in names) + ")" for _ in keys)
    filters = f" AND ({' OR '.join(f'({each})' for each in table.row_filters)})" if table.row_filters else ""
    relation = f"{quote_identifier(table.name.namespace)}.{quote_identifier(table.name.name)}"
    only = "ONLY " if table.kind == "r" else ""
    values = itertools.chain.from_iterable(keys)
    return await session.execute(f"SELECT {columns} FROM {only}{relation} WHERE ({wanted}){filters}", *values)  # noqa: S608
