"""Checks of a lake before a run, which find problems early."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.sinks.spark.catalog.history import HISTORY_COLUMNS
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import folded_name, lake_names

__all__ = ["check_histories", "check_place", "check_tables", "require_options"]


def require_options(options: Mapping[str, Any]) -> None:
    """Check that a lake supports some options, or raise ConfigurationError."""
    if options.get("binary"):
        raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
    for name in ("map", "columns", "rename"):
        if options.get(name):
            raise ConfigurationError(
                f"{name} is not available for a lake: its tables have the publisher's names and columns",
                hint=f"omit {name}; a publication can leave out columns, and a view can give other names",
            )


def check_place(storage: Storage) -> list[Finding]:
    """Check that the location has a lake, or that a lake can be created there. Blocks. Changes nothing."""
    try:
        Lake.find(storage)
    except SubscriberError as error:
        return [Finding("error", str(error), error.hint or "")]
    if storage.root is None:
        return []
    nearest = next(path for path in (storage.root, *storage.root.parents) if path.exists())
    if not nearest.is_dir():
        return [Finding("error", f"{nearest} is not a directory", "the lake needs a directory of its own")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Finding("error", f"no permission to write in {nearest}", "give this user the right to write there")]
    return []


def check_tables(tables: Sequence[PublishedTable]) -> list[Finding]:
    """Warn about tables that the lake stores in a way that users may not expect."""
    found: list[Finding] = []
    for table in tables:
        if table.changes and not table.key_columns:
            found.append(
                Finding(
                    "warning",
                    f'table "{table.name}" has no replica identity: its Delta table can only follow INSERT and TRUNCATE',
                    "give it a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
                )
            )
        renamed = [(name, field) for name, field in zip(table.columns, lake_names(table.columns), strict=True) if name != field]
        found += [
            Finding("warning", f'column "{name}" of table "{table.name}" is named "{field}" in the lake', "Delta does not allow its name")
            for name, field in renamed
        ]
    return found


def check_histories(tables: Sequence[PublishedTable], histories: Iterable[TableName]) -> list[Finding]:
    """Find tables of which a history is asked for and that are not published, or whose columns have names that it needs."""
    published = {table.name: table for table in tables}
    found: list[Finding] = []
    for name in histories:
        if name not in published:
            hint = "write history.SCHEMA.TABLE as the publisher has the names, without quotes"
            found.append(Finding("warning", f'table "{name}" of which a history is asked for is not published', hint))
            continue
        taken = [column for column in lake_names(published[name].columns) if folded_name(column) in HISTORY_COLUMNS.names]
        found += [
            Finding("warning", f'table "{name}" gets no history: column "{column}" has the name of a column of it', "rename the column")
            for column in taken
        ]
    return found
