"""Creates the publication of a migration, and adds the tables that are created later.

A publication of all tables publishes new ones by itself. One with a list of tables does not: if a migration created it, which its comment
says, the migration adds them. Publications that the user created are left as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.config.table_names import pattern_parts
from subscriber.errors import ConfigurationError, PublisherError, raise_all
from subscriber.interfaces import CATALOG_SCHEMA
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.publication import missing_publications
from subscriber.walreceiver.session import Session

__all__ = ["TableChoice", "ensure_publication", "extend_publication", "pattern_condition", "planned_tables", "published_oids"]

_OURS: Final = "created by subscriber migrate, which adds new tables"
_DENIED: Final = "42501"
_DROPPED: Final = frozenset({"3F000", "42P01"})
"""The SQLSTATEs of a schema and of a table that do not exist."""
_OF_EXTENSION: Final = """EXISTS (
        SELECT FROM pg_catalog.pg_depend AS d
         WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')"""
_OWN_SCHEMAS: Final = f"""c.relpersistence = 'p' AND n.nspname NOT IN ('pg_catalog', 'information_schema', {quote_literal(CATALOG_SCHEMA)})
   AND n.nspname !~ '^pg_'"""
_TABLES: Final = f"""
SELECT c.oid, CASE WHEN c.relispartition THEN (SELECT i.inhparent FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = c.oid) END,
       n.nspname, c.relname, c.relkind, {_OF_EXTENSION}, {{chosen}}, {{excluded}}
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND {_OWN_SCHEMAS}
 ORDER BY 3, 4
"""  # noqa: S608
_ANY: Final = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                WHERE c.relkind IN ('r', 'p') AND {})
"""
# without a replica identity, the publisher itself rejects each UPDATE and DELETE of a published table; a deferrable key is none
_KEYLESS: Final = f"""
SELECT c.oid, n.nspname, c.relname,
       (SELECT x.relname FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS x ON x.oid = i.indexrelid
         WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
           AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute AS a
                            WHERE a.attrelid = c.oid AND a.attnum = ANY ((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts - 1])
                              AND NOT a.attnotnull)
         ORDER BY i.indnkeyatts, x.relname LIMIT 1)
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND {_OWN_SCHEMAS}
   AND c.oid IN ({{oids}}) AND (c.relreplident = 'n' OR (c.relreplident IN ('d', 'i') AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_index AS i WHERE i.indrelid = c.oid AND i.indimmediate
           AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)))
 ORDER BY 2, 3
"""  # noqa: S608
# the changes of a partition are those of a published table, too
_PUBLISHED: Final = """
SELECT COALESCE(leaf.relid::pg_catalog.oid, gpt.relid)
  FROM pg_catalog.pg_publication AS p CROSS JOIN LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt
  LEFT JOIN LATERAL pg_catalog.pg_partition_tree(gpt.relid) AS leaf ON true
 WHERE p.pubname IN ({names})
"""
_CHANGED: Final = f"{_PUBLISHED} AND (p.pubupdate OR p.pubdelete)"
_IS_OURS: Final = (
    "SELECT FROM pg_catalog.pg_publication AS p WHERE p.pubname = {} AND NOT p.puballtables AND pg_catalog.obj_description(p.oid) = {}"
)


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Patterns of tables. Empty: all tables.

    Attributes:
        tables: only tables that match one of these.
        exclude_tables: not these. They win.
    """

    tables: Sequence[str] = ()
    exclude_tables: Sequence[str] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.tables, *self.exclude_tables):
            pattern_condition(pattern)

    @property
    def is_all(self) -> bool:
        """Whether nothing was chosen."""
        return not (self.tables or self.exclude_tables)


def pattern_condition(pattern: str) -> str:
    """SQL of whether a relation ``c`` of a schema ``n`` matches.

    Raises:
        ConfigurationError: it has no name, or more than one dot.
    """
    parts = pattern_parts(pattern)
    conditions = [f"c.relname OPERATOR(pg_catalog.~) {_regex(parts[-1])}"]
    if len(parts) == 2:
        conditions.append(f"n.nspname OPERATOR(pg_catalog.~) {_regex(parts[0])}")
    return f"({' AND '.join(conditions)})"


def _regex(text: str) -> str:
    return f'{quote_literal(f"^({text})$")} COLLATE pg_catalog."default"'


@dataclass(frozen=True, slots=True)
class _Table:
    """A table that could be published. ``parent`` is the oid of the table that it is a partition of."""

    oid: str
    parent: str | None
    namespace: str
    name: str
    kind: str
    of_extension: bool
    chosen: bool
    excluded: bool

    def __str__(self) -> str:
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}"

    @property
    def listed(self) -> str:
        """The table in FOR TABLE. Children of a partitioned table are its partitions; others are chosen one by one."""
        return f"{'ONLY ' if self.kind == 'r' else ''}{self}"


def published_oids(publications: Sequence[str]) -> str:
    """SQL of the oids of the tables of these publications, and of their partitions."""
    return _PUBLISHED.format(names=", ".join(map(quote_literal, publications)) or "NULL")


async def ensure_publication(session: Session, name: str, choice: TableChoice, *, resumed: bool = False) -> list[str]:
    """Create a publication, if there is none of this name.

    Tables of extensions are left out: CREATE EXTENSION makes them in the target, often with rows.

    Args:
        session: with the publisher.
        name: of the publication.
        choice: of its tables; for one that exists and that no migration created, nothing may be chosen.
        resumed: whether its tables are followed already. Those without a replica identity are left to :func:`extend_publication` then.

    Returns:
        What was done, for people.

    Raises:
        ConfigurationError: a table has no replica identity; no table matches; the publication exists, and its tables cannot be chosen.
        PublisherError: the role may not create it.
    """
    exists = not await missing_publications(session, [name])
    if exists and not choice.is_all and not await _is_ours(session, name):
        raise ConfigurationError(
            f'publication "{name}" exists: its tables cannot be chosen by --table and --exclude-table',
            hint="name another publication, which is created, or omit these options",
        )
    if exists:
        if not resumed:
            await _require_identities(session, _changed(name))
        # later, the migration asks for the identities of those that could not be added
        return [f'publication "{name}" exists', *(await extend_publication(session, name, choice))[0]]
    tables = await _tables(session, choice)
    listed = await _chosen(session, tables, choice)
    everything = choice.is_all and not any(table.of_extension for table in tables.values())
    await _require_identities(session, _members(tables, listed))
    what = "ALL TABLES" if everything else f"TABLE {', '.join(table.listed for table in listed)}" if listed else ""
    # one query is one transaction: without its comment, tables that are created later would not be added
    comment = f"COMMENT ON PUBLICATION {quote_identifier(name)} IS {quote_literal(_OURS)}"
    await _create(session, f"CREATE PUBLICATION {quote_identifier(name)}{f' FOR {what}' if what else ''}; {comment}", everything=everything)
    extensions = [table for table in tables.values() if table.of_extension]
    lines = [f'publication "{name}" created']
    if not choice.is_all:
        lines = [f'publication "{name}" created for {len(listed):,} of {sum(table.parent is None for table in tables.values()):,} tables']
    elif extensions:
        example = f"{extensions[0].namespace}.{extensions[0].name}"
        lines = [f'publication "{name}" created, without the tables of extensions, such as "{example}"']
    return lines


async def planned_tables(session: Session, name: str, choice: TableChoice) -> tuple[str, list[ConfigurationError]]:
    """What :func:`ensure_publication` would publish, without a change.

    Returns:
        The oids of the tables in SQL, and an error for each table without a replica identity.

    Raises:
        ConfigurationError: no table matches.
    """
    if not await missing_publications(session, [name]):
        return published_oids([name]), list((await _lacking_identities(session, _changed(name))).values())
    tables = await _tables(session, choice)
    members = _members(tables, await _chosen(session, tables, choice))
    return members, list((await _lacking_identities(session, members)).values())


async def extend_publication(session: Session, name: str, choice: TableChoice) -> tuple[list[str], list[ConfigurationError]]:
    """Add tables that were created since, if a migration has created the publication, with a list of tables.

    Returns:
        What was done, for people, and an error for each table that has no replica identity: it was not added, or is published already.

    Raises:
        PublisherError: the role may not alter it.
    """
    if not await _is_ours(session, name):
        return [], list((await _lacking_identities(session, _changed(name))).values())
    while True:
        published = {oid or "" for (oid,) in await session.execute(published_oids([name]))}
        tables = await _tables(session, choice)
        known = published | {parent for oid in published for parent in (_lineage(tables[oid], tables) if oid in tables else ())}
        new = [table for table in _listed(tables) if table.oid not in known]
        lacking = await _lacking_identities(session, _members(tables, new))
        unfit = {parent for oid in lacking for parent in _lineage(tables[oid], tables)}
        added = [table for table in new if table.oid not in unfit]
        try:
            if added:
                await session.execute(f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {', '.join(table.listed for table in added)}")
        except PublisherError as error:
            # dropped since the query: a table that exists for a moment only
            if error.sqlstate not in _DROPPED:
                raise
            continue
        lines = [f'table "{table.namespace}.{table.name}" was added to publication "{name}"' for table in added]
        return lines, [_left_out(tables[oid], error.hint or "") for oid, error in lacking.items()]


def _changed(name: str) -> str:
    return _CHANGED.format(names=quote_literal(name))


def _left_out(table: _Table, identity: str) -> ConfigurationError:
    message = (
        f'table "{table.namespace}.{table.name}" was created meanwhile, and has no replica identity: it is not published, and not moved'
    )
    return ConfigurationError(message, hint=f"{identity} or drop it, or leave it out: --exclude-table {shlex.quote(str(table))}")


async def _is_ours(session: Session, name: str) -> bool:
    return bool(await session.execute(_IS_OURS.format(quote_literal(name), quote_literal(_OURS))))


async def _tables(session: Session, choice: TableChoice) -> Mapping[str, _Table]:
    matching = [" OR ".join(map(pattern_condition, patterns)) for patterns in (choice.tables, choice.exclude_tables)]
    rows = await session.execute(_TABLES.format(chosen=matching[0] or "true", excluded=matching[1] or "false"))
    return {
        oid or "": _Table(oid or "", parent, schema or "", name or "", kind or "", of_extension == "t", chosen == "t", excluded == "t")
        for oid, parent, schema, name, kind, of_extension, chosen, excluded in rows
    }


def _lineage(table: _Table, tables: Mapping[str, _Table]) -> Sequence[str]:
    """The table, and those that it is a partition of, as oids."""
    found = [table.oid]
    while (parent := tables[found[-1]].parent) in tables:
        found.append(parent or "")
    return found


def _listed(tables: Mapping[str, _Table]) -> Iterator[_Table]:
    """The chosen tables. A partitioned table stands for its partitions if all of them are chosen."""

    def is_chosen(table: _Table) -> bool:
        line = [tables[oid] for oid in _lineage(table, tables)]
        return any(each.chosen for each in line) and not any(each.excluded or each.of_extension for each in line)

    left_out = {oid for table in tables.values() if not is_chosen(table) for oid in _lineage(table, tables)}
    for table in tables.values():
        if table.oid not in left_out and (table.parent is None or table.parent in left_out):
            yield table


async def _chosen(session: Session, tables: Mapping[str, _Table], choice: TableChoice) -> list[_Table]:
    """The tables of a publication that is created.

    Raises:
        ConfigurationError: a pattern matches no table at all: it is probably misspelled.
    """
    errors = []
    for option, patterns in (("--table", choice.tables), ("--exclude-table", choice.exclude_tables)):
        for pattern in patterns:
            ((found,),) = await session.execute(_ANY.format(pattern_condition(pattern)))
            if found != "t":
                errors.append(ConfigurationError(f"no table matches {pattern}", hint=f"correct {option}"))
    raise_all(errors)
    listed = list(_listed(tables))
    if choice.tables and not listed:
        raise ConfigurationError(f"no table matches {' or '.join(choice.tables)}", hint="correct --table")
    return listed


def _members(tables: Mapping[str, _Table], listed: Sequence[_Table]) -> str:
    """The tables that hold the rows of these tables, as oids in SQL."""
    roots = {table.oid for table in listed}
    return ", ".join(table.oid for table in tables.values() if table.kind == "r" and not roots.isdisjoint(_lineage(table, tables))) or "0"


async def _require_identities(session: Session, oids: str) -> None:
    """Check that the publisher accepts updates and deletes of tables that are published.

    Raises:
        ConfigurationError: one for each table that has no replica identity.
    """
    raise_all(list((await _lacking_identities(session, oids)).values()))


async def _lacking_identities(session: Session, oids: str) -> dict[str, ConfigurationError]:
    """An error for each table without a replica identity, by oid."""
    errors = {}
    for oid, namespace, name, index in await session.execute(_KEYLESS.format(oids=oids)):
        table = f"{quote_identifier(namespace or '')}.{quote_identifier(name or '')}"
        identity = "FULL" if index is None else f"USING INDEX {quote_identifier(index)}"
        errors[oid or ""] = ConfigurationError(
            f'table "{namespace}.{name}" has no replica identity: once published, its UPDATE and DELETE fail on the publisher',
            hint=f"ALTER TABLE {table} REPLICA IDENTITY {identity};",
        )
    return errors


async def _create(session: Session, sql: str, *, everything: bool) -> None:
    try:
        await session.execute(sql)
    except PublisherError as error:
        if error.sqlstate == _DENIED and everything:
            error.hint = "only a superuser may publish all tables: let one create the publication, and name it with --publication"
        elif error.sqlstate == _DENIED:
            error.hint = "let the owner of the tables create the publication, and name it with --publication"
        raise
