"""What is appended to a change log: changes, divided into files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.maintenance.log_files import Copied, Identity, LogPart, RewrittenFiles
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.delta import LakeDelta

__all__ = ["Append", "Source", "clearing", "log_parts"]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of changes, with its schema; and the copy that it is of, or None."""

    file: LandedFile
    copied: Copied | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """A planned append to a log.

    Attributes:
        name: of the table.
        copy: the directory of its copy.
        log: the log.
        application: commits it.
        done: the LSN of the application's last commit.
        end: the LSN of this one.
        overwrite: the new columns, if all files of the log are replaced.
        rewritten: the files of the log that are written again.
        parts: the new files.
    """

    name: TableName
    copy: str
    log: LakeDelta
    application: str
    done: Lsn | None
    end: Lsn
    overwrite: pa.Schema | None
    rewritten: Sequence[RewrittenFiles]
    parts: Sequence[LogPart]


def log_parts(directory: str, sources: Sequence[Source], schema: TableSchema, after: int, target_rows: int) -> list[LogPart]:
    """The files for changes, in order. The changes of a file have one replica identity, and are of one copy or none."""
    parts: list[LogPart] = []
    last: tuple[Copied | None, Identity] | None = None
    for source in sources:
        file = source.file
        kind = (source.copied, Identity.of(file.schema))
        if parts and kind == last and parts[-1].rows < target_rows:
            before = parts[-1]
            parts[-1] = replace(before, files=(*before.files, file.path), rows=before.rows + file.rows)
            continue
        last = kind
        parts.append(
            LogPart(
                directory=directory,
                schema=schema.with_identity(kind[1].kind, kind[1].fields),
                files=(file.path,),
                copied=source.copied,
                after=after if source.copied is None else 0,
                rows=file.rows,
            )
        )
    return parts


def clearing(parts: Sequence[LogPart], directory: str, schema: TableSchema, copied: Copied) -> list[LogPart]:
    """Let the copy begin with a ``t``, even if it has no rows."""
    first = next((number for number, part in enumerate(parts) if part.copied is not None), None)
    if first is not None:
        return [replace(part, clears=number == first) for number, part in enumerate(parts)]
    return [LogPart(directory=directory, schema=schema, files=(), copied=copied, clears=True, rows=1), *parts]
