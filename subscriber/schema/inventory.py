"""What a migration of a database does not move: what pg_dump leaves out, and what no publication has.

The page of the documentation that has the whole list: docs/reference/migrated-objects.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from subscriber.interfaces import CATALOG_SCHEMA, Query
from subscriber.printable import shortened
from subscriber.protocol.quoting import quote_literal

__all__ = ["extension_versions", "not_moved", "unpublished_tables"]

_OURS: Final = f"n.nspname <> {quote_literal(CATALOG_SCHEMA)} AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'"
_OF_EXTENSION: Final = (
    "EXISTS (SELECT FROM pg_catalog.pg_depend AS e WHERE e.classid = '{}'::pg_catalog.regclass AND e.objid = {} AND e.deptype = 'e')"
)
_FOUND: Final = f"""
SELECT 'unlogged', n.nspname || '.' || c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'u' AND {_OURS} AND NOT {_OF_EXTENSION.format("pg_catalog.pg_class", "c.oid")}
UNION ALL SELECT 'large objects', count(*)::text FROM pg_catalog.pg_largeobject_metadata HAVING count(*) > 0
UNION ALL SELECT 'event triggers', t.evtname FROM pg_catalog.pg_event_trigger AS t
 WHERE NOT {_OF_EXTENSION.format("pg_catalog.pg_event_trigger", "t.oid")}
UNION ALL SELECT 'publications', p.pubname FROM pg_catalog.pg_publication AS p WHERE p.pubname NOT IN ({{publications}})
UNION ALL SELECT 'subscriptions', s.subname FROM pg_catalog.pg_subscription AS s JOIN pg_catalog.pg_database AS d ON d.oid = s.subdbid
 WHERE d.datname = pg_catalog.current_database()
UNION ALL SELECT 'slots', s.slot_name FROM pg_catalog.pg_replication_slots AS s
 WHERE s.database = pg_catalog.current_database() AND NOT s.temporary AND s.slot_name NOT IN ({{slots}})
UNION ALL SELECT 'extension rows', x.extname || ': ' || n.nspname || '.' || c.relname
  FROM pg_catalog.pg_extension AS x CROSS JOIN LATERAL pg_catalog.unnest(x.extconfig) AS config (oid)
  JOIN pg_catalog.pg_class AS c ON c.oid = config.oid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND pg_catalog.pg_relation_size(c.oid) > 0 AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_publication_tables AS t
     WHERE t.pubname IN ({{publications}}) AND t.schemaname = n.nspname AND t.tablename = c.relname)
UNION ALL SELECT 'foreign servers', s.srvname FROM pg_catalog.pg_foreign_server AS s
UNION ALL SELECT 'tablespaces', s.spcname FROM pg_catalog.pg_tablespace AS s
 WHERE s.spcname !~ '^pg_' AND EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.reltablespace = s.oid)
UNION ALL SELECT 'invalid indexes', n.nspname || '.' || c.relname FROM pg_catalog.pg_index AS i
  JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE NOT i.indisvalid AND c.relkind = 'i' AND {_OURS}
ORDER BY 1, 2
"""  # noqa: S608
_UNPUBLISHED: Final = f"""
SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND {_OURS} AND NOT {_OF_EXTENSION.format("pg_catalog.pg_class", "c.oid")}
   AND c.oid NOT IN ({{published}})
 ORDER BY 1
"""  # noqa: S608
_TEXTS: Final = {
    "event triggers": "event triggers (--event-triggers creates them)",
    "extension rows": "rows of tables of extensions, such as jobs: move them yourself",
    "foreign servers": "rows behind foreign servers, which the new server must reach",
    "invalid indexes": "indexes that are not valid",
    "large objects": "large objects (cutover --large-objects)",
    "publications": "publications (--publications creates them)",
    "slots": "replication slots of others: their consumers must begin again",
    "subscriptions": "subscriptions of the old database: define them in the new one",
    "tablespaces": "tablespaces: everything is in the default one",
    "unlogged": "rows of unlogged tables (cutover --unlogged)",
}
_EXTENSIONS: Final = "SELECT extname::text, extversion::text FROM pg_catalog.pg_extension"


async def unpublished_tables(query: Query, published: str) -> list[str]:
    """The permanent tables that are not published, without those of extensions.

    Args:
        query: runs SQL on the publisher.
        published: SQL of the oids of the published tables and their partitions.

    Raises:
        PublisherError: the query failed.
    """
    return [name or "" for (name,) in await query(_UNPUBLISHED.format(published=published))]


async def not_moved(query: Query, published: str, publications: Sequence[str], slots: Sequence[str], created: Collection[str]) -> list[str]:
    """What the publisher's database has and the target's has not got, one line for each kind.

    Args:
        query: runs SQL on the publisher.
        published: SQL of the oids of the published tables and their partitions.
        publications: of the migration.
        slots: of the migration.
        created: kinds that were created on request: ``publications``, ``event triggers``.

    Raises:
        PublisherError: the query failed.
    """
    found = defaultdict[str, list[str]](list)
    literals = {"publications": publications, "slots": slots}
    filled = {name: ", ".join(map(quote_literal, values)) or "NULL" for name, values in literals.items()}
    for kind, name in await query(_FOUND.format(**filled)):
        found[kind or ""].append(name or "")
    left_out = await unpublished_tables(query, published)
    lines = [f"rows of tables that are not published: {shortened(left_out)}"] if left_out else []
    return lines + [f"{_TEXTS[kind]}: {shortened(names)}" for kind, names in found.items() if kind not in created]


async def extension_versions(publisher: Query, target: Query) -> list[str]:
    """Extensions that have another version in the target.

    Raises:
        PublisherError, TargetError: a query failed.
    """
    here = {name or "": version for name, version in await publisher(_EXTENSIONS)}
    there = {name or "": version for name, version in await target(_EXTENSIONS)}
    both = sorted(here.keys() & there.keys())
    differing = [f"{name} {there[name]} (publisher: {here[name]})" for name in both if here[name] != there[name]]
    missing = sorted(here.keys() - there.keys())
    lines = [f"other versions of extensions in the target: {shortened(differing)}"] if differing else []
    return lines + ([f"not moved: extensions: {shortened(missing)}"] if missing else [])
