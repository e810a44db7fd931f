"""The published tables for a PostgreSQL target in which they have other names (:mod:`subscriber.config.mapping`), as entries to restore.

pg_dump has no other names, and the texts of views and functions name tables. So the statements are made from the publisher's catalog, as
for other kinds of targets: tables with their columns, keys, indexes, constraints and sequences. pg_dump gives what these need, such as
types and functions. A table is created by one entry together with its sequences, its defaults, and the key by which changes are applied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from subscriber.config.mapping import TableMapping
from subscriber.config.table_names import written_name
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.interfaces.table_schema import DatabaseSchema, SchemaDifference, SequenceSchema, TableSchema
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.schema.archive import Entry
from subscriber.schema.differences import column_sql, differences
from subscriber.schema.inspection import SchemaScope, inspect
from subscriber.schema.mapped_schema import mapped_schema, mentions, used_sequences, with_names_of_sequences
from subscriber.sinks.postgres.scripts import ScriptSession
from subscriber.walreceiver.mapped_tables import mapped_names
from subscriber.walreceiver.publication import published_names
from subscriber.walreceiver.session import Session

__all__ = ["mapped_entries"]

_BY_HAND: Final = (
    "create it by hand: pg_dump --schema-only --table prints its statements; then `subscriber schema diff --ddl` shows what it lacks"
)
_RELATIONS: Final = frozenset({"TABLE", "SEQUENCE", "VIEW", "MATERIALIZED VIEW", "FOREIGN TABLE"})
_OF_TABLES: Final = frozenset({"DEFAULT", "CONSTRAINT", "CHECK CONSTRAINT", "INDEX"})
_ADDED: Final = frozenset({"key", "index", "constraint"})
_SCHEMAS: Final = "SELECT nspname::text FROM pg_catalog.pg_namespace"
# all names that a new relation cannot have; for an index, with its table
_TAKEN: Final = """
SELECT n.nspname::text, c.relname::text, t.relname::text FROM pg_catalog.pg_class AS c
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_index AS i ON i.indexrelid = c.oid LEFT JOIN pg_catalog.pg_class AS t ON t.oid = i.indrelid
 WHERE n.nspname IN ({})
"""
_LONGEST: Final = 63
# what the model of a schema does not have: partitions, parents, and the index of a replica identity
_FACTS: Final = """
SELECT n.nspname::text, c.relname::text, c.relispartition::text, (c.relkind = 'p')::text,
       (SELECT x.relname::text FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS x ON x.oid = i.indexrelid
         WHERE i.indrelid = c.oid AND i.indisreplident AND c.relreplident = 'i'),
       EXISTS (SELECT FROM pg_catalog.pg_inherits AS h WHERE h.inhrelid = c.oid)::text
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE {}
"""


async def mapped_entries(
    publisher: Session,
    target: ScriptSession,
    dumped: Sequence[Entry],
    mapping: TableMapping,
    *,
    publications: Sequence[str],
    tables: Collection[TableName] = (),
) -> tuple[list[Entry], list[str]]:
    """Return what the target lacks of the published tables, and a line for what is left out.

    Args:
        publisher: a session.
        target: a session with an empty search_path.
        dumped: the whole schema, from pg_dump.
        mapping: gives names to tables and columns.
        publications: whose tables are created.
        tables: only these, and only those of them that the target lacks; names of the publisher. Empty: all, with what existing ones lack.

    Raises:
        ConfigurationError: a table cannot be created with other names.
        PublisherError, TargetError: a catalog cannot be read.
    """
    names = mapped_names(await published_names(publisher, publications), mapping)
    chosen = [name for name in names.values() if not tables or name in tables]
    source, lines = _without_foreign(await _inspected(publisher, chosen), set(names.values()))
    keys, partitioned = await _facts(publisher, source, mapping)
    _require_columns(source, mapping)
    wanted = mapped_schema(source, mapping)
    lines += [*partitioned, *_left_out(source, wanted, mapping)]
    found = await inspect(target.query, SchemaScope(tables=[*wanted.tables, *map(_beside, wanted.sequences)]))
    wanted, keys = _named_alone(wanted, keys, found, await _taken(target, wanted))
    sequences = {each.name for each in found.sequences}
    begun = {name: _begun(table, keys.get(name)) for name, table in wanted.tables.items() if name not in found.tables}
    entries = _needed(dumped, {name.pair for name in chosen})
    first = max((entry.number for entry in dumped), default=0) + 1
    numbers = {name: first + place for place, name in enumerate(wanted.tables)}
    schemas = {name or "" for (name,) in await target.query(_SCHEMAS)} | {entry.name for entry in entries if entry.type == "SCHEMA"}
    for schema in dict.fromkeys(name.namespace for name in (*begun, *(each.name for each in wanted.sequences))):
        if schema not in schemas:
            entries.append(_entry(0, "SCHEMA", TableName("-", schema), [f"CREATE SCHEMA {quote_identifier(schema)};"]))
    for name, table in begun.items():
        used = used_sequences(table)
        own = [each for each in wanted.sequences if (each.owner and each.owner[0] == name) or each.name in used]
        new = [each for each in own if each.name not in sequences]
        sequences |= {each.name for each in new}
        statements = _statements(table, DatabaseSchema(tables={name: table}, sequences=tuple(new)), keys.get(name))
        entries.append(_entry(numbers[name], "TABLE", name, statements))
    existing = {name: table for name, table in found.tables.items() if not tables}
    for each in differences(wanted, DatabaseSchema(tables={**existing, **begun}, sequences=found.sequences)):
        # what differs is left as it is
        if each.kind in _ADDED and not each.extra and len(each.ddl) == 1:
            entries.append(_of_table(each, numbers, wanted))
    last = max(numbers.values(), default=first)
    return [replace(entry, number=last + 1 + place) if entry.number == 0 else entry for place, entry in enumerate(entries)], lines


async def _inspected(publisher: Session, tables: Collection[TableName]) -> DatabaseSchema:
    """The tables, with the sequences that their columns own or use."""
    found = await inspect(publisher.execute, SchemaScope(tables=tables))
    known = {each.name for each in found.sequences}
    used = {each for table in found.tables.values() for each in used_sequences(table)} - known
    if not used:
        return found
    found = await inspect(publisher.execute, SchemaScope(tables=[*tables, *used]))
    # one that belongs to another table belongs to none in the target
    sequences = (each if each.owner is None or each.owner[0] in found.tables else replace(each, owner=None) for each in found.sequences)
    return replace(found, sequences=tuple(sequences))


async def _facts(publisher: Session, source: DatabaseSchema, mapping: TableMapping) -> tuple[Mapping[TableName, str], list[str]]:
    """The index of the replica identity by the target's table, where it is not the primary key; and a line for each partitioned table."""
    keys, lines = dict[TableName, str](), list[str]()
    if not source.tables:
        return keys, lines
    for schema, name, partition, partitioned, index, inherits in await publisher.execute(
        _FACTS.format(SchemaScope(tables=source.tables).condition("n", "c"))
    ):
        table = TableName(schema or "", name or "")
        target = TableName(*mapping.target(table.pair))
        if partition == "true":
            raise ConfigurationError(
                f'table "{table}" is a partition: it cannot be created under other names',
                hint=f"publish its table instead (publish_via_partition_root), or {_BY_HAND}",
            )
        if partitioned == "true":
            lines.append(f'table "{table}" is partitioned on the publisher: "{target}" is a table without partitions')
        elif inherits == "true":
            lines.append(
                f'table "{table}" inherits from another one on the publisher: "{target}" does not, and has no constraints of that one'
            )
        if index:
            keys[target] = index
    return keys, lines


def _require_columns(source: DatabaseSchema, mapping: TableMapping) -> None:
    """Check that the columns exist, and that no generated one is made of columns that have other names in the target, or are left out."""
    for name, table in source.tables.items():
        mapping.require_columns(name.pair, [column.name for column in table.columns])
        kept = mapping.kept(name.pair, [column.name for column in table.columns])
        changed = [
            column.name for column in table.columns if column.name not in kept or mapping.column(name.pair, column.name) != column.name
        ]
        for column in table.columns:
            if column.generated and column.name in kept and mentions(column.default or "", changed):
                raise ConfigurationError(
                    f"column {column.name} of table {written_name(name.pair)} is generated from columns that columns or rename change",
                    hint=f"leave it out of columns, or {_BY_HAND}",
                )


def _without_foreign(schema: DatabaseSchema, published: set[TableName]) -> tuple[DatabaseSchema, list[str]]:
    """Leave out foreign keys that refer to tables that are not published: the target may not have them, or not their rows."""
    tables, lines = dict[TableName, TableSchema](), list[str]()
    for name, table in schema.tables.items():
        others = [each for each in table.constraints if each.references is not None and each.references not in published]
        lines += [
            f'foreign key "{each.name}" of table "{name}" refers to "{each.references}", whose rows are not replicated: it is left out'
            for each in others
        ]
        tables[name] = replace(table, constraints=tuple(each for each in table.constraints if each not in others))
    return replace(schema, tables=tables), lines


async def _taken(target: ScriptSession, wanted: DatabaseSchema) -> dict[TableName, TableName | None]:
    """The relations in the target's schemas; an index with its table."""
    schemas = sorted({name.namespace for name in (*wanted.tables, *map(_beside, wanted.sequences))})
    found = await target.query(_TAKEN.format(", ".join(map(quote_literal, schemas)))) if schemas else []
    return {TableName(schema or "", name or ""): TableName(schema or "", table) if table else None for schema, name, table in found}


def _named_alone(
    schema: DatabaseSchema, keys: Mapping[TableName, str], found: DatabaseSchema, taken: dict[TableName, TableName | None]
) -> tuple[DatabaseSchema, Mapping[TableName, str]]:
    """Give names to sequences, keys and indexes that no other relation of the target's schema has. All of a schema are in one list.

    Args:
        schema: with the target's names of tables.
        keys: the index of the replica identity by the table.
        found: the target's schema.
        taken: the names that the target has, with the table of an index.
    """
    for name in (*schema.tables, *(each.name for each in schema.sequences if each.owner is None)):
        taken.setdefault(name, None)
    there = {each.owner: each.name for each in found.sequences}
    sequences = list[SequenceSchema]()
    for sequence in schema.sequences:
        if sequence.owner is not None:
            name = there.get(sequence.owner) or _free(_beside(sequence), taken)
            taken.setdefault(name, None)
            sequences.append(replace(sequence, name=name))
    schema = with_names_of_sequences(schema, DatabaseSchema(tables={}, sequences=tuple(sequences)))
    tables, renamed = dict[TableName, TableSchema](), dict(keys)

    def free(each: str, table: TableName) -> str:
        name = TableName(table.namespace, each)
        if taken.get(name) != table:
            name = _free(name, taken)
            taken[name] = table
        if keys.get(table) == each:
            renamed[table] = name.name
        return name.name

    for name, table in schema.tables.items():
        constraints = [replace(each, name=free(each.name, name)) if each.kind in "pux" else each for each in table.constraints]
        indexes = [replace(each, name=free(each.name, name)) for each in table.indexes]
        tables[name] = replace(table, constraints=tuple(constraints), indexes=tuple(indexes))
    return replace(schema, tables=tables), renamed


def _free(name: TableName, taken: Collection[TableName]) -> TableName:
    """The name, or the same with a number, as PostgreSQL chooses one."""
    found, number = name, 0
    while found in taken:
        number += 1
        kept = name.name.encode()[: _LONGEST - len(str(number))].decode(errors="ignore")
        found = TableName(name.namespace, f"{kept}{number}")
    return found


def _beside(sequence: SequenceSchema) -> TableName:
    """The name of a sequence. PostgreSQL requires one that a column owns to be in the schema of the table."""
    return sequence.name if sequence.owner is None else TableName(sequence.owner[0].namespace, sequence.name.name)


def _left_out(source: DatabaseSchema, wanted: DatabaseSchema, mapping: TableMapping) -> Iterator[str]:
    """A line for each constraint and index that cannot have the target's names of columns."""
    for name, table in source.tables.items():
        there = wanted.tables[TableName(*mapping.target(name.pair))]
        for what, here, other in (("constraint", table.constraints, there.constraints), ("index", table.indexes, there.indexes)):
            kept = {each.name for each in other}
            for each in here:
                if each.name not in kept:
                    yield f'{what} "{each.name}" of table "{there.name}" is left out: it may use a column that columns or rename change'


def _begun(table: TableSchema, key: str | None) -> TableSchema:
    """The table as it is before the rows are copied: with the keys by which changes are applied."""
    return replace(
        table,
        constraints=tuple(each for each in table.constraints if each.kind == "p" or each.name == key),
        indexes=tuple(each for each in table.indexes if each.name == key),
    )


def _statements(table: TableSchema, schema: DatabaseSchema, key: str | None) -> list[str]:
    """The statements that create a table and new sequences. ``schema`` has both."""
    bare = tuple(replace(each, default=each.default if each.generated else None, comment=None) for each in table.columns)
    options = {each.owner: each for each in schema.sequences}
    columns = []
    for column in bare:
        sequence = options.get((table.name, column.name)) if column.identity else None
        # the type is that of the column
        named = sequence and f" (SEQUENCE NAME {sequence.name.quoted} INCREMENT {sequence.options.partition(' INCREMENT ')[2]})"
        columns.append(column_sql(column, named or ""))
    empty = replace(table, columns=bare, constraints=(), indexes=(), replica_identity="d", comment=None)
    found = differences(schema, DatabaseSchema(tables={table.name: empty}))
    name = table.name.quoted
    create = f"CREATE TABLE {name} ({', '.join(columns)});"
    identity = [f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX {quote_identifier(key)};"] if key else []
    sequences = [statement for each in found if each.kind == "sequence" for statement in each.ddl]
    return [*sequences, create, *(statement for each in found if each.kind != "sequence" for statement in each.ddl), *identity]


def _of_table(each: SchemaDifference, numbers: Mapping[TableName, int], wanted: DatabaseSchema) -> Entry:
    """A key, an index or a constraint."""
    table = wanted.tables[each.name]
    kind, needed = "INDEX" if each.kind == "index" else "CONSTRAINT", {each.name}
    if " FOREIGN KEY " in each.ddl[0]:
        kind = "FK CONSTRAINT"
        needed |= {other for found in table.constraints if (other := found.references) is not None and other in numbers}
    return replace(_entry(0, kind, each.name, each.ddl), needs=frozenset(numbers[name] for name in needed), before_data=False)


def _entry(number: int, kind: str, name: TableName, statements: Sequence[str]) -> Entry:
    return Entry(
        number=number,
        type=kind,
        schema=name.namespace,
        name=name.name,
        owner="",
        sql="\n".join(statements),
        needs=frozenset(),
        before_data=True,
        lacking=kind != "SCHEMA",
    )


def _needed(entries: Sequence[Entry], names: Collection[tuple[str, str]]) -> list[Entry]:
    """What tables need that is no relation: types, functions, extensions, collations, with their schemas."""
    wanted = {entry.number for entry in entries if entry.type == "TABLE" and (entry.schema, entry.name) in names}
    wanted |= {entry.number for entry in entries if entry.type in _OF_TABLES and entry.needs & wanted}
    for entry in reversed(entries):
        if entry.number in wanted:
            wanted |= entry.needs
    relations = set[int]()
    for entry in entries:
        if entry.type in _RELATIONS or entry.needs & relations:
            relations.add(entry.number)
    kept = [entry for entry in entries if entry.number in wanted - relations]
    schemas = {entry.schema for entry in kept}
    return [entry for entry in kept if entry.type != "SCHEMA" or entry.name in schemas]
