"""Columns that a published table has got, with ``schema_change = add`` or ``follow``: added to the table of a PostgreSQL target.

The stream names a new column and its type, and nothing else. The catalog of the publisher has the rest: collation, default, and what the
rows have that existed when the column was added (``attmissingval``), which PostgreSQL does not send. They get the same:

* The catalog has a missing value: that one. It never changes.
* It has none, and the table's file is the first one that it had: NULL. The table was never rewritten, so the rows were not either.
* Otherwise the table was rewritten, as by a volatile default or VACUUM FULL: only the rows themselves know.
* A column that was there before, and was left out by a column list or as a generated column, has values that were never sent. A list of now
  shows that, a publication that got the table after the table got the column, and a later column that the target has.
* The target has a column of this type that the publisher lacks: the new one may be this one, renamed.

What is not known is an error, and ``alter --resync`` adds the column and compares all rows. A table that is being synchronized gets its
rows anyway. NOT NULL is left out, as other constraints are: rows in the stream may be older than it.

A column that the publisher has dropped since is added with the type that the stream says. Source: tablecmds.c (ATExecAddColumn), heapam.c
(getmissingattr), PostgreSQL manual, 52.7 (pg_attribute).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import MissingColumns, RelationError, SubscriberError, TargetError
from subscriber.protocol.messages import Relation
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.targets import is_postgres
from subscriber.walreceiver.session import Session

__all__ = ["LEFT_OUT", "add_columns", "adds_columns", "always_published", "new_column_values", "schema_gap"]

_log = logging.getLogger(__name__)

_LOCK_SECONDS: Final = 5
"""How long other sessions may keep the table locked. Meanwhile, those that come later wait behind ALTER TABLE."""

_FACTS: Final = """
SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod),
       CASE WHEN a.attcollation <> t.typcollation
            THEN pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(l.collname) END,
       a.attmissingval::text, pg_catalog.pg_get_expr(d.adbin, d.adrelid), a.attnum::text, a.attisdropped::text,
       (c.relkind = 'r' AND pg_catalog.pg_relation_filenode(c.oid) = c.oid)::text,
       ({published})::text
  FROM pg_catalog.pg_class AS c
  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
  LEFT JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_collation AS l ON l.oid = a.attcollation
  LEFT JOIN pg_catalog.pg_namespace AS n ON n.oid = l.collnamespace
  LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum AND a.attgenerated = '' AND a.attidentity = ''
 WHERE c.oid = {relation_id:d}
"""
_PUBLISHED: Final = """a.attgenerated = '' AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_publication_rel AS r JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid
             WHERE p.pubname IN ({publications})
               AND (r.prrelid = c.oid OR r.prrelid IN (SELECT relid FROM pg_catalog.pg_partition_ancestors(c.oid)))
               AND (pg_catalog.to_jsonb(r) ->> 'prattrs' IS NOT NULL OR pg_catalog.age(r.xmin) < pg_catalog.age(a.xmin)))"""
_SCHEMAS: Final = """ AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_publication_namespace AS s JOIN pg_catalog.pg_publication AS p ON p.oid = s.pnpubid
             WHERE p.pubname IN ({publications}) AND s.pnnspid = c.relnamespace AND pg_catalog.age(s.xmin) < pg_catalog.age(a.xmin))"""
LEFT_OUT: Final = "it may have been left out of the publication"
_COERCIBLE: Final = (frozenset({25, 1043}), frozenset({650, 869}), frozenset({1560, 1562}))
"""``text`` and ``varchar``, ``cidr`` and ``inet``, ``bit`` and ``varbit``."""
_FIRST_USER_OID: Final = 16384
"""Types from here on have another oid in each database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewColumn:
    """One column, as the publisher's catalog has it now.

    Attributes:
        type: its name with a schema.
        collation: if it is not the type's.
        missing: what the rows have that existed when it was added, as an array of one text; None: there is no such value.
        default: the expression; None: there is none.
        unwritten: whether a row without a missing value has NULL.
        published: whether the column was published since it exists.
        renamed: whether the target may have it under another name.
    """

    type: str
    collation: str | None = None
    missing: str | None = None
    default: str | None = None
    unwritten: bool = True
    published: bool = True
    renamed: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it is known what rows have that were not written since."""
        return self.published and not self.renamed and (self.missing is not None or self.unwritten)

    def definition(self) -> str:
        """What follows the name in ADD COLUMN. All existing rows get the value without being written."""
        collation = "" if self.collation is None else f" COLLATE {self.collation}"
        # NULL, even if a domain has a default
        value = "NULL" if self.missing is None else f"({quote_literal(self.missing)}::pg_catalog.text[])[1]::{self.type}"
        return f"{self.type}{collation} DEFAULT {value}"

    @property
    def doubt(self) -> str:
        """Why it is not known."""
        if self.renamed:
            return "it may be a column that was renamed, because the target has one of its type that the publisher lacks"
        return "the publisher has rewritten the table" if self.published else LEFT_OUT

    def later(self, name: str) -> str:
        """What follows ALTER TABLE afterwards. Of ``varchar(9)``, NULL would be stored as a default."""
        return f"ALTER COLUMN {name} DROP DEFAULT" if self.default is None else f"ALTER COLUMN {name} SET DEFAULT {self.default}"


def always_published(session: Session, spec: RunSpec) -> str:
    """A condition in SQL over ``pg_class`` c and ``pg_attribute`` a: changes have the column since it exists."""
    condition = _PUBLISHED + (_SCHEMAS if session.capabilities.column_lists else "")
    return condition.format(publications=", ".join(map(quote_literal, spec.publications)))


def adds_columns(spec: RunSpec) -> bool:
    """Whether missing columns are added here. Other kinds of targets do it themselves."""
    return spec.settings.schema_change in ("add", "follow") and spec.target is not None and is_postgres(spec.target)


async def add_columns(spec: RunSpec, missing: MissingColumns, *, synchronized: bool) -> None:
    """Add columns to a table of the target. Those that exist are left as they are.

    Args:
        spec: the subscription.
        missing: the columns.
        synchronized: whether the table has its rows.

    Raises:
        RelationError: what the table's rows have is not known, or the target's role may not do it.
        PublisherError: the catalog cannot be read.
        TargetError: the columns cannot be added.
    """
    table = f"{quote_identifier(missing.namespace)}.{quote_identifier(missing.name)}"
    async with await spec.connect("schema") as session:
        columns = await _columns(session, spec, missing)
    if synchronized:
        _require_known(spec, missing, columns)
    await _alter(spec, table, columns)
    for name in columns:
        _log.warning('column "%s" was added to table "%s.%s" of the target', name, missing.namespace, missing.name)


async def new_column_values(spec: RunSpec, relation: Relation, names: Sequence[str]) -> Mapping[str, str | None]:
    """What rows have in new columns: see :data:`subscriber.interfaces.NewColumnValues`.

    Raises:
        RelationError: see there.
        PublisherError: the catalog cannot be read.
    """
    lacking = tuple((each.name, each.type_oid, each.type_modifier) for each in relation.columns if each.name in names)
    present = tuple((each.name, each.type_oid) for each in relation.columns if each.name not in names)
    missing = MissingColumns(relation.relation_id, relation.namespace, relation.name, lacking, present)
    async with await spec.connect("schema") as session:
        columns = await _columns(session, spec, missing)
        _require_known(spec, missing, columns)
        found: dict[str, str | None] = {}
        for name, column in columns.items():
            ((found[name],),) = await session.execute(f"SELECT ({quote_literal(column.missing or '{}')}::pg_catalog.text[])[1]")
    return found


def _require_known(spec: RunSpec, missing: MissingColumns, columns: Mapping[str, NewColumn]) -> None:
    for name, column in columns.items():
        if not column.is_known:
            raise RelationError(
                f'table "{missing.namespace}.{missing.name}" of the target lacks column "{name}", and what its rows have there is not'
                f" known: {column.doubt}",
                hint=("rename that column, or drop it if the publisher has dropped it; or " if column.renamed else "")
                + f"`subscriber alter {spec.name} --resync {missing.namespace}.{missing.name}` adds the column and compares all rows",
                sqlstate="55000",
            )


async def schema_gap(spec: RunSpec, missing: MissingColumns) -> str | None:
    """Why rows that exist may have other values than NULL in new columns of a published table. None: they have NULL.

    Raises:
        PublisherError: the catalog cannot be read.
    """
    if not missing.columns:
        return None
    async with await spec.connect("schema") as session:
        columns = await _columns(session, spec, missing)
    for name, column in columns.items():
        if column.missing is not None:
            return f'earlier rows have the default of column "{name}", which is not sent'
        if not column.is_known:
            return f'what earlier rows have in column "{name}" is not sent: {column.doubt}'
    return None


async def _columns(session: Session, spec: RunSpec, missing: MissingColumns) -> dict[str, NewColumn]:
    rows = await session.execute(_FACTS.format(relation_id=missing.relation_id, published=always_published(session, spec)))
    mapping, table = spec.options.mapping, (missing.namespace, missing.name)
    own = next(iter(mapping.sources(table)), table)
    live = {mapping.column(own, row[0] or ""): row for row in rows if row[6] == "false"}
    last = max((int(row[5] or 0) for name, row in live.items() if name in dict(missing.present)), default=0)
    others = {type_oid for name, type_oid in missing.present if name not in live}
    columns: dict[str, NewColumn] = {}
    for name, type_oid, modifier in missing.columns:
        if name not in live:
            ((type_name,),) = await session.execute(f"SELECT pg_catalog.format_type({type_oid:d}, {modifier:d})")
            # if it was not dropped, it was renamed, or this server is a standby that lags behind
            dropped = not rows or any(row[6] == "true" and int(row[5] or 0) > last for row in rows)
            columns[name] = NewColumn(type=type_name or "", unwritten=dropped)
            continue
        _, type_name, collation, value, default, number, _, unwritten, published = live[name]
        columns[name] = NewColumn(
            type=type_name or "",
            collation=collation,
            missing=value,
            default=default,
            unwritten=unwritten == "true",
            published=published == "true" and int(number or 0) > last,
            renamed=any(_may_be(other, type_oid) for other in others),
        )
    return columns


def _may_be(old: int, new: int) -> bool:
    """Whether a column of a type may have another one now, and its table was not rewritten."""
    return old == new or min(old, new) >= _FIRST_USER_OID or any({old, new} <= types for types in _COERCIBLE)


def _statements(table: str, columns: Mapping[str, NewColumn]) -> Iterator[str]:
    for name, column in columns.items():
        yield f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {quote_identifier(name)} {column.definition()}"
        if column.default is None:
            yield f"ALTER TABLE {table} {column.later(quote_identifier(name))}"


async def _alter(spec: RunSpec, table: str, columns: Mapping[str, NewColumn]) -> None:
    from subscriber.sinks.postgres.scripts import ScriptSession  # noqa: PLC0415 -- its drivers come with an extra

    assert spec.target is not None
    statements = "; ".join(_statements(table, columns))
    async with await ScriptSession.open(spec.target, "subscriber schema") as session:
        limit = f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"
        try:
            await session.run(f"{limit}; {statements}")
        except TargetError as error:
            if error.sqlstate == "42501":
                error.hint = f"let the role own the table, or execute: {statements}"
            raise
        for name, column in columns.items():
            if column.default is None:
                continue
            try:
                await session.run(f"{limit}; ALTER TABLE {table} {column.later(quote_identifier(name))}")
            except SubscriberError as error:
                # it may need a sequence or a function that the target lacks; no replicated row needs it
                _log.warning('the default of column "%s" of table %s was not set: %s', name, table, error.one_line())
