"""``schema_change = follow``: what the publisher's catalog says about the columns of Relation messages, and the plan for the target.

The comparison is :mod:`subscriber.transaction.column_history`, which also says what is certain. Each Relation message of a table whose
changes are applied is compared, also one that the publisher sends again. What is not certain is an error: ``alter --resync`` compares all
rows of the table with the publisher's.

The state to compare with is stored with the table in the target's catalog. It is learned when the table has been synchronized, or when
the setting is on for the first time, and holds for all transactions that are committed afterwards. For those before it, columns are matched
by name, and new ones are added as with ``schema_change = add``.

``ALTER COLUMN TYPE`` on the publisher may have had a USING clause, which its catalog does not keep. A change of type is followed if the
cast without USING gives the same values everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final, Self

from subscriber.errors import PublisherUnavailable, RelationError
from subscriber.interfaces import AddColumn, ChangeType, ColumnPlan, FollowingSink, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.protocol.quoting import quote_literal
from subscriber.subscription.run.tables.added_columns import LEFT_OUT, always_published
from subscriber.subscription.spec import RunSpec
from subscriber.transaction.column_history import Attribute, Attributes, ColumnChanges, KnownColumns, Uncertain, changed_columns, known_of
from subscriber.walreceiver.publication import published_names
from subscriber.walreceiver.session import Session

__all__ = ["FollowedColumns", "follows", "learn_columns"]

_log = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 5.0
"""How long the session stays open without a message."""
# Not pg_relation_filenode(): it may be later than the snapshot that the columns are read with. The LSN is read last, so that everything
# that the rows show was committed before it. A standby shows commits slightly before it reports them as replayed.
_ATTRIBUTES: Final = """
WITH listed AS MATERIALIZED (
    SELECT gpt.relid, {attributes} AS numbers
      FROM pg_catalog.pg_publication AS p, LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt
     WHERE p.pubname IN ({publications}) AND gpt.relid IN ({relations})
)
SELECT a.attrelid, a.attnum, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.xmin, a.attisdropped,
       COALESCE((SELECT pg_catalog.bool_and(CASE WHEN l.numbers IS NULL THEN a.attgenerated = ''
                                                 ELSE a.attnum = ANY (l.numbers::pg_catalog.int2vector::pg_catalog.int2[]) END)
                   FROM listed AS l WHERE l.relid = a.attrelid), a.attgenerated = ''),
       file.files
  FROM pg_catalog.pg_attribute AS a
  JOIN (SELECT c.oid, CASE WHEN c.relkind <> 'p' THEN c.relfilenode::pg_catalog.text ELSE COALESCE((
                   SELECT pg_catalog.md5(pg_catalog.string_agg(l.relfilenode::pg_catalog.text, ' ' ORDER BY t.relid))
                     FROM pg_catalog.pg_partition_tree(c.oid) AS t JOIN pg_catalog.pg_class AS l ON l.oid = t.relid
                    WHERE t.isleaf), '') END AS files
          FROM pg_catalog.pg_class AS c WHERE c.oid IN ({relations})) AS file ON file.oid = a.attrelid
 WHERE a.attrelid IN ({relations}) AND a.attnum > 0
 ORDER BY a.attrelid, a.attnum
"""
_END: Final = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery()
            THEN GREATEST(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
            ELSE pg_catalog.pg_current_wal_insert_lsn() END
"""
_VALUES: Final = """
SELECT a.attnum,
       CASE WHEN a.attcollation <> t.typcollation
            THEN pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname) END,
       leaf.missing, pg_catalog.pg_get_expr(d.adbin, d.adrelid), COALESCE(leaf.known, true), {published}
  FROM pg_catalog.pg_class AS c
  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum IN ({numbers}) AND NOT a.attisdropped
  JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_collation AS l ON l.oid = a.attcollation
  LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = l.collnamespace
  LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum AND a.attgenerated = '' AND a.attidentity = ''
 CROSS JOIN LATERAL (
    SELECT max((b.attmissingval::text::text[])[1]) AS missing,
           pg_catalog.bool_and(b.attmissingval IS NOT NULL OR pg_catalog.pg_relation_filenode(b.attrelid) = b.attrelid)
           AND count(DISTINCT b.attmissingval::text) < 2 AS known
      FROM pg_catalog.pg_attribute AS b
     WHERE b.attname = a.attname AND NOT b.attisdropped
       AND b.attrelid IN (SELECT c.oid WHERE c.relkind = 'r'
                          UNION ALL
                          SELECT tree.relid FROM pg_catalog.pg_partition_tree(c.oid) AS tree WHERE c.relkind = 'p' AND tree.isleaf)
 ) AS leaf
 WHERE c.oid = {relation_id:d}
"""
"""What rows have that were not written since a column was added. With partitions: if all of them agree."""


def follows(spec: RunSpec) -> bool:
    """Whether the columns of the target follow the publisher's."""
    return spec.settings.schema_change == "follow"


class FollowedColumns:
    """Compares Relation messages with the publisher's catalog. One session is open while they come, at most until the block ends.

    The block can be entered again.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._session: Session | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closing: asyncio.Future[None] | None = None
        self._said: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if (session := self._take()) is not None:
            await session.close()
        if self._closing is not None:
            await self._closing

    async def plan(self, relation: Relation, final_lsn: Lsn, known: KnownColumns | None) -> ColumnPlan:
        """Compare a Relation message: see :data:`subscriber.interfaces.ColumnPlanner`.

        Raises:
            RelationError: see there.
            PublisherError: the catalog cannot be read.
        """
        if known is None or final_lsn <= known.since:
            return ColumnPlan()
        session = self._take()
        if session is not None:
            with contextlib.suppress(PublisherUnavailable):
                # it may have been lost meanwhile
                return await self._planned(session, relation, final_lsn, known)
        return await self._planned(await self._spec.connect("schema"), relation, final_lsn, known)

    async def _planned(self, session: Session, relation: Relation, final_lsn: Lsn, known: KnownColumns) -> ColumnPlan:
        try:
            plan = await _plan(session, self._spec, relation, final_lsn, known)
            self._tell(relation, plan)
        except BaseException:
            await session.close()
            raise
        self._session = session
        self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._expire)
        return plan

    def _tell(self, relation: Relation, plan: ColumnPlan) -> None:
        said = [f'column "{name}" was dropped' for name in plan.dropped]
        said += [f'column "{old}" is "{new}" now' for old, new in (plan.renamed or {}).items()]
        said += [f'column "{each.name}" has type {each.new} now' for each in plan.retyped]
        said += [f'column "{each.name}" is new' for each in plan.added]
        text = f'table "{relation.namespace}.{relation.name}" was altered on the publisher: {", ".join(said)}'
        # each attempt asks again
        if said and self._said.get(relation.relation_id) != text:
            _log.warning("%s", text)
        self._said[relation.relation_id] = text

    def _take(self) -> Session | None:
        if self._idle is not None:
            self._idle.cancel()
        session, self._session, self._idle = self._session, None, None
        return session

    def _expire(self) -> None:
        if (session := self._take()) is not None:
            self._closing = asyncio.ensure_future(session.close())


async def _plan(session: Session, spec: RunSpec, relation: Relation, final_lsn: Lsn, known: KnownColumns) -> ColumnPlan:
    described = await _described(session, relation)
    catalog = (await _read(session, spec.publications, [relation.relation_id])).get(relation.relation_id)
    try:
        if catalog is None:
            raise Uncertain("the publisher has dropped the table")
        changes = changed_columns(known, catalog, described, final_lsn)
    except Uncertain as error:
        raise _uncertain(spec, relation, str(error)) from None
    added = await _added(session, spec, relation, known, changes) if changes.added else ()
    retyped = tuple(ChangeType(name, old, new) for name, (old, new) in (changes.retyped or {}).items())
    drop = spec.settings.dropped_columns == "drop"
    return ColumnPlan(changes.known, changes.dropped, changes.renamed, retyped, added, drop=drop)


async def learn_columns(spec: RunSpec, sink: FollowingSink) -> None:
    """Store the columns of tables that are synchronized, and whose columns are not known.

    Raises:
        SubscriberError: of the publisher or the target.
    """
    unknown = await sink.unknown_columns()
    if not unknown:
        return
    async with await spec.connect("schema") as session:
        published = await published_names(session, spec.publications, spec.options.mapping)
        wanted = {published[name]: name for name in unknown if name in published}
        found = await _read(session, spec.publications, list(wanted))
    await sink.store_columns({wanted[oid]: known_of(catalog) for oid, catalog in found.items()})


async def _read(session: Session, publications: Sequence[str], relations: Sequence[int]) -> Mapping[int, Attributes]:
    if not relations:
        return {}
    attributes = "gpt.attrs::pg_catalog.text" if session.capabilities.column_lists else "NULL::pg_catalog.text"
    rows = await session.execute(
        _ATTRIBUTES.format(
            attributes=attributes, publications=", ".join(map(quote_literal, publications)), relations=", ".join(map(str, relations))
        )
    )
    ((lsn,),) = await session.execute(_END)
    found: dict[int, list[Attribute]] = {}
    files: dict[int, str] = {}
    for oid, number, name, type_name, version, dropped, published, now in rows:
        attribute = Attribute(
            int(number or 0), name or "", type_name or "", int(version or 0), dropped=dropped == "t", published=published == "t"
        )
        found.setdefault(int(oid or 0), []).append(attribute)
        files[int(oid or 0)] = now or ""
    end = Lsn.parse(lsn or "0/0")
    return {oid: Attributes(oid, end, tuple(attributes), files[oid]) for oid, attributes in found.items()}


async def _described(session: Session, relation: Relation) -> list[tuple[str, str]]:
    if not relation.columns:
        return []
    types = ", ".join(f"pg_catalog.format_type({each.type_oid:d}, {each.type_modifier:d})" for each in relation.columns)
    rows = await session.execute(f"SELECT pg_catalog.unnest(ARRAY[{types}])")
    return [(column.name, name or "") for column, (name,) in zip(relation.columns, rows, strict=True)]


async def _added(session: Session, spec: RunSpec, relation: Relation, known: KnownColumns, changes: ColumnChanges) -> tuple[AddColumn, ...]:
    numbers = ", ".join(str(number) for number, _ in changes.added)
    query = _VALUES.format(numbers=numbers, relation_id=relation.relation_id, published=always_published(session, spec))
    rows = await session.execute(query)
    facts = {int(row[0] or 0): row for row in rows}
    # read after the values: a table that is rewritten in between loses them
    catalog = (await _read(session, spec.publications, [relation.relation_id])).get(relation.relation_id)
    rewritten = catalog is None or catalog.files != known.files
    types = {each.name: each.type for each in changes.known.columns}
    columns = []
    for number, name in changes.added:
        # the values of a column that was dropped since are not needed
        _, collation, missing, default, is_known, published = facts.get(number, (None, None, None, None, "t", "t"))
        why = None
        if published != "t":
            why = f'what existing rows have in the new column "{name}" is not known: {LEFT_OUT}'
        elif is_known != "t" and rewritten:
            why = f'the publisher has rewritten the table, so only its rows know what they have in the new column "{name}"'
        unknown = None if why is None else _uncertain(spec, relation, why)
        columns.append(AddColumn(name, types[name], collation, missing, default, unknown))
    return tuple(columns)


def _uncertain(spec: RunSpec, relation: Relation, why: str) -> RelationError:
    table = TableName(relation.namespace, relation.name)
    return RelationError(
        f'the columns of table "{table}" were changed on the publisher, and it is not certain how: {why}',
        hint=f"`subscriber alter {spec.name} --resync {table}` adds what is missing and compares all rows;"
        " a prepared transaction or a standby may only be late: then the next attempt succeeds",
        sqlstate="55000",
    )
