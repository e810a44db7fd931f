"""The changes of a table as a plan looks at them; many small files of them are gathered in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pyarrow as pa

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import write_file
from subscriber.sinks.spark.merge.parquet import read_changes
from subscriber.sinks.spark.plan import TableWork, plan_columns
from subscriber.sinks.spark.waiting import Source

__all__ = ["read_work"]

_FEW_FILES: Final = 4
_GATHERED_BYTES: Final = 64 * 1024**2


def read_work(storage: Storage, work: TableWork, source: Source, directory: str) -> tuple[TableWork, pa.Table]:
    """Read the changes that a table is to have.

    Args:
        storage: the lake's.
        work: what is to be done.
        source: what waits.
        directory: relative to the lake, for files of the round.

    Returns:
        What is left to do, without stretches that are in the table already; and of its changes what a plan looks at.

    Raises:
        TargetError: a file cannot be read or written.
    """
    if len(work.stretches) == 1 and len(source.files) > _FEW_FILES and source.size <= _GATHERED_BYTES:
        changes = read_changes(storage, source.files, work.schema, work.after)
        stretch = replace(work.stretches[0], files=(_gathered(storage, changes, directory),))
        return replace(work, stretches=(stretch,) if changes.num_rows else ()), changes
    columns = plan_columns(work.schema)
    parts = [read_changes(storage, stretch.files, work.schema, work.after, columns) for stretch in work.stretches]
    left = tuple(stretch for stretch, part in zip(work.stretches, parts, strict=True) if part.num_rows)
    return replace(work, stretches=left), pa.concat_tables(parts or [read_changes(storage, (), work.schema, work.after, columns)])


def _gathered(storage: Storage, changes: pa.Table, directory: str) -> str:
    """Many small files as one: each unit of the table opens it, and opening a file is what small ones cost."""
    storage.make_directory(directory)
    return write_file(storage, directory, changes.schema, changes.to_batches())
