"""Which tables of a lake have a history: ``history.json``.

The subscriber writes it when it starts, as its target's URL says. The applier follows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container
from typing import Any, Final

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.sinks.spark.files.documents import parse_document, write_document
from subscriber.sinks.spark.files.file_errors import DamagedFile
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import META

__all__ = ["HISTORY_COLUMNS", "history_name", "read_histories", "write_histories"]

_NAME: Final = "history.json"
_TIME: Final = META.field("_ts").type

HISTORY_COLUMNS: Final = pa.schema(
    [
        ("_valid_from", _TIME),
        ("_valid_to", _TIME),
        ("_is_current", pa.bool_()),
        ("_lsn", pa.int64()),
        ("_end_lsn", pa.int64()),
    ]
)
"""The columns of a history table before the table's own."""


def read_histories(storage: Storage) -> frozenset[TableName]:
    """The tables with a history."""
    return parse_document(storage, _NAME, _parsed, "start the subscriber again: it writes this file when it starts") or frozenset()


def _parsed(document: dict[str, Any]) -> frozenset[TableName]:
    # by their places: an object of another form would be unpacked into its keys
    return frozenset(TableName(names[0], names[1]) for names in document["tables"])


def write_histories(storage: Storage, tables: Collection[TableName]) -> None:
    """Store which tables have a history, if others are stored, or if what is stored is damaged."""
    with contextlib.suppress(DamagedFile):
        if set(tables) == read_histories(storage):
            return
    write_document(storage, _NAME, {"tables": [[name.namespace, name.name] for name in tables]})


def history_name(name: TableName, tables: Container[TableName]) -> TableName:
    """The name of a table's history in a snapshot: ``TABLE_history``, with more underscores if a table has that name."""
    found = TableName(name.namespace, f"{name.name}_history")
    while found in tables:
        found = TableName(name.namespace, f"{found.name}_")
    return found
