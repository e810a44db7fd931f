"""The publisher's schema under the names that its tables have in the target (:mod:`subscriber.config.mapping`).

Definitions of PostgreSQL are texts. In these, the names of tables and sequences are replaced where PostgreSQL writes them with a schema:
after ``ON`` in an index, after ``REFERENCES`` in a foreign key, and in ``nextval``. Names of columns are replaced in plain lists. What
has a renamed column in another place, or a column that is left out, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from subscriber.config.mapping import TableMapping
from subscriber.config.table_names import read_identifier, written, written_name
from subscriber.interfaces import TableName
from subscriber.interfaces.table_schema import ColumnSchema, ConstraintSchema, DatabaseSchema, IndexSchema, TableSchema
from subscriber.protocol.quoting import quote_identifier

__all__ = ["mapped_schema", "mentions", "used_sequences", "with_names_of_sequences"]

_PART: Final = r'(?:[a-z_][a-z0-9_$]*|"(?:[^"]|"")+")'
_NEXTVAL: Final = re.compile(rf"(?<=nextval\(')({_PART})\.({_PART})(?='::regclass\))")
_INDEXED: Final = re.compile(rf"(?<= ON )(ONLY )?{_PART}\.{_PART}(?= USING )")
_REFERENCED: Final = re.compile(rf"(?<= REFERENCES ){_PART}\.{_PART}(?=\()")
_LIST: Final = rf"\({_PART}(?:, {_PART})*\)"
_COLUMNS: Final = re.compile(_LIST)
_INCLUDED: Final = re.compile(rf" INCLUDE ({_LIST})")
_SET: Final = re.compile(rf"(?<= SET )(NULL|DEFAULT) ({_LIST})")
_EACH: Final = re.compile(_PART)


def mapped_schema(schema: DatabaseSchema, mapping: TableMapping) -> DatabaseSchema:
    """Return the schema with the target's names."""
    if not mapping:
        return schema
    tables = [_table(table, mapping) for table in schema.tables.values() if not mapping.excludes(table.name.pair)]
    sequences = [
        replace(sequence, name=_name(sequence.name, mapping), owner=sequence.owner and _owner(*sequence.owner, mapping))
        for sequence in schema.sequences
        if sequence.owner is None or not mapping.excludes(sequence.owner[0].pair)
    ]
    return DatabaseSchema(tables={table.name: table for table in tables}, sequences=tuple(sequences))


def with_names_of_sequences(schema: DatabaseSchema, target: DatabaseSchema) -> DatabaseSchema:
    """Return the schema with the target's names of sequences that columns own, which may be any, and of their use in a default."""
    names = {sequence.owner: sequence.name for sequence in target.sequences if sequence.owner is not None}
    other = {each.name: names[each.owner] for each in schema.sequences if each.owner in names and each.name != names[each.owner]}

    def table(found: TableSchema) -> TableSchema:
        def default(text: str) -> str:
            return _NEXTVAL.sub(lambda match: _in_text(other.get(name := _read(match), name)), text)

        columns = (replace(each, default=each.default and default(each.default)) for each in found.columns)
        return replace(found, columns=tuple(columns))

    return DatabaseSchema(
        tables={name: table(found) for name, found in schema.tables.items()} if other else schema.tables,
        sequences=tuple(replace(each, name=other.get(each.name, each.name)) for each in schema.sequences),
    )


def used_sequences(table: TableSchema) -> set[TableName]:
    """The sequences in the defaults of a table."""
    return {_read(match) for column in table.columns for match in _NEXTVAL.finditer(column.default or "")}


def mentions(expression: str, columns: Iterable[str]) -> bool:
    """Whether an expression may have one of these columns."""
    # a keyword is quoted
    quoted = (f"(?:{re.escape(written(name))}|{re.escape(quote_identifier(name))})" for name in columns)
    return any(re.search(rf"(?<![\w$\"]){name}(?![\w$\"])", expression) for name in quoted)


def _name(name: TableName, mapping: TableMapping) -> TableName:
    return TableName(*mapping.target(name.pair))


def _owner(table: TableName, column: str, mapping: TableMapping) -> tuple[TableName, str]:
    return _name(table, mapping), mapping.column(table.pair, column)


def _table(table: TableSchema, mapping: TableMapping) -> TableSchema:
    kept = mapping.kept(table.name.pair, [column.name for column in table.columns])

    def column(found: ColumnSchema) -> ColumnSchema:
        default = found.default and _NEXTVAL.sub(lambda match: _sequence(match, mapping), found.default)
        return replace(found, name=mapping.column(table.name.pair, found.name), default=default)

    constraints = (_constraint(each, table.name, kept, mapping) for each in table.constraints)
    indexes = (_index(each, table.name, kept, mapping) for each in table.indexes)
    return replace(
        table,
        name=_name(table.name, mapping),
        columns=tuple(column(each) for each in table.columns if each.name in kept),
        constraints=tuple(each for each in constraints if each is not None),
        indexes=tuple(each for each in indexes if each is not None),
    )


def _sequence(match: re.Match[str], mapping: TableMapping) -> str:
    return _in_text(_name(_read(match), mapping))


def _read(match: re.Match[str]) -> TableName:
    return TableName(*(read_identifier(part.replace("''", "'")) for part in match.groups()))


def _in_text(name: TableName) -> str:
    """The name within a text of SQL."""
    return written_name(name.pair).replace("'", "''")


def _constraint(found: ConstraintSchema, table: TableName, kept: Sequence[str], mapping: TableMapping) -> ConstraintSchema | None:
    columns, definition = _columns(found.columns, found.definition, table, kept, mapping, listed=found.kind in "puf")
    if definition is None or (found.references is not None and mapping.excludes(found.references.pair)):
        return None
    if found.references is None:
        return replace(found, columns=columns, definition=definition)
    other, references = found.references.pair, _name(found.references, mapping)
    referenced = tuple(mapping.column(other, name) for name in found.referenced_columns)
    head, word, tail = definition.partition(" REFERENCES ")
    tail = _REFERENCED.sub(lambda _: references.quoted, word + tail)
    if referenced != found.referenced_columns:
        tail = _COLUMNS.sub(lambda _: _listed(referenced), tail, count=1)
    return replace(found, columns=columns, definition=head + tail, references=references, referenced_columns=referenced)


def _index(found: IndexSchema, table: TableName, kept: Sequence[str], mapping: TableMapping) -> IndexSchema | None:
    columns, definition = _columns(found.columns, found.definition, table, kept, mapping, listed=bool(found.columns))
    if definition is None:
        return None
    own = _name(table, mapping).quoted
    return replace(found, columns=columns, definition=_INDEXED.sub(lambda match: (match[1] or "") + own, definition))


def _columns(
    columns: tuple[str, ...], definition: str, table: TableName, kept: Sequence[str], mapping: TableMapping, *, listed: bool
) -> tuple[tuple[str, ...], str | None]:
    """The columns, and the definition with their names. None: it cannot have them."""
    if not mapping.changes_columns(table.pair):
        return columns, definition
    renamed = tuple(mapping.column(table.pair, name) for name in columns)
    if any(name not in kept for name in columns) or not columns:
        return renamed, None

    def others(text: str) -> list[str]:
        return [mapping.column(table.pair, name) for name in _read_list(text) if name in kept]

    definition = _INCLUDED.sub(lambda match: f" INCLUDE {_listed(names)}" if (names := others(match[1])) else "", definition)
    definition = _SET.sub(lambda match: f"{match[1]} {_listed(others(match[2]))}", definition)
    if renamed == columns:
        return columns, definition
    plain = _COLUMNS.search(definition) if listed else None
    if plain is None or _read_list(plain[0]) != columns:
        return renamed, None
    return renamed, definition[: plain.start()] + _listed(renamed) + definition[plain.end() :]


def _listed(columns: Sequence[str]) -> str:
    return f"({', '.join(map(quote_identifier, columns))})"


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(map(read_identifier, _EACH.findall(text)))
