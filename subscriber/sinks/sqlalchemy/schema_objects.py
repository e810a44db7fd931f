"""Brings the publisher's schema to a target of SQLAlchemy: tables, keys, indexes, foreign keys and comments.

The objects that are missing are found by the target's catalog. ``schema copy`` creates them, and ``schema diff`` names them.

SQLite takes a foreign key only together with its table. MariaDB and MySQL get foreign keys after the rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, Dialect, Index, Inspector, MetaData, Table, inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import AddConstraint, CreateIndex, DDLElement

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import PublishedTable, TableName
from subscriber.interfaces.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.interfaces.table_schema import ConstraintSchema, DatabaseSchema, IndexSchema, SchemaDifference, TableSchema
from subscriber.sinks.sqlalchemy.schema.converters import INTEGERS
from subscriber.sinks.sqlalchemy.schema.names import identifier, target_name
from subscriber.sinks.sqlalchemy.schema.table_creation import Reference, TableDetails, check, create_table, foreign_key
from subscriber.sinks.sqlalchemy.schema.target_table import source_types
from subscriber.sinks.sqlalchemy.schema.trial_creation import not_created
from subscriber.sinks.sqlalchemy.session.database import Database

__all__ = ["compare_schema", "copy_schema"]

_ACTIONS: Final = {"r": "RESTRICT", "c": "CASCADE", "n": "SET NULL", "d": "SET DEFAULT"}
_MYSQL: Final = frozenset({"mysql", "mariadb"})
_PREFIX: Final = 191
"""So many characters of a long text are in an index that is not unique."""
_LONG: Final = ("TEXT", "BLOB")


@dataclass(frozen=True, slots=True)
class _Missing:
    """An object that the target lacks: its kind in a difference, what it is, its table, and the DDL that creates it."""

    kind: str
    what: str
    table: TableName
    ddl: DDLElement


async def copy_schema(
    url: str, tables: Sequence[PublishedTable], schema: DatabaseSchema, sections: Sequence[Section], progress: SchemaProgress
) -> list[str]:
    """Create what the target lacks.

    Returns:
        What was left out, because the target has nothing like it, one line each.

    Raises:
        ConfigurationError: the URL is not valid.
        TargetUnavailable, TargetError: an object cannot be created. What was created stays.
    """
    async with Database(url) as database:
        for section in sections:
            create = _create_tables if section is Section.PRE_DATA else _create_objects
            await create(database, tables, schema, progress)
    return [line for published in tables for line in _left_out(published, schema)]


async def compare_schema(url: str, tables: Sequence[PublishedTable], schema: DatabaseSchema) -> list[SchemaDifference]:
    """Return what differs in the target. Changes nothing.

    Raises:
        ConfigurationError: the URL is not valid.
        TargetUnavailable, TargetError: the target cannot be read.
    """
    async with Database(url, create=False) as database:
        if database.path is not None and not database.path.exists():
            absent = 'table "{}" does not exist in the target'
            return [SchemaDifference(kind="table", name=each.name, message=absent.format(each.name)) for each in tables]
        async with database.reading() as connection:
            found = [
                SchemaDifference(kind="column", name=each.table, message=each.message, ddl=(f"-- {each.hint}",))
                for each in await check(connection, tables)
                if each.table is not None
            ]
            missing = await connection.run_sync(_missing, tables, schema)
            for each in missing:
                statement = " ".join(str(each.ddl.compile(dialect=connection.dialect)).split()) + ";"
                message = f'{each.what} of table "{each.table}" does not exist in the target'
                found.append(SchemaDifference(kind=each.kind, name=each.table, message=message, ddl=(statement,)))
            return found + await connection.run_sync(_nullability, tables)


async def _create_tables(database: Database, tables: Sequence[PublishedTable], schema: DatabaseSchema, progress: SchemaProgress) -> None:
    async with database.writing() as connection:
        existing = set(await connection.run_sync(lambda each: inspect(each).get_table_names()))
    for number, published in enumerate(tables):
        what = f"table {published.name}"
        began = time.monotonic()
        there = str(target_name(published.name)) in existing
        if not there:
            progress(SchemaStep(what, StepState.BEGUN, 0.0, number, len(tables)))
            async with database.writing() as connection:
                details = _details(published, tables, schema, connection.dialect)
                await create_table(connection, published, details)
        state = StepState.EXISTS if there else StepState.CREATED
        progress(SchemaStep(what, state, time.monotonic() - began, number + 1, len(tables)))


async def _create_objects(database: Database, tables: Sequence[PublishedTable], schema: DatabaseSchema, progress: SchemaProgress) -> None:
    async with database.writing() as connection:
        missing = await connection.run_sync(_missing, tables, schema)
    for number, each in enumerate(missing):
        what = f"{each.what} of table {each.table}"
        progress(SchemaStep(what, StepState.BEGUN, 0.0, number, len(missing)))
        began = time.monotonic()
        async with database.writing() as connection:
            try:
                await connection.execute(each.ddl)
            except SQLAlchemyError as error:
                failed = not_created(each.table, error)
                if not isinstance(failed, TargetUnavailable):
                    failed.hint = "correct the rows, or create the object there in another form; then repeat the command"
                failed.add_note(f"while creating {what} in the target")
                raise failed from None
        progress(SchemaStep(what, StepState.CREATED, time.monotonic() - began, number + 1, len(missing)))


def _unique(table: TableSchema) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The unique keys of columns beside the primary key."""
    yield from ((each.name, each.columns) for each in table.constraints if each.kind == "u")
    yield from ((each.name, each.columns) for each in table.indexes if each.unique and each.columns)


def _details(published: PublishedTable, tables: Sequence[PublishedTable], schema: DatabaseSchema, dialect: Dialect) -> TableDetails:
    table = schema.tables.get(published.name)
    if table is None:
        return TableDetails()
    known = set(published.columns)
    references = list(_references(table, tables))
    # the other side of a foreign key has the same type
    referenced = [
        each.referenced_columns for other in schema.tables.values() for each in other.constraints if each.references == published.name
    ]
    keys = [key for _, key in _unique(table)] + [each.columns for each in references] + referenced
    return TableDetails(
        keys=tuple(key for key in keys if known.issuperset(key)),
        counter=_counter(published, schema),
        comment=table.comment,
        comments={each.name: each.comment for each in table.columns if each.comment},
        references=tuple(map(_reference, references)) if dialect.name == "sqlite" else (),
    )


def _counter(published: PublishedTable, schema: DatabaseSchema) -> str | None:
    key = published.primary_key
    types = dict(source_types(published))
    if len(key) != 1 or types[key[0]].builtin not in INTEGERS:
        return None
    identity = any(each.name == key[0] and each.identity for each in schema.tables[published.name].columns)
    owned = any(each.owner == (published.name, key[0]) for each in schema.sequences)
    return key[0] if identity or owned else None


def _references(table: TableSchema, tables: Sequence[PublishedTable]) -> Iterator[ConstraintSchema]:
    """The foreign keys between tables that the target has."""
    columns = {each.name: set(each.columns) for each in tables}
    for each in table.constraints:
        if each.kind == "f" and each.references in columns and columns[table.name].issuperset(each.columns):
            yield each


def _reference(key: ConstraintSchema) -> Reference:
    assert key.references is not None
    return Reference(
        columns=key.columns,
        table=key.references,
        others=key.referenced_columns,
        on_delete=_ACTIONS.get(key.on_delete),
        on_update=_ACTIONS.get(key.on_update),
    )


def _missing(connection: Any, tables: Sequence[PublishedTable], schema: DatabaseSchema) -> list[_Missing]:
    inspector: Inspector = inspect(connection)
    existing = set(inspector.get_table_names())
    there = [each for each in tables if str(target_name(each.name)) in existing and each.name in schema.tables]
    dialect = connection.dialect
    found = [each for published in there for each in _missing_indexes(inspector, dialect, published, schema.tables[published.name])]
    for published in there if dialect.name != "sqlite" else ():
        found += _missing_references(inspector, published, schema.tables[published.name], there)
    return found


def _missing_indexes(inspector: Inspector, dialect: Dialect, published: PublishedTable, table: TableSchema) -> Iterator[_Missing]:
    name = target_name(published.name)
    uniques = {tuple(each["column_names"]) for each in inspector.get_unique_constraints(name)}
    uniques |= {tuple(column or "" for column in each["column_names"]) for each in inspector.get_indexes(name) if each["unique"]}
    uniques.add(tuple(inspector.get_pk_constraint(name)["constrained_columns"]))
    indexes = uniques | {tuple(column or "" for column in each["column_names"]) for each in inspector.get_indexes(name)}
    types = {each["name"]: str(each["type"]).upper() for each in inspector.get_columns(name)}
    wanted = [(index, key, True) for index, key in _unique(table)]
    wanted += [(each.name, each.columns, False) for each in table.indexes if each.columns and not each.unique]
    for index, key, unique in wanted:
        if key in (uniques if unique else indexes) or not types.keys() >= set(key):
            continue
        columns: dict[str, Column[Any]] = {column: Column(identifier(column)) for column in key}
        Table(name, MetaData(), *columns.values())
        lengths = {column: _PREFIX for column in key if any(word in types[column] for word in _LONG)} if not unique else {}
        place = target_name(TableName(published.name.namespace, index))
        options: dict[str, Any] = {f"{dialect.name}_length": lengths} if lengths and dialect.name in _MYSQL else {}
        built = Index(place, *columns.values(), unique=unique, **options)
        kind = "unique key" if unique else "index"
        yield _Missing("key" if unique else "index", f"{kind} ({', '.join(key)})", published.name, CreateIndex(built))


def _missing_references(
    inspector: Inspector, published: PublishedTable, table: TableSchema, there: Sequence[PublishedTable]
) -> Iterator[_Missing]:
    name = target_name(published.name)
    known = {(tuple(each["constrained_columns"]), each["referred_table"].lower()) for each in inspector.get_foreign_keys(name)}
    for each in _references(table, there):
        assert each.references is not None
        if (each.columns, str(target_name(each.references)).lower()) not in known:
            metadata = MetaData()
            built = foreign_key(metadata, name, _reference(each))
            Table(name, metadata, *(Column(identifier(column)) for column in {*each.columns, *each.referenced_columns}), built)
            what = f'foreign key ({", ".join(each.columns)}) to table "{each.references}"'
            yield _Missing("constraint", what, published.name, AddConstraint(built))


def _nullability(connection: Any, tables: Sequence[PublishedTable]) -> list[SchemaDifference]:
    inspector: Inspector = inspect(connection)
    existing = set(inspector.get_table_names())
    found = []
    for published in tables:
        name = str(target_name(published.name))
        for column in inspector.get_columns(name) if name in existing else ():
            wanted = column["name"] in published.not_null
            if column["name"] in published.columns and column["nullable"] is wanted and column["name"] not in published.primary_key:
                here, there = ("NOT NULL", "NULL") if wanted else ("NULL", "NOT NULL")
                message = f'column "{column["name"]}" of table "{published.name}" is {there} in the target, and {here} on the publisher'
                found.append(SchemaDifference(kind="nullability", name=published.name, message=message, ddl=(f"-- make it {here} there",)))
    return found


def _left_out(published: PublishedTable, schema: DatabaseSchema) -> Iterator[str]:
    table = schema.tables.get(published.name)
    if table is None:
        return
    left: list[IndexSchema | ConstraintSchema] = [each for each in table.indexes if not each.columns]
    left += [each for each in table.constraints if each.kind in "cx"]
    for each in left:
        yield f'{each.name} of table "{published.name}" was left out, because the target has nothing like it: {each.definition}'
