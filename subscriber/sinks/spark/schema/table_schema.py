"""A table's schema at one time: its columns, its replica identity, and the resulting Arrow schemas.

Rows of landing files and change logs have metadata columns before the table's own:

===========  ==============  =============================================================================================
``_op``      string          ``i`` insert, ``u`` update, ``d`` delete, ``t`` truncate, ``c`` copied
``_lsn``     int64           end LSN of the transaction's commit; a snapshot at that LSN includes the row
``_seq``     int64           place in the transaction, from 0
``_xid``     int64           the publisher's transaction ID
``_ts``      timestamp UTC   commit time
``_moved``   bool            of ``u``: the previous row, a ``d``, is the old row; its key changed, or the whole row is the key
``_un``      list of string  of ``u``: columns that were not changed and not sent
``_special`` string          JSON, column to text: values that a column's type cannot hold; such a column is NULL
===========  ==============  =============================================================================================

A ``d`` has only the columns of the replica identity. A ``t`` has none.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.messages import Relation
from subscriber.sinks.spark.schema.arrow_types import arrow_type, parse_type, type_name

__all__ = [
    "META",
    "META_NAMES",
    "SPECIAL",
    "LakeColumn",
    "TableSchema",
    "altered_name",
    "folded_name",
    "lake_names",
    "own_columns",
    "published_columns",
]

SPECIAL: Final = "_special"

META: Final = pa.schema(
    [
        pa.field("_op", pa.string(), nullable=False),
        pa.field("_lsn", pa.int64(), nullable=False),
        pa.field("_seq", pa.int64(), nullable=False),
        pa.field("_xid", pa.int64(), nullable=False),
        pa.field("_ts", pa.timestamp("us", "UTC")),
        pa.field("_moved", pa.bool_(), nullable=False),
        pa.field("_un", pa.list_(pa.string())),
        pa.field(SPECIAL, pa.string()),
    ]
)
META_NAMES: Final = frozenset(META.names)

_FORBIDDEN: Final = re.compile(r"[ ,;{}()\n\t=]")
"""Characters that Delta does not allow in column names."""


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """One column, by its name in PostgreSQL; ``field`` is the name in the lake. ``key``: whether it belongs to the replica identity.

    The names differ only if Delta does not allow PostgreSQL's, or the table uses it for another column.
    """

    name: str
    field: str
    type: pa.DataType
    key: bool


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table's schema, see the module. ``identity`` is ``pg_class.relreplident``: default, nothing, full, index."""

    table: TableName
    identity: str
    columns: tuple[LakeColumn, ...]

    @classmethod
    def of_relation(cls, relation: Relation) -> TableSchema:
        columns = [(column.name, column.type_oid, column.type_modifier, column.key) for column in relation.columns]
        return cls(TableName(relation.namespace, relation.name), relation.replica_identity, _described(columns))

    @classmethod
    def of_published(cls, table: PublishedTable) -> TableSchema:
        """The schema from the publisher's catalog."""
        columns = [(*column, column[0] in table.key_columns) for column in published_columns(table)]
        return cls(table.name, table.replica_identity, _described(columns))

    @property
    def keys(self) -> tuple[str, ...]:
        """Fields of the replica identity. All fields if it is FULL. Empty if there is none."""
        return tuple(column.field for column in self.columns if column.key)

    @property
    def first_key(self) -> str | None:
        """The first field of the replica identity, by whose ranges the work is divided."""
        return next(iter(self.keys), None)

    @property
    def full(self) -> bool:
        """Whether rows are identified by all their columns, and may occur more than once."""
        return self.identity == "f"

    def with_identity(self, identity: str, keys: Iterable[str]) -> TableSchema:
        """These columns, with another replica identity."""
        fields = {*keys}
        return replace(self, identity=identity, columns=tuple(replace(column, key=column.field in fields) for column in self.columns))

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of the table's own columns."""
        return pa.schema([pa.field(column.field, column.type) for column in self.columns])

    @property
    def landing(self) -> pa.Schema:
        """The Arrow schema of landing files."""
        return pa.schema([*META, *self.arrow])

    @property
    def current(self) -> pa.Schema:
        """The Arrow schema of the current-state table."""
        return pa.schema([*self.arrow, META.field(SPECIAL)])

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON for manifests."""
        return {
            "table": [self.table.namespace, self.table.name],
            "identity": self.identity,
            "columns": [[column.name, column.field, type_name(column.type), column.key] for column in self.columns],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TableSchema:
        """Read it from JSON. If the data is not a schema, raise ValueError, KeyError or TypeError."""
        columns = tuple(LakeColumn(name, field, parse_type(type_), bool(key)) for name, field, type_, key, *_ in data["columns"])
        return cls(TableName(*data["table"]), data["identity"], columns)


def _described(columns: Sequence[tuple[str, int, int, bool]]) -> tuple[LakeColumn, ...]:
    """Columns by name, oid and modifier of the type, and whether they belong to the replica identity."""
    fields = lake_names(name for name, *_ in columns)
    return tuple(
        LakeColumn(name, field, arrow_type(oid, modifier), key) for (name, oid, modifier, key), field in zip(columns, fields, strict=True)
    )


def published_columns(table: PublishedTable) -> tuple[tuple[str, int, int], ...]:
    """Name, oid and modifier of the type, of each column on the publisher."""
    modifiers = table.column_modifiers or (-1,) * len(table.columns)
    return tuple(zip(table.columns, table.column_types, modifiers, strict=True))


def own_columns(schema: pa.Schema) -> pa.Schema:
    """The table's own columns of a change log."""
    return pa.schema([field for field in schema if field.name not in META_NAMES])


def lake_names(names: Iterable[str]) -> tuple[str, ...]:
    """Make names that Delta accepts. They are not names of our metadata columns, and unique even if letter case is ignored, as in Spark.

    A name that must be altered gets a number that depends on the name alone. So the field stays the same when other columns are added and
    dropped, and no other column gets it. If names differ only in letter case, those with capitals are altered, as long as the other exists.
    A table that already has some of them keeps its names (``column_mapping.py``).
    """
    listed = tuple(names)
    counts = Counter(map(folded_name, listed))
    ours = set(map(folded_name, META_NAMES))

    def stays(name: str) -> bool:
        folded = folded_name(name)
        return _FORBIDDEN.search(name) is None and folded not in ours and (counts[folded] == 1 or name == folded)

    return tuple(name if stays(name) else altered_name(name) for name in listed)


@functools.lru_cache(10_000)
def folded_name(name: str) -> str:
    """Equal for names that Spark does not distinguish: Java compares the capital of each letter, and then its small letter."""
    capitals = (one if len(capital := one.upper()) > 1 else capital for one in name)
    # one small letter has two characters; Java uses only the first in one place, and both in the other
    return "".join(capital.lower()[0] for capital in capitals).replace("i\u0307", "i")


def altered_name(name: str) -> str:
    """The alternative name of a column, unique to it."""
    return f"{_FORBIDDEN.sub('_', name)}_{zlib.crc32(name.encode()):08x}"
