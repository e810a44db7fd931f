"""Read the publisher's sequences.

``last_value`` is exact in this sense: no session has handed out a value beyond it, and none will without moving it. ``nextval`` takes
CACHE values at once, and stores the last of them as ``last_value`` before it returns the first one. So values in the caches of other
sessions are included. The WAL of the sequence is 32 values ahead (``log_cnt``), but the sequence itself is not. Only after a crash, and on
a standby, it continues from the WAL, and ``last_value`` is too high rather than too low. Sequences are not transactional: the value that
is read is the latest one, not that of a snapshot.

Source: ``nextval_internal`` of src/backend/commands/sequence.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.config.table_names import compiled_pattern
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.interfaces import TableName
from subscriber.interfaces.sequences import PublishedSequence, SequenceChoice
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.publication import missing_publications, publications_missing, published_names, published_sequences
from subscriber.walreceiver.session import Session

__all__ = ["SequencesFound", "read_sequences"]

_BATCH = 200
_NOT_OURS = "n.nspname LIKE 'pg\\_%' OR n.nspname IN ('information_schema', 'subscriber')"


@dataclass(slots=True)
class _Found:
    name: TableName
    readable: bool
    published: bool = False
    owned: bool = False
    columns: dict[tuple[TableName, str], bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesFound:
    """The sequences of a publisher.

    Attributes:
        sequences: those that were chosen, sorted by name.
        unreadable: those of them that the role may not read.
        unnamed: those that no column of any table owns and no published column uses. Somebody must say whether they are set.
        omitted: others that were not chosen.
        whole: whether the publications have all tables of the database.
    """

    sequences: list[PublishedSequence]
    unreadable: list[TableName]
    unnamed: list[TableName]
    omitted: list[TableName]
    whole: bool


async def read_sequences(
    session: Session,
    publications: Sequence[str],
    choice: SequenceChoice | None = None,
    *,
    unlogged: bool = False,
    mapping: TableMapping = NO_MAPPING,
) -> SequencesFound:
    """Read the sequences that were chosen; those of extensions only if a published column uses them.

    Args:
        session: with the publisher.
        publications: a sequence is published if a column of their tables uses it, also of partitions and of partitioned tables above
            them, or if one of them is FOR ALL SEQUENCES.
        choice: which sequences.
        unlogged: whether unlogged tables count as published.
        mapping: which tables the subscription has. ``sequences`` and their columns have the target's names.

    Raises:
        ConfigurationError: no sequence matches a pattern, or a pattern is invalid.
        PublisherError: a publication does not exist, or the publisher rejects a query.
    """
    choice = choice or SequenceChoice()
    if missing := await missing_publications(session, publications):
        raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, or correct the name")
    oids = list((await published_names(session, publications, mapping)).values())
    found, whole = await _find(session, oids, publications, await published_sequences(session, publications), unlogged=unlogged)
    chosen, unnamed, omitted = dict[int, _Found](), list[TableName](), list[TableName]()
    unmatched = dict.fromkeys(choice.patterns)
    everything = choice.kind == "all" or (choice.kind is None and whole)
    expressions = {pattern: compiled_pattern(pattern) for pattern in choice.patterns}
    for oid, each in found.items():
        matching = [pattern for pattern, parts in expressions.items() if _matches(parts, each.name)]
        for pattern in matching:
            unmatched.pop(pattern, None)
        if choice.kind != "none" and (each.published or everything or matching):
            chosen[oid] = each
        elif choice.kind is None and not each.owned:
            unnamed.append(each.name)
        else:
            omitted.append(each.name)
    if unmatched:
        raise ConfigurationError(
            f"the publisher has no sequence {next(iter(unmatched))}", hint="correct the name: SCHEMA.NAME, with * and ?"
        )
    readable = {oid: each for oid, each in chosen.items() if each.readable}
    sequences = []
    for part in _parts(list(readable)):
        sequences += await _read(session, {oid: readable[oid] for oid in part})
    return SequencesFound(
        sequences=sorted((_mapped(each, mapping) for each in sequences), key=lambda each: each.name),
        unreadable=sorted(each.name for each in chosen.values() if not each.readable),
        unnamed=sorted(unnamed),
        omitted=sorted(omitted),
        whole=whole,
    )


def _mapped(sequence: PublishedSequence, mapping: TableMapping) -> PublishedSequence:
    if not mapping:
        return sequence
    columns = tuple(
        (TableName(*mapping.target(table.pair)), mapping.column(table.pair, column))
        for table, column in sequence.columns
        if not mapping.excludes(table.pair) and mapping.kept(table.pair, [column])
    )
    return replace(sequence, name=TableName(*mapping.target(sequence.name.pair)), columns=columns)


def _parts(oids: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(oids), _BATCH):
        yield oids[first : first + _BATCH]


def _matches(parts: Sequence[re.Pattern[str]], name: TableName) -> bool:
    texts = (name.namespace, name.name)[-len(parts) :]
    return all(part.fullmatch(text) for part, text in zip(parts, texts, strict=True))


async def _find(
    session: Session, tables: Sequence[int], publications: Sequence[str], published: Sequence[int], *, unlogged: bool
) -> tuple[dict[int, _Found], bool]:
    listed = ", ".join(f"({oid})" for oid in tables) or "(0)"
    further = ", ".join(map(str, published or [0]))
    rows = await session.execute(f"""
        WITH extended AS (SELECT d.objid FROM pg_catalog.pg_depend AS d
             WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype = 'e'),
        published AS (
            SELECT v.oid FROM (VALUES {listed}) AS v (oid)
            UNION SELECT c.oid::pg_catalog.int8 FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE {unlogged} AND c.relkind IN ('r', 'p') AND c.relpersistence = 'u'
               AND NOT ({_NOT_OURS}) AND c.oid NOT IN (SELECT objid FROM extended)),
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
               tn.nspname, tc.relname, a.attname, uses.owns, mine.published,
               EXISTS (SELECT FROM pg_catalog.pg_publication AS p WHERE p.puballtables AND p.pubname IN ({_names(publications)}))
               OR NOT EXISTS (
                SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND c.oid NOT IN (SELECT relid FROM tables)
                   AND c.oid NOT IN (SELECT objid FROM extended) AND NOT ({_NOT_OURS}))
          FROM pg_catalog.pg_class AS c
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          LEFT JOIN uses ON uses.sequence = c.oid
         CROSS JOIN LATERAL (
            SELECT COALESCE(uses.relid IN (SELECT relid FROM tables), false) OR c.oid IN ({further}) AS published
            ) AS mine
          LEFT JOIN pg_catalog.pg_class AS tc ON tc.oid = uses.relid AND tc.relkind IN ('r', 'p')
          LEFT JOIN pg_catalog.pg_namespace AS tn ON tn.oid = tc.relnamespace
          LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tc.oid AND a.attnum = uses.attnum
         WHERE c.relkind = 'S' AND c.relpersistence <> 't'
           AND (mine.published OR NOT (c.oid IN (SELECT objid FROM extended) OR {_NOT_OURS}))
         ORDER BY c.oid, uses.owns DESC NULLS LAST, tn.nspname, tc.relname, a.attname
    """)  # noqa: S608
    found: dict[int, _Found] = {}
    whole = True
    for oid, namespace, name, readable, table_namespace, table, column, owns, mine, all_tables in rows:
        sequence = found.setdefault(int(oid or 0), _Found(TableName(namespace or "", name or ""), readable == "t"))
        sequence.published |= mine == "t"
        sequence.owned |= owns == "t"
        whole = all_tables == "t"
        if table is not None and column is not None:
            sequence.columns.setdefault((TableName(table_namespace or "", table), column), owns == "t")
    return found, whole


def _names(publications: Sequence[str]) -> str:
    return ", ".join(map(quote_literal, publications)) or "NULL"


async def _read(session: Session, found: dict[int, _Found]) -> list[PublishedSequence]:
    values = " UNION ALL ".join(
        f"SELECT {oid} AS oid, last_value, is_called FROM {each.name.quoted}"  # noqa: S608
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
