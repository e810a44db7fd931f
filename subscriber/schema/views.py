"""Materialized views: their content is not replicated, so a cutover refreshes them.

A session with the settings that this program needs would store other content: the time zone and the search_path are those of the
database here, as when the application refreshes a view.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import PublisherError
from subscriber.interfaces import TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.protocol.session_settings import unpin
from subscriber.walreceiver.session import Session

__all__ = ["MaterializedView", "measured", "populated_views", "refresh", "views_in_order"]

_MAINTAIN: Final = 170000
_LOCK_SECONDS: Final = 1
_ENDED: Final = frozenset({"57014", "55P03"})
"""SQLSTATEs of a statement_timeout and of a lock_timeout."""
_POPULATED: Final = """
SELECT n.nspname, c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'm' AND c.relispopulated AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_depend AS d
     WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
 ORDER BY 1, 2
"""
# a view that needs another one needs all views that the other one needs, and one more: so the number is an order
_ORDERED: Final = """
WITH RECURSIVE direct AS (
    SELECT DISTINCT r.ev_class AS view, d.refobjid AS relation
      FROM pg_catalog.pg_rewrite AS r JOIN pg_catalog.pg_depend AS d ON d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass
       AND d.objid = r.oid AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid <> r.ev_class
      JOIN pg_catalog.pg_class AS c ON c.oid = r.ev_class AND c.relkind IN ('v', 'm')),
reached AS (
    SELECT view, relation FROM direct
    UNION SELECT reached.view, direct.relation FROM reached JOIN direct ON direct.view = reached.relation)
SELECT n.nspname, c.relname, pg_catalog.pg_has_role(c.relowner, 'USAGE') OR {maintain},
       c.relispopulated AND EXISTS (
        SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid
           AND i.indpred IS NULL AND i.indexprs IS NULL)
  FROM (VALUES {names}) AS wanted (nspname, relname)
  JOIN pg_catalog.pg_namespace AS n ON n.nspname = wanted.nspname
  JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = wanted.relname AND c.relkind = 'm'
 ORDER BY (SELECT count(*) FROM reached JOIN pg_catalog.pg_class AS m ON m.oid = relation AND m.relkind = 'm' WHERE view = c.oid), 1, 2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializedView:
    """One materialized view.

    Attributes:
        name: its name.
        may: whether the role may refresh it.
        concurrently: whether it can be refreshed while it is read.
    """

    name: TableName
    may: bool
    concurrently: bool


async def populated_views(session: Session) -> list[TableName]:
    """The materialized views of a database that have been filled, without those of extensions."""
    return [TableName(namespace or "", name or "") for namespace, name in await session.execute(_POPULATED)]


async def views_in_order(session: Session, names: Collection[TableName]) -> list[MaterializedView]:
    """Those of the views that the database has, each after those that it reads, also by way of other views."""
    if not names:
        return []
    values = ", ".join(f"({quote_literal(each.namespace)}, {quote_literal(each.name)})" for each in names)
    maintain = "pg_catalog.has_table_privilege(c.oid, 'MAINTAIN')" if session.pgconn.server_version >= _MAINTAIN else "false"
    rows = await session.execute(_ORDERED.format(names=values, maintain=maintain))
    return [
        MaterializedView(name=TableName(namespace or "", name or ""), may=may == "t", concurrently=concurrently == "t")
        for namespace, name, may, concurrently in rows
    ]


async def refresh(session: Session, view: MaterializedView, *, concurrently: bool = False) -> float:
    """Fill a view again, and return how many seconds it took.

    Args:
        session: with the database. Its settings are those of the database afterwards.
        view: the view.
        concurrently: let others read it meanwhile, if it has a unique index for that.

    Raises:
        PublisherError: the server rejects it.
    """
    began = time.monotonic()
    await session.execute(unpin())
    await session.execute(_statement(view, concurrently=concurrently and view.concurrently))
    return time.monotonic() - began


def _statement(view: MaterializedView, *, concurrently: bool = False) -> str:
    name = view.name.quoted
    return f"REFRESH MATERIALIZED VIEW {'CONCURRENTLY ' if concurrently else ''}{name}"


async def measured(session: Session, views: Sequence[MaterializedView], seconds: float) -> list[float]:
    """Refresh the views, roll it back, and return how many seconds each took. Those are missing for which the time did not suffice.

    Raises:
        PublisherError: the server rejects it.
    """
    found = list[float]()
    await session.execute(unpin())
    await session.execute("BEGIN")
    until = time.monotonic() + seconds
    try:
        for view in views:
            began = time.monotonic()
            await session.execute(
                f"SET LOCAL statement_timeout = {max(int((until - began) * 1000), 1)}; SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"
            )
            await session.execute(_statement(view))
            found.append(time.monotonic() - began)
    except PublisherError as error:
        if error.sqlstate not in _ENDED:
            raise
    finally:
        await session.execute("ROLLBACK")
    return found
