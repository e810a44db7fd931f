"""Features of Delta tables that other writers may enable, and that delta-rs cannot write, or does not check.

Source: Delta protocol, Valid Feature Names in Table Features, and the writer requirements of each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, Field, QueryBuilder, Schema
from deltalake.exceptions import DeltaError
from deltalake.table import ProtocolVersions
from deltalake.transaction import AddAction, create_table_with_add_actions

__all__ = ["ENABLE_FEED", "ENABLE_VECTORS", "PHYSICAL_NAME", "is_append_only", "unwritable", "violated", "with_deletion_vectors"]

_WRITABLE: Final = frozenset(
    (
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
    )
)
ENABLE_VECTORS: Final = "delta.enableDeletionVectors"
ENABLE_FEED: Final = "delta.enableChangeDataFeed"
"""A property of tables."""
_VECTORS: Final = "deletionVectors"
_LEGACY_WRITER: Final = (
    (2, ("appendOnly", "invariants")),
    (3, ("checkConstraints",)),
    (4, ("changeDataFeed", "generatedColumns")),
    (5, ("columnMapping",)),
    (6, ("identityColumns",)),
)
"""What a table's writer version implies, before version 7."""
_COMPUTED: Final = ("delta.generationExpression", "delta.identity.start", "delta.invariants")
_CONSTRAINT: Final = "delta.constraints."
PHYSICAL_NAME: Final = "delta.columnMapping.physicalName"


def unwritable(table: DeltaTable, *, columns: bool) -> str | None:
    """What prevents delta-rs from writing a table, or from changing its ``columns``. None: nothing."""
    protocol, configuration = table.protocol(), table.metadata().configuration
    unknown = {*(protocol.writer_features or ()), *(protocol.reader_features or ())} - _WRITABLE
    if "rowTracking" in unknown:
        return 'table feature "rowTracking" (property delta.enableRowTracking)'
    if unknown:
        # others need domainMetadata, and enable it
        return f'table feature "{min(unknown - {"domainMetadata"}, default="domainMetadata")}"'
    if is_append_only(table):
        return "property delta.appendOnly"
    mapping = configuration.get("delta.columnMapping.mode", "none")
    for field in table.schema().fields:
        metadata = field.metadata
        if not metadata.keys().isdisjoint(_COMPUTED):
            return f'column "{field.name}", which is computed or has an invariant'
        if mapping != "none" and metadata.get(PHYSICAL_NAME, field.name) != field.name:
            return f'column "{field.name}", which was renamed (column mapping)'
    if mapping == "id" or (mapping != "none" and columns):
        return "new columns with column mapping" if columns else "column mapping by ID"
    return None


def is_append_only(table: DeltaTable) -> bool:
    """Whether a property of a table forbids to change rows. No engine can follow the publisher's UPDATE and DELETE then."""
    return bool(table.metadata().configuration.get("delta.appendOnly", "").lower() == "true")


def with_deletion_vectors(protocol: ProtocolVersions) -> dict[str, Any] | None:
    """The ``protocol`` action that allows deletion vectors. None: they are allowed."""
    readers, writers = {*(protocol.reader_features or ())}, {*(protocol.writer_features or ())}
    if _VECTORS in writers:
        return None
    if protocol.min_writer_version < 7:
        writers.update(name for version, names in _LEGACY_WRITER if version <= protocol.min_writer_version for name in names)
    if protocol.min_reader_version == 2:
        readers.add("columnMapping")
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted({*readers, _VECTORS}),
        "writerFeatures": sorted({*writers, *readers, _VECTORS}),
    }


def violated(table: DeltaTable, files: Iterable[tuple[str, int, str]]) -> str | None:
    """The first CHECK constraint that rows of new files (path, size, statistics) violate, or that cannot be evaluated."""
    constraints = {
        name.removeprefix(_CONSTRAINT): text for name, text in table.metadata().configuration.items() if name.startswith(_CONSTRAINT)
    }
    actions = [AddAction(path, size, {}, 0, True, stats) for path, size, stats in files]
    if not constraints or not actions:
        return None
    with tempfile.TemporaryDirectory(prefix="subscriber-") as place:
        log = str(Path(place) / "t")
        # without the columns' metadata, such as numbers of column mapping
        create_table_with_add_actions(log, Schema([Field(field.name, field.type) for field in table.schema().fields]), actions)
        for name, text in constraints.items():
            query = f"SELECT count(*) FROM t WHERE ({text}) IS NOT TRUE"  # noqa: S608 -- an expression that a writer of the table set
            try:
                found = pa.table(QueryBuilder().register("t", DeltaTable(log)).execute(query).read_all()).column(0)[0].as_py()
            except DeltaError:
                return f'CHECK constraint "{name}" cannot be evaluated'
            if found:
                return f'{found} rows violate CHECK constraint "{name}"'
    return None
