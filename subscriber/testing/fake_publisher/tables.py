"""The tables of the fake publisher: columns, replica identity, rows.

A value is kept as PostgreSQL's text, in bytes, or None. Values are given as Python objects, which psycopg writes as a server does, or as
text in PostgreSQL's own form.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg.adapt import PyFormat, Transformer

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.messages import ReplicaIdentity
from subscriber.testing.fake_publisher.stored import stored
from subscriber.types import TypeFact, TypeKind, TypeRegistry
from subscriber.types.builtin import SQL_NAMES, builtin_facts

__all__ = ["FakeColumn", "FakeSequence", "FakeTable", "RowValues", "TableShape", "Types", "table_name"]

RowValues = tuple[bytes | None, ...]
"""One row: a value for each column, in the table's order."""

_ALIASES: Final = {sql: name for name, sql in SQL_NAMES.items()} | {
    "char": "bpchar",
    "decimal": "numeric",
    "float": "float8",
    "int": "int4",
}
_TYPE: Final = re.compile(r"\s*(?P<name>[^(\[]+?)\s*(?:\((?P<first>\d+)(?:,\s*(?P<second>-?\d+))?\))?\s*(?P<array>(?:\[\d*\])+)?\s*")
_BYTEA: Final = 17


def table_name(name: str) -> TableName:
    """``schema.name``, or a name in schema public."""
    namespace, _, rest = name.rpartition(".")
    return TableName(namespace or "public", rest)


@dataclass(frozen=True, slots=True)
class FakeSequence:
    """A sequence, of which nothing but the state matters here."""

    oid: int
    last_value: int
    is_called: bool


@dataclass(frozen=True, slots=True)
class FakeColumn:
    """One column.

    Attributes:
        name: its name.
        type_oid, modifier: of its type.
        not_null: whether NULL is refused.
        generated: ``s`` stored, ``v`` virtual, or empty. Values of a generated column are given like others.
        number: ``attnum``.
    """

    name: str
    type_oid: int
    modifier: int = -1
    not_null: bool = False
    generated: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class TableShape:
    """The definition of a table at one time. A change in the WAL refers to the shape that it was written with."""

    oid: int
    name: TableName
    columns: tuple[FakeColumn, ...]
    primary_key: tuple[str, ...] = ()
    replica_identity: ReplicaIdentity = "d"
    identity_index: tuple[str, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {column.name: place for place, column in enumerate(self.columns)})

    @property
    def identity_columns(self) -> tuple[str, ...]:
        """The columns of the replica identity's index; for FULL and NOTHING none."""
        return {"d": self.primary_key, "i": self.identity_index}.get(self.replica_identity, ())

    @property
    def key_flags(self) -> frozenset[str]:
        """The columns that a Relation message marks as part of the identity."""
        return frozenset(self.places) if self.replica_identity == "f" else frozenset(self.identity_columns)


class Types:
    """The types by name: built-in ones and those that the test adds.

    Attributes:
        registry: by oid.
        added: those of the test.
    """

    def __init__(self) -> None:
        self.registry = TypeRegistry()
        self.added: dict[int, TypeFact] = {}
        self._builtin = {fact.oid: fact for fact in builtin_facts()}
        self._by_name = {(fact.namespace, fact.name): fact for fact in self._builtin.values()}

    def add(self, fact: TypeFact) -> None:
        """Add a type."""
        self.added[fact.oid] = fact
        self._by_name[fact.namespace, fact.name] = fact
        self.registry.add([fact])

    def fact(self, oid: int) -> TypeFact:
        """The type of this oid."""
        return self.added.get(oid) or self._builtin[oid]

    def all(self) -> Iterable[TypeFact]:
        """All types."""
        return (*self._builtin.values(), *self.added.values())

    def parse(self, declaration: str) -> tuple[int, int]:
        """The oid and modifier of a type as in CREATE TABLE: ``varchar(10)``, ``numeric(8,2)``, ``int[]``, ``public.mood``.

        Raises:
            ConfigurationError: there is no such type.
        """
        found = _TYPE.fullmatch(declaration)
        fact = self._find(found["name"]) if found else None
        if found is None or fact is None:
            raise ConfigurationError(f'type "{declaration}" does not exist in the fake publisher', hint="add it with add_type()")
        modifier = -1
        if found["first"] is not None:
            first = int(found["first"])
            if fact.name == "numeric":
                modifier = (first << 16 | (int(found["second"] or 0) & 0x7FF)) + 4
            elif fact.name in {"varchar", "bpchar"}:
                modifier = first + 4
            else:
                modifier = first
        if not found["array"]:
            return fact.oid, modifier
        array = self._by_name.get((fact.namespace, f"_{fact.name}"))
        if array is None:
            raise ConfigurationError(
                f'type "{declaration}" does not exist in the fake publisher', hint="add the array type with add_type()"
            )
        return array.oid, modifier

    def _find(self, name: str) -> TypeFact | None:
        name = " ".join(name.split())
        namespace, _, rest = name.rpartition(".")
        if namespace:
            return self._by_name.get((namespace, rest))
        plain = name.lower()
        return self._by_name.get(("pg_catalog", _ALIASES.get(plain, plain))) or self._by_name.get(("public", name))

    def text(self, column: FakeColumn, value: object) -> bytes | None:
        """A Python value, or its text, as the column stores it: PostgreSQL's text.

        Raises:
            ConfigurationError: psycopg cannot write the value, or the column does not accept it.
        """
        written = self._written(column, value)
        if written is None:
            return None
        type_ = self.registry.resolve(column.type_oid, column.modifier)
        return stored(type_, written.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def _written(self, column: FakeColumn, value: object) -> bytes | None:
        match value:
            case None:
                return None
            case str():
                return value.encode("utf-8", "surrogateescape")
            case bytes() if column.type_oid == _BYTEA:
                return b"\\x" + value.hex().encode()
            case bool():
                return b"t" if value else b"f"
            case float() if value.is_integer() and abs(value) < 1e15:
                return str(int(value)).encode()
            case datetime.datetime() if value.tzinfo is not None:
                return _timestamptz(value)
        try:
            dumped = Transformer().get_dumper(value, PyFormat.TEXT).dump(value)
        except Exception as error:
            raise ConfigurationError(f'column "{column.name}": a {type(value).__name__} cannot be written', hint="give its text") from error
        return None if dumped is None else bytes(dumped)

    def kind(self, oid: int) -> TypeKind:
        """The kind of a type."""
        return self.fact(oid).kind


def _timestamptz(value: datetime.datetime) -> bytes:
    text = value.astimezone(datetime.UTC).replace(tzinfo=None).isoformat(" ")
    if "." in text:
        text = text.rstrip("0")
    return f"{text}+00".encode()


class FakeTable:
    """A table: its current shape and its committed rows by number.

    Attributes:
        shape: the definition.
        rows: the committed rows.
        locks: the transaction that has changed a row, by the row's number.
        by_key: the number of the row that last had a primary key. The row may have another key now, or be gone.
    """

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self.rows: dict[int, RowValues] = {}
        self.locks: dict[int, object] = {}
        self.by_key: dict[RowValues, int] = {}
        self.next_row = 1

    def row(self, types: Types, values: Mapping[str, Any]) -> RowValues:
        """The values of a new row. Columns that are not given are NULL.

        Raises:
            ConfigurationError: there is no such column, or a value is missing.
        """
        self.check_columns(values)
        found = tuple(types.text(column, values.get(column.name)) for column in self.shape.columns)
        self.check_nulls(found)
        return found

    def changed(self, types: Types, row: RowValues, values: Mapping[str, Any]) -> RowValues:
        """A row with some values replaced."""
        columns = self.shape.columns
        found = tuple(
            types.text(column, values[column.name]) if column.name in values else value for column, value in zip(columns, row, strict=True)
        )
        self.check_nulls(found)
        return found

    def check_columns(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.shape.places:
                raise ConfigurationError(f'column "{name}" of relation "{self.shape.name}" does not exist')

    def check_nulls(self, row: RowValues) -> None:
        for column, value in zip(self.shape.columns, row, strict=True):
            if column.not_null and value is None:
                raise ConfigurationError(
                    f'null value in column "{column.name}" of relation "{self.shape.name}" violates not-null constraint'
                )

    def key(self, row: RowValues, names: Sequence[str]) -> RowValues:
        """The values of some columns."""
        return tuple(row[self.shape.places[name]] for name in names)

    def primary_key_of(self, row: RowValues) -> RowValues | None:
        """The values of the primary key, or None without one."""
        return self.key(row, self.shape.primary_key) if self.shape.primary_key else None
