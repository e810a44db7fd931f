"""Read the publisher's sequences.

``last_value`` is exact in this sense: no session has handed out a value beyond it, and none will without moving it. ``nextval`` takes
CACHE values at once, and stores the last of them as ``last_value`` before it returns the first one. So values in the caches of other
sessions are included. The WAL of the sequence is 32 values ahead (``log_cnt``), but the sequence itself is not. Only after a crash, and on
a standby, it continues from the WAL, and ``last_value`` is too high rather than too low. Sequences are not transactional: the value that
is read is the latest one, not that of a snapshot.

Source: ``nextval_internal`` of src/backend/commands/sequence.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from subscriber.abc import TableName
from subscriber.abc.sequences import PublishedSequence
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.publication import missing_publications, publications_missing, published_names, published_sequences
from subscriber.walreceiver.session import Session

__all__ = ["read_sequences"]

_BATCH = 200
_SYSTEM = "n.nspname NOT LIKE 'pg\\_%' AND n.nspname NOT IN ('information_schema', 'subscriber')"


@dataclass(slots=True)
class _Found:
    name: TableName
    readable: bool
    columns: dict[tuple[TableName, str], bool] = field(default_factory=dict)


async def read_sequences(
    session: Session, publications: Sequence[str], *, schemas: Sequence[str] = (), everything: bool = False
) -> tuple[list[PublishedSequence], list[TableName]]:
    """Read the sequences from which columns of published tables take values, those of FOR ALL SEQUENCES, and on request others.

    Args:
        session: with the publisher.
        publications: their tables' sequences are read, also those of partitions and of partitioned tables above them.
        schemas: all sequences of these schemas, too.
        everything: all sequences of the database, without those of extensions.

    Returns:
        The sequences, sorted by name; and the names of those that the role may not read.

    Raises:
        ConfigurationError: a schema does not exist.
        PublisherError: a publication does not exist, or the publisher rejects a query.
    """
    if missing := await missing_publications(session, publications):
        raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, or correct the name")
    for schema in schemas:
        if not await session.execute(f"SELECT FROM pg_catalog.pg_namespace WHERE nspname = {quote_literal(schema)}"):
            raise ConfigurationError(f'schema "{schema}" does not exist on the publisher', hint="correct the name")
    oids = list((await published_names(session, publications)).values())
    published = await published_sequences(session, publications)
    found = await _find(session, oids, schemas, published, everything=everything)
    readable = {oid: each for oid, each in found.items() if each.readable}
    sequences = []
    for part in _parts(list(readable)):
        sequences += await _read(session, {oid: readable[oid] for oid in part})
    return sorted(sequences, key=lambda each: each.name), sorted(each.name for each in found.values() if not each.readable)


def _parts(oids: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(oids), _BATCH):
        yield oids[first : first + _BATCH]


async def _find(
    session: Session, tables: Sequence[int], schemas: Sequence[str], published: Sequence[int], *, everything: bool
) -> dict[int, _Found]:
    listed = ", ".join(f"({oid})" for oid in tables) or "(0)"
    wanted = [f"n.nspname IN ({', '.join(quote_literal(name) for name in schemas)})"] if schemas else []
    wanted += [_SYSTEM] if everything else []
    more = f"OR (({' OR '.join(wanted)}) AND NOT own.extension)" if wanted else ""
    more += f" OR c.oid IN ({', '.join(map(str, published))})" if published else ""
    rows = await session.execute(f"""
        WITH published AS (SELECT v.oid FROM (VALUES {listed}) AS v (oid)),
        tables AS (
            SELECT p.oid::pg_catalog.oid AS relid FROM published AS p
            UNION SELECT a.relid::pg_catalog.oid FROM published AS p, LATERAL pg_catalog.pg_partition_ancestors(p.oid::pg_catalog.oid) AS a
            UNION SELECT t.relid::pg_catalog.oid FROM published AS p, LATERAL pg_catalog.pg_partition_tree(p.oid::pg_catalog.oid) AS t),
        uses AS (
            SELECT d.objid AS sequence, d.refobjid AS relid, d.refobjsubid AS attnum, true AS owns
              FROM pg_catalog.pg_depend AS d
             WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
               AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
            UNION ALL
            SELECT d.refobjid, def.adrelid, def.adnum, false
              FROM pg_catalog.pg_depend AS d
              JOIN pg_catalog.pg_attrdef AS def ON def.oid = d.objid
             WHERE d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass AND d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass)
        SELECT c.oid, n.nspname, c.relname,
               pg_catalog.has_sequence_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
               tn.nspname, tc.relname, a.attname, uses.owns
          FROM pg_catalog.pg_class AS c
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
         CROSS JOIN LATERAL (
            SELECT EXISTS (
                SELECT FROM pg_catalog.pg_depend AS d
                 WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e') AS extension
            ) AS own
          LEFT JOIN uses ON uses.sequence = c.oid
          LEFT JOIN pg_catalog.pg_class AS tc ON tc.oid = uses.relid AND tc.relkind IN ('r', 'p')
          LEFT JOIN pg_catalog.pg_namespace AS tn ON tn.oid = tc.relnamespace
          LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tc.oid AND a.attnum = uses.attnum
         WHERE c.relkind = 'S' AND c.relpersistence <> 't'
           AND (uses.relid IN (SELECT relid FROM tables) {more})
         ORDER BY c.oid, uses.owns DESC NULLS LAST, tn.nspname, tc.relname, a.attname
    """)  # noqa: S608
    found: dict[int, _Found] = {}
    for oid, namespace, name, readable, table_namespace, table, column, owns in rows:
        sequence = found.setdefault(int(oid or 0), _Found(TableName(namespace or "", name or ""), readable == "t"))
        if table is not None and column is not None:
            sequence.columns.setdefault((TableName(table_namespace or "", table), column), owns == "t")
    return found


async def _read(session: Session, found: dict[int, _Found]) -> list[PublishedSequence]:
    values = " UNION ALL ".join(
        f"SELECT {oid} AS oid, last_value, is_called FROM {quote_identifier(each.name.namespace)}.{quote_identifier(each.name.name)}"  # noqa: S608
        for oid, each in found.items()
    )
    rows = await session.execute(f"""
        SELECT v.oid, pg_catalog.format_type(s.seqtypid, NULL), s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
               v.last_value, v.is_called
          FROM ({values}) AS v JOIN pg_catalog.pg_sequence AS s ON s.seqrelid = v.oid
    """)  # noqa: S608
    sequences = []
    for oid, kind, start, increment, minimum, maximum, cache, cycle, last_value, is_called in rows:
        each = found[int(oid or 0)]
        sequences.append(
            PublishedSequence(
                name=each.name,
                type=kind or "",
                start=int(start or 0),
                increment=int(increment or 0),
                minimum=int(minimum or 0),
                maximum=int(maximum or 0),
                cache=int(cache or 0),
                cycle=cycle == "t",
                last_value=int(last_value or 0),
                is_called=is_called == "t",
                columns=tuple(each.columns),
            )
        )
    return sequences
