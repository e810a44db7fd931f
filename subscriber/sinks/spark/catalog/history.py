"""Which tables of a lake have a history, and of which form: ``history.json``.

The subscriber writes it when it starts, as its target's URL says. The applier follows it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final, get_args

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.sinks.spark.files.documents import parse_document, write_document
from subscriber.sinks.spark.files.location import HistoryKind
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import META

__all__ = ["HISTORY_COLUMNS", "history_name", "read_histories", "write_histories"]

_NAME: Final = "history.json"
_TIME: Final = META.field("_ts").type

HISTORY_COLUMNS: Final[Mapping[HistoryKind, pa.Schema]] = {
    "scd2": pa.schema(
        [
            ("_valid_from", _TIME),
            ("_valid_to", _TIME),
            ("_is_current", pa.bool_()),
            ("_lsn", pa.int64()),
            ("_end_lsn", pa.int64()),
        ]
    ),
    "soft_delete": pa.schema([("_deleted", pa.bool_()), ("_lsn", pa.int64()), ("_ts", _TIME)]),
}
"""The columns of a history table before the table's own."""


def read_histories(storage: Storage) -> dict[TableName, HistoryKind]:
    """The forms of the histories, by table.

    Raises:
        TargetError: the document is damaged.
    """
    return parse_document(storage, _NAME, _parsed, "remove it: the subscriber writes it again when it starts") or {}


def _parsed(document: dict[str, Any]) -> dict[TableName, HistoryKind]:
    found = {TableName(*item["table"]): item["form"] for item in document["tables"]}
    if not set(found.values()) <= set(get_args(HistoryKind)):
        raise ValueError
    return found


def write_histories(storage: Storage, kinds: Mapping[TableName, HistoryKind]) -> None:
    """Store the forms of the histories, if they differ from those that are stored."""
    if kinds != read_histories(storage):
        write_document(storage, _NAME, {"tables": [{"table": [name.namespace, name.name], "form": form} for name, form in kinds.items()]})


def history_name(name: TableName, tables: Container[TableName]) -> TableName:
    """The name of a table's history in a snapshot: ``TABLE_history``, with more underscores if a table has that name."""
    found = TableName(name.namespace, f"{name.name}_history")
    while found in tables:
        found = TableName(name.namespace, f"{found.name}_")
    return found
