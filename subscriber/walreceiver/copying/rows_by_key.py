"""Read single rows of a published table by their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from subscriber.errors import PublisherError
from subscriber.interfaces import PublishedTable
from subscriber.protocol.quoting import quote_identifier
from subscriber.walreceiver.session import Row, Session

__all__ = ["Operators", "key_operators", "rows_by_key"]

_UNFIT: Final = frozenset({"22", "23"})
"""Classes of the errors for a text that is no value of a type, or of a domain."""
_FIRST_OF_USERS: Final = 16384
"""Oids of types from here on are those of extensions and users."""

# the equality of an index of each column; no search_path has the operators of an extension's type
_OPERATORS: Final = """
SELECT a.attname, pg_catalog.format_type(CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END, -1), found.operator
  FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
  LEFT JOIN LATERAL (
    SELECT pg_catalog.format('OPERATOR(%I.%s)', n.nspname, o.oprname) AS operator
      FROM pg_catalog.pg_index AS i
     CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(i.indkey::int2[]), pg_catalog.unnest(i.indclass::oid[])) AS u(attnum, class)
      JOIN pg_catalog.pg_opclass AS c ON c.oid = u.class
      JOIN pg_catalog.pg_am AS m ON m.oid = c.opcmethod AND m.amname = 'btree'
      JOIN pg_catalog.pg_amop AS p ON p.amopfamily = c.opcfamily AND p.amopstrategy = 3
       AND p.amoplefttype = c.opcintype AND p.amoprighttype = c.opcintype
      JOIN pg_catalog.pg_operator AS o ON o.oid = p.amopopr
      JOIN pg_catalog.pg_namespace AS n ON n.oid = o.oprnamespace
     WHERE i.indrelid = a.attrelid AND i.indisvalid AND i.indisunique AND u.attnum = a.attnum LIMIT 1) AS found ON true
 WHERE a.attrelid = {relation}::pg_catalog.oid AND a.attnum > 0 AND NOT a.attisdropped
"""


Operators = Mapping[str, tuple[str | None, str | None]]
"""Type and operator of equality of each column."""


async def key_operators(session: Session, table: PublishedTable) -> Operators:
    """Read by which operators the columns of a table are compared for equality.

    Raises:
        PublisherError: or a subclass.
    """
    rows = await session.execute(_OPERATORS.format(relation=table.relation_id))
    return {name or "": (kind, operator) for name, kind, operator in rows}


async def rows_by_key(
    session: Session,
    table: PublishedTable,
    key: Sequence[str],
    keys: Sequence[Sequence[str]],
    *,
    by_text: bool = False,
    operators: Operators | None = None,
) -> list[Row]:
    """Return the published rows with these keys: all published columns, as text.

    A key may be one that only the target's type can hold. Then the keys are compared as texts, which reads the whole table.

    Args:
        session: to the publisher, in a transaction.
        table: as published.
        key: columns of the key, by the target's names.
        keys: different values of these columns, as PostgreSQL's texts.
        operators: of the table, if they are known: :func:`key_operators`.
        by_text: only rows whose keys have exactly these texts; not also those with texts that are equal for the column's type.

    Raises:
        PublisherError: or a subclass.
    """
    operators = operators or await key_operators(session, table)
    types = dict(zip(table.publisher_columns, table.column_types, strict=False))
    key = [table.renamed.get(name, name) for name in key]
    conditions, texts = [], []
    for place, name in enumerate(key):
        quoted, value = quote_identifier(name), f"subscriber_key_{place}"
        text = f"""({quoted})::text COLLATE pg_catalog."C" = {value}"""
        texts.append(text)
        kind, operator = operators.get(name, (None, None))
        if kind is not None and operator is not None:
            conditions.append(f"{quoted} {operator} {value}::{kind}")
        if by_text or types.get(name, 0) >= _FIRST_OF_USERS or operator is None:
            conditions.append(text)
    await session.execute("SAVEPOINT keys")
    try:
        rows = await _rows(session, table, conditions, keys)
        await session.execute("RELEASE SAVEPOINT keys")
        return rows
    except PublisherError as error:
        if (error.sqlstate or "")[:2] not in _UNFIT:
            raise
    await session.execute("ROLLBACK TO SAVEPOINT keys; RELEASE SAVEPOINT keys")
    return await _rows(session, table, texts, keys)


async def _rows(session: Session, table: PublishedTable, conditions: Sequence[str], keys: Sequence[Sequence[str]]) -> list[Row]:
    columns = ", ".join(map(quote_identifier, table.publisher_columns))
    filters = f" WHERE ({' OR '.join(f'({each})' for each in table.row_filters)})" if table.row_filters else ""
    relation = table.publisher_name.quoted
    only = "ONLY " if table.kind == "r" else ""
    # an array for each column of the key
    values = list(zip(*keys, strict=True))
    arrays = ", ".join(f"pg_catalog.unnest(${place + 1}::text[])" for place in range(len(values)))
    names = ", ".join(f"subscriber_key_{place}" for place in range(len(values)))
    return await session.execute(
        f"SELECT {columns} FROM ROWS FROM ({arrays}) AS subscriber_keys ({names})"  # noqa: S608
        f" JOIN {only}{relation} ON {' AND '.join(conditions)}{filters}",
        *("{" + ",".join(_element(text) for text in each) + "}" for each in values),
    )


def _element(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
