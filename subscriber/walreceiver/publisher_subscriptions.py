"""Subscriptions by which the publisher receives rows of the tables that it publishes: native ones, and those of this program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import PublisherError, PublisherUnavailable
from subscriber.interfaces import TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.session import Row, Session

__all__ = ["SubscribedTable", "subscribed_tables"]


@dataclass(frozen=True, slots=True)
class SubscribedTable:
    """A published table that a subscription of the publisher writes to.

    Attributes:
        table: as it is published.
        subscription: the subscription's name.
        slot_name: the subscription's slot on its own publisher, or None.
        enabled: whether it receives changes now.
        takes_any_origin: whether it also receives changes that its own publisher replicated from elsewhere (origin = any).
    """

    table: TableName
    subscription: str
    slot_name: str | None
    enabled: bool
    takes_any_origin: bool


_RELATED: Final = """
WITH related AS (
    SELECT gpt.relid AS published, r.relid
      FROM pg_catalog.pg_publication AS p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt,
           LATERAL (SELECT relid FROM pg_catalog.pg_partition_ancestors(gpt.relid)
                    UNION SELECT relid FROM pg_catalog.pg_partition_tree(gpt.relid) UNION SELECT gpt.relid) AS r
     WHERE p.pubname IN ({names})
)
SELECT DISTINCT n.nspname, c.relname, {columns}
  FROM related
  JOIN pg_catalog.pg_class AS c ON c.oid = related.published
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN {join}
 ORDER BY 1, 2, 3
"""

_COLUMNS: Final = "s.subname, s.subslotname, s.subenabled, s.suborigin"

_COLUMNS_BEFORE_16: Final = "s.subname, s.subslotname, s.subenabled, 'any'"

_BY_OID: Final = """{schema}.pg_subscription_rel AS sr ON sr.srrelid = related.relid
  JOIN {schema}.pg_subscription AS s ON s.oid = sr.srsubid"""

# only superusers may read pg_subscription.oid
_BY_NAME_BEFORE_14: Final = """pg_catalog.pg_subscription_rel AS sr ON sr.srrelid = related.relid
  JOIN pg_catalog.pg_stat_subscription AS st ON st.subid = sr.srsubid
  JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
  JOIN pg_catalog.pg_subscription AS s ON s.subname = st.subname AND s.subdbid = d.oid"""

_CATALOGS: Final = """
SELECT n.nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relname = 'pg_subscription' AND n.nspname IN ('pg_catalog', 'subscriber')
   AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
 ORDER BY 1
"""


async def subscribed_tables(session: Session, publications: Sequence[str]) -> list[SubscribedTable]:
    """Return the published tables that subscriptions of the publisher write to, by name.

    A catalog that this role may not read, or that has another version, is skipped.

    Raises:
        PublisherUnavailable: the connection was lost.
    """
    names = ", ".join(quote_literal(name) for name in publications)
    rows: list[Row] = []
    for (catalog,) in await session.execute(_CATALOGS):
        schema = catalog or ""
        version = session.pgconn.server_version
        columns = _COLUMNS_BEFORE_16 if schema == "pg_catalog" and version < 160000 else _COLUMNS
        join = _BY_NAME_BEFORE_14 if schema == "pg_catalog" and version < 140000 else _BY_OID.format(schema=schema)
        try:
            rows += await session.execute(_RELATED.format(names=names, columns=columns, join=join))
        except PublisherUnavailable:
            raise
        except PublisherError:
            continue
    return [
        SubscribedTable(TableName(namespace or "", table or ""), name or "", slot, enabled == "t", origin == "any")
        for namespace, table, name, slot, enabled, origin in rows
    ]
