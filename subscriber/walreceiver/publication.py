"""Read from the publisher's catalog what the subscribed publications publish.

The results equal those of PostgreSQL (fetch_table_list of subscriptioncmds.c, fetch_remote_table_info of tablesync.c). All versions use
the same query, ``pg_get_publication_tables`` for each publication; this module combines the publications:

* A partition is left out if an ancestor of it is published as itself (``publish_via_partition_root``), because its changes are sent as
  the ancestor's. From 16 on the server does the same when asked for all publications at once.
* The row filters are OR'ed. One publication without a filter means the whole table. The operations that a publication publishes do
  not matter here (manual, Row Filters, Initial Data Synchronization).
* The column lists must be the same.
* The subscriber's own catalog is left out, if the publisher is also a target of this program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import PublisherError
from subscriber.interfaces import CATALOG_SCHEMA, PublishedTable, TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.types.registry import TypeRegistry
from subscriber.walreceiver.mapped_tables import mapped_names, mapped_tables
from subscriber.walreceiver.session import Row, Session
from subscriber.walreceiver.type_reader import type_facts

__all__ = [
    "missing_publications",
    "other_identities",
    "publications_missing",
    "published_names",
    "published_sequences",
    "published_sizes",
    "published_sources",
    "published_tables",
]


@dataclass(slots=True)
class _Table:
    """One table while the rows of several publications are combined."""

    name: TableName
    kind: str
    replica_identity: str
    size: int
    estimated_rows: int | None
    column_lists: set[frozenset[int] | None] = field(default_factory=set)
    filters: dict[str, None] = field(default_factory=dict)
    whole: bool = False
    updates: bool = False
    deletes: bool = False


@dataclass(frozen=True, slots=True)
class _Column:
    number: int
    name: str
    type_oid: int
    modifier: int
    not_null: bool
    generated: bool
    key: bool
    primary_key: int
    """Position in the primary key, from 1; 0: not part of it."""


async def missing_publications(session: Session, names: Sequence[str]) -> list[str]:
    """Return the publications that do not exist, in the order given."""
    if not names:
        return []
    rows = await session.execute(f"SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({_literals(names)})")  # noqa: S608
    found = {name for (name,) in rows}
    return [name for name in names if name not in found]


async def published_sequences(session: Session, publications: Sequence[str]) -> list[int]:
    """The oids of the sequences that publications FOR ALL SEQUENCES publish. Before 19 there are none."""
    if not publications or not session.capabilities.published_sequences:
        return []
    rows = await session.execute(
        "SELECT DISTINCT gps.relid FROM pg_catalog.pg_publication AS p, LATERAL pg_catalog.pg_get_publication_sequences(p.pubname) AS gps"  # noqa: S608
        f" WHERE p.pubname IN ({_literals(publications)})"
    )
    return [int(oid or 0) for (oid,) in rows]


async def published_names(session: Session, publications: Sequence[str], mapping: TableMapping = NO_MAPPING) -> dict[TableName, int]:
    """Return the names of the tables that :func:`published_tables` describes, each with the table's oid on the publisher."""
    if not publications:
        return {}
    tables = _gather(await session.execute(_tables_query(session, publications, ())))
    oids = {table.name: oid for oid, table in tables.items()}
    return {target: oids[name] for target, name in mapped_names(oids, mapping).items()}


async def published_sources(session: Session, publications: Sequence[str], mapping: TableMapping) -> dict[TableName, TableName]:
    """Return the publisher's names of the published tables by those of the target. Without a mapping, the publisher is not asked.

    Raises:
        ConfigurationError: two tables have one name in the target.
    """
    return mapped_names(await published_names(session, publications), mapping) if mapping else {}


async def other_identities(
    session: Session, publications: Sequence[str], mapping: TableMapping = NO_MAPPING
) -> dict[TableName, list[TableName]]:
    """Return the partitions whose updates and deletes no subscriber can apply, by the table that their changes are published as.

    With ``publish_via_partition_root`` a change is described as one of the root, but the publisher sends the old values of the partition's
    replica identity. If that lacks a column of the root's, the row cannot be found. A partition without a replica identity is not among
    them: there the publisher rejects the UPDATE or DELETE. Of a root with REPLICA IDENTITY FULL, the primary key is enough.
    """
    if not publications:
        return {}
    rows = await session.execute(f"""
        WITH root AS MATERIALIZED (
            SELECT DISTINCT c.oid
              FROM pg_catalog.pg_publication AS p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt
              JOIN pg_catalog.pg_class AS c ON c.oid = gpt.relid
             WHERE p.pubname IN ({_literals(publications)}) AND p.pubviaroot AND (p.pubupdate OR p.pubdelete) AND c.relkind = 'p'),
        member AS MATERIALIZED (
            SELECT root.oid AS root, c.oid, c.relnamespace, c.relname,
                   ARRAY(SELECT a.attname FROM pg_catalog.pg_attribute AS a
                          WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                            AND CASE WHEN i.indexrelid IS NULL THEN c.relreplident = 'f' ELSE a.attnum = ANY (i.indkey) END) AS identity
              FROM root CROSS JOIN LATERAL pg_catalog.pg_partition_tree(root.oid) AS tree
              JOIN pg_catalog.pg_class AS c ON c.oid = tree.relid AND (c.oid = root.oid OR c.relkind = 'r')
              LEFT JOIN pg_catalog.pg_index AS i ON i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
               AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident
                                       WHEN 'f' THEN i.indisprimary AND c.oid = root.oid END)
        SELECT rn.nspname, r.relname, n.nspname, leaf.relname
          FROM member AS leaf
          JOIN member AS r ON r.oid = leaf.root AND r.root = leaf.root
          JOIN pg_catalog.pg_namespace AS rn ON rn.oid = r.relnamespace
          JOIN pg_catalog.pg_namespace AS n ON n.oid = leaf.relnamespace
         WHERE leaf.identity <> '{{}}' AND NOT leaf.identity @> r.identity
         ORDER BY 1, 2, 3, 4
    """)  # noqa: S608
    found: dict[TableName, list[TableName]] = {}
    for namespace, table, of, leaf in rows:
        found.setdefault(TableName(namespace or "", table or ""), []).append(TableName(of or "", leaf or ""))
    return {target: found[name] for target, name in mapped_names(found, mapping).items()}


async def published_sizes(session: Session, publications: Sequence[str], mapping: TableMapping = NO_MAPPING) -> dict[TableName, int]:
    """Return the tables that :func:`published_tables` describes, each with the bytes of its heap."""
    if not publications:
        return {}
    tables = {table.name: table.size for table in _gather(await session.execute(_tables_query(session, publications, ()))).values()}
    return {target: tables[name] for target, name in mapped_names(tables, mapping).items()}


def publications_missing(names: Sequence[str]) -> str:
    """Return PostgreSQL's message for publications that do not exist."""
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f"publications {listed} do not exist on the publisher"
        if len(names) > 1
        else f"publication {listed} does not exist on the publisher"
    )


async def published_tables(
    session: Session, publications: Sequence[str], *only: TableName, mapping: TableMapping = NO_MAPPING
) -> list[PublishedTable]:
    """Return the tables of the publications, sorted by name. Publications that do not exist are ignored.

    Args:
        session: to the publisher; may be a walsender.
        publications: names.
        only: return only these tables, if any are given.
        mapping: which tables the subscription has, and under which names. It applies to ``only``, too.

    Raises:
        ConfigurationError: two tables have one name in the target.
        PublisherError: two publications have different column lists for a table.
    """
    found = await _published_tables(session, publications, [TableName(*name) for table in only for name in mapping.sources(table.pair)])
    if not mapping:
        return found
    return [table for table in mapped_tables(found, mapping) if not only or table.name in only]


async def _published_tables(session: Session, publications: Sequence[str], only: Sequence[TableName]) -> list[PublishedTable]:
    if not publications:
        return []
    tables = _gather(await session.execute(_tables_query(session, publications, only)))
    if not tables:
        return []
    columns = await _columns(session, tables)
    published = [_published(relation_id, found, columns.get(relation_id, [])) for relation_id, found in tables.items()]
    registry = TypeRegistry()
    registry.add(await type_facts(session, {oid for found in published for oid in found.column_types}))
    return [replace(found, types=registry.facts_of(found.column_types)) for found in published]


def _tables_query(session: Session, publications: Sequence[str], only: Sequence[TableName]) -> str:
    caps = session.capabilities
    attributes = "published.attrs::pg_catalog.text" if caps.column_lists else "NULL"
    row_filter = "pg_catalog.pg_get_expr(published.qual, published.relid)" if caps.row_filters else "NULL"
    details = f"{', gpt.attrs' if caps.column_lists else ''}{', gpt.qual' if caps.row_filters else ''}"
    names = ", ".join(f"({quote_literal(name.namespace)}, {quote_literal(name.name)})" for name in only)
    named = f"AND (n.nspname, c.relname) IN ({names})" if only else ""
    return f"""
        WITH published AS MATERIALIZED (
            SELECT gpt.relid, p.pubviaroot, p.pubupdate, p.pubdelete{details}
              FROM pg_catalog.pg_publication AS p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt
             WHERE p.pubname IN ({_literals(publications)})),
        roots AS MATERIALIZED (SELECT relid FROM published WHERE pubviaroot),
        -- materialized: of these tables alone the size is asked for
        chosen AS MATERIALIZED (
            SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, published.pubupdate, published.pubdelete,
                   {attributes} AS attributes, {row_filter} AS row_filter
              FROM published
              JOIN pg_catalog.pg_class AS c ON c.oid = published.relid
              JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE n.nspname <> {quote_literal(CATALOG_SCHEMA)}
               AND NOT (c.relispartition AND EXISTS (
                       SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) AS ancestor
                         JOIN roots AS root ON root.relid = ancestor.relid
                        WHERE root.relid <> c.oid))
               {named})
        SELECT chosen.oid, chosen.nspname, chosen.relname, chosen.relkind, chosen.relreplident, heap.size, heap.reltuples,
               chosen.pubupdate, chosen.pubdelete, chosen.attributes, chosen.row_filter
          FROM chosen
         CROSS JOIN LATERAL (
            SELECT COALESCE(pg_catalog.sum(pg_catalog.pg_relation_size(leaf.oid)), 0) AS size,
                   CASE WHEN NOT pg_catalog.bool_or(leaf.relpages = 0 AND leaf.reltuples <= 0)
                        THEN pg_catalog.sum(leaf.reltuples)::pg_catalog.int8 END AS reltuples
              FROM (SELECT chosen.oid AS relid WHERE chosen.relkind <> 'p'
                    UNION ALL
                    SELECT tree.relid FROM pg_catalog.pg_partition_tree(chosen.oid) AS tree
                     WHERE chosen.relkind = 'p' AND tree.isleaf) AS own
              JOIN pg_catalog.pg_class AS leaf ON leaf.oid = own.relid) AS heap
         ORDER BY chosen.nspname, chosen.relname, chosen.oid
    """  # noqa: S608


def _gather(rows: Iterable[Row]) -> dict[int, _Table]:
    tables: dict[int, _Table] = {}
    for oid, namespace, name, kind, identity, size, reltuples, updates, deletes, attributes, row_filter in rows:
        table = tables.setdefault(
            int(oid or 0),
            _Table(
                TableName(namespace or "", name or ""),
                kind or "",
                identity or "",
                int(size or 0),
                None if reltuples is None else int(reltuples),
            ),
        )
        table.updates |= updates == "t"
        table.deletes |= deletes == "t"
        table.column_lists.add(None if attributes is None else frozenset(int(number) for number in attributes.split()))
        if row_filter is None:
            table.whole = True
        else:
            table.filters[row_filter] = None
    return tables


async def _columns(session: Session, relation_ids: Iterable[int]) -> dict[int, list[_Column]]:
    oids = ", ".join(str(oid) for oid in relation_ids)
    rows = await session.execute(f"""
        WITH identity AS MATERIALIZED (
            SELECT c.oid AS relid, pg_catalog.pg_get_replica_identity_index(c.oid) AS index
              FROM pg_catalog.pg_class AS c
             WHERE c.oid IN ({oids}))
        SELECT a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated <> '',
               COALESCE(a.attnum = ANY (i.indkey), false), COALESCE(pg_catalog.array_position(con.conkey, a.attnum), 0)
          FROM identity
          JOIN pg_catalog.pg_attribute AS a ON a.attrelid = identity.relid
          LEFT JOIN pg_catalog.pg_index AS i ON i.indexrelid = identity.index
          LEFT JOIN pg_catalog.pg_constraint AS con ON con.conrelid = identity.relid AND con.contype = 'p'
         WHERE a.attnum > 0 AND NOT a.attisdropped
         ORDER BY a.attrelid, a.attnum
    """)  # noqa: S608
    columns: dict[int, list[_Column]] = {}
    for oid, number, name, type_oid, modifier, not_null, generated, key, place in rows:
        column = _Column(
            int(number or 0),
            name or "",
            int(type_oid or 0),
            int(modifier or -1),
            not_null == "t",
            generated == "t",
            key == "t",
            int(place or 0),
        )
        columns.setdefault(int(oid or 0), []).append(column)
    return columns


def _published(relation_id: int, table: _Table, columns: Sequence[_Column]) -> PublishedTable:
    # without a column list, 15 and older return none and later versions all columns; generated columns are only sent if listed
    everything = frozenset(column.number for column in columns if not column.generated)
    lists = {everything if listed is None else listed for listed in table.column_lists}
    if len(lists) > 1:
        raise PublisherError(
            f'cannot use different column lists for table "{table.name}" in different publications',
            hint="use the same column list for the table in all publications, or subscribe to the publications separately",
        )
    (listed,) = lists
    sent = [column for column in columns if column.number in listed]
    if table.replica_identity == "n":
        keys: list[_Column] = []
    elif table.replica_identity == "f":
        keys = sent
    else:
        keys = [column for column in sent if column.key]
    primary = sorted((column for column in columns if column.primary_key), key=lambda column: column.primary_key)
    return PublishedTable(
        name=table.name,
        relation_id=relation_id,
        kind=table.kind,
        columns=tuple(column.name for column in sent),
        key_columns=tuple(column.name for column in keys),
        replica_identity=table.replica_identity,
        row_filters=() if table.whole else tuple(table.filters),
        size=table.size,
        estimated_rows=table.estimated_rows,
        generated=tuple(column.name for column in sent if column.generated),
        column_types=tuple(column.type_oid for column in sent),
        column_modifiers=tuple(column.modifier for column in sent),
        not_null=frozenset(column.name for column in sent if column.not_null),
        primary_key=tuple(column.name for column in primary) if all(column in sent for column in primary) else (),
        changes=table.updates or table.deletes,
        all_changes=table.updates and table.deletes,
    )


def _literals(names: Iterable[str]) -> str:
    return ", ".join(quote_literal(name) for name in names)
