"""The actions of a commit that changes rows of a Delta table.

On a local file system, :mod:`~subscriber.sinks.spark.tables.delta` writes them as the next version, because delta-rs cannot write deletion
vectors. In object stores delta-rs writes them, because it creates a file only if there is none.

Source: Delta protocol, Actions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema
from deltalake.transaction import AddAction, RemoveAction, Transaction
from pyroaring import BitMap

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector, read_vector, write_vectors
from subscriber.sinks.spark.tables.table_features import ENABLE_VECTORS, with_deletion_vectors
from subscriber.sinks.spark.tables.table_log import TableFile

__all__ = ["TableChange", "actions_of", "commit_by_library", "row_count", "stored_vectors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """What a commit changes. See :meth:`subscriber.sinks.spark.tables.delta.LakeDelta.commit`.

    ``vectors`` are new deletion vectors by their files. None: all rows of the file are deleted.
    """

    added: Sequence[DataFile]
    removed: Sequence[str]
    application: str
    lsn: Lsn
    note: str
    overwrite: pa.Schema | None
    same_rows: bool
    vectors: Mapping[str, DeletionVector | None] = field(default_factory=dict)
    feed: Sequence[DataFile] = ()


def actions_of(
    storage: Storage, directory: str, table: DeltaTable, files: Mapping[str, TableFile], change: TableChange
) -> list[dict[str, Any]]:
    """The actions that make a change of a table. ``files``: those of the table."""
    now, changes_rows = int(time.time() * 1000), not change.same_rows
    info = {"timestamp": now, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "engineInfo": "subscriber"}
    found: list[dict[str, Any]] = [
        {"commitInfo": {**info, "userMetadata": change.note}},
        {"txn": {"appId": change.application, "version": int(change.lsn), "lastUpdated": now}},
        *_described(table, change.overwrite, vectors=any(vector is not None for vector in change.vectors.values())),
    ]
    removed = change.removed if change.overwrite is None else [*files]
    found += [{"remove": files[path].removal(now, changes_rows=changes_rows)} for path in removed]
    for path, vector in change.vectors.items():
        found.append({"remove": files[path].removal(now, changes_rows=True)})
        if vector is not None:
            found.append({"add": files[path].with_vector(vector, row_count(storage, directory, files[path]))})
    for file in change.added:
        add = {"path": quote(file.path), "partitionValues": {}, "size": file.size, "modificationTime": now, "dataChange": changes_rows}
        found.append({"add": {**add, "stats": file.stats}})
    feed = [{"path": quote(file.path), "partitionValues": {}, "size": file.size, "dataChange": False} for file in change.feed]
    return [*found, *({"cdc": one} for one in feed)]


def _described(table: DeltaTable, overwrite: pa.Schema | None, *, vectors: bool) -> list[dict[str, Any]]:
    """The actions that give the table other columns, or allow deletion vectors in it."""
    metadata = table.metadata()
    protocol = with_deletion_vectors(table.protocol()) if vectors else None
    if overwrite is None and protocol is None:
        return []
    described = {
        "id": str(metadata.id),
        "name": metadata.name,
        "description": metadata.description,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": (Schema.from_arrow(overwrite) if overwrite is not None else table.schema()).to_json(),
        "partitionColumns": metadata.partition_columns,
        "configuration": {**metadata.configuration, **({ENABLE_VECTORS: "true"} if protocol is not None else {})},
        "createdTime": metadata.created_time,
    }
    found = {name: value for name, value in described.items() if value is not None}
    return [*([{"protocol": protocol}] if protocol is not None else []), {"metaData": found}]


def commit_by_library(table: DeltaTable, files: Mapping[str, TableFile], change: TableChange) -> None:
    """Let delta-rs create the next version. Deletion vectors are not possible."""
    now, changes_rows = int(time.time() * 1000), not change.same_rows
    actions: list[AddAction | RemoveAction] = [AddAction(file.path, file.size, {}, now, changes_rows, file.stats) for file in change.added]
    if change.overwrite is None:
        # readers of the change data feed need the sizes
        actions += [RemoveAction(path, changes_rows, now, files[path].size, {}) for path in change.removed]
    table.create_write_transaction(
        actions,
        "append" if change.overwrite is None else "overwrite",
        Schema.from_arrow(change.overwrite) if change.overwrite is not None else table.schema(),
        commit_properties=CommitProperties(
            {"userMetadata": change.note}, max_commit_retries=0, app_transactions=[Transaction(change.application, int(change.lsn))]
        ),
        post_commithook_properties=PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False),
    )


def stored_vectors(
    storage: Storage, directory: str, files: Mapping[str, TableFile], deleted: Mapping[str, BitMap]
) -> dict[str, DeletionVector | None]:
    """Store vectors with more deleted rows than before, by file. None: all rows of the file are deleted."""
    found: dict[str, DeletionVector | None] = {}
    left: dict[str, BitMap] = {}
    for path, rows in deleted.items():
        vector = files[path].vector
        together = rows | read_vector(storage, directory, vector) if vector is not None else rows
        if len(together) == row_count(storage, directory, files[path]):
            found[path] = None
        elif len(together) > (0 if vector is None else vector.deleted):
            left[path] = together
    return {**found, **write_vectors(storage, directory, left)}


def row_count(storage: Storage, directory: str, file: TableFile) -> int:
    """How many rows are in a file, even deleted ones."""
    if file.rows is not None:
        return file.rows
    with storage.parquet(f"{directory}/{file.path}") as opened:
        return int(opened.metadata.num_rows)
