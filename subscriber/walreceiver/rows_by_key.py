"""Read single rows of a published table by their keys."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.abc import PublishedTable
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.session import Row, Session

__all__ = ["rows_by_key"]


async def rows_by_key(session: Session, table: PublishedTable, key: Sequence[str], keys: Sequence[Sequence[str]]) -> list[Row]:
    """Return the published rows with these keys: all published columns, as text.

    Args:
        session: to the publisher.
        table: as published.
        key: columns of the key.
        keys: values of these columns, as PostgreSQL's texts.

    Raises:
        PublisherError: or a subclass.
    """
    columns = ", ".join(map(quote_identifier, table.columns))
    wanted = " OR ".join(
        "(" + " AND ".join(f"{quote_identifier(name)} = {quote_literal(value)}" for name, value in zip(key, values, strict=True)) + ")"
        for values in keys
    )
    filters = f" AND ({' OR '.join(f'({each})' for each in table.row_filters)})" if table.row_filters else ""
    relation = f"{quote_identifier(table.name.namespace)}.{quote_identifier(table.name.name)}"
    only = "ONLY " if table.kind == "r" else ""
    return await session.execute(f"SELECT {columns} FROM {only}{relation} WHERE ({wanted}){filters}")  # noqa: S608
