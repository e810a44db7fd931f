"""The Delta tables of a lake that its applier has open."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from subscriber.abc import TableName
from subscriber.errors import TargetError
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.foreign_commits import TableStopped

__all__ = ["OpenTables", "application", "is_readable", "load"]

_UNREADABLE: Final = re.compile("feature|protocol|unsupported", re.IGNORECASE)
"""In delta-rs' errors about tables that it cannot read."""
_PATH: Final = re.compile(r"\S*/\S*")


@dataclass(slots=True)
class OpenTables:
    """Opens each table once.

    Attributes:
        storage: of the lake.
        retain_hours: how long versions that were replaced can be read.
        opened: the tables by directory.
    """

    storage: Storage
    retain_hours: int = 24
    opened: dict[str, LakeDelta] = field(default_factory=dict)

    def of(self, name: TableName, table: LakeTable) -> LakeDelta:
        """The Delta table of a table. It is not loaded here, and may not exist yet."""
        directory = table_directory("tables", name, table.id)
        return self.opened.setdefault(directory, LakeDelta(self.storage, directory, self.retain_hours))

    def is_applied(self, lake: Lake, name: TableName, table: LakeTable) -> bool | None:
        """Whether the table has been committed since its last copy. False if it cannot be read. None if there is no Delta table."""
        delta = self.of(name, table)
        try:
            return delta.applied(application(lake, table)) is not None if load(delta) else None
        except TableStopped:
            return False


def application(lake: Lake, table: LakeTable) -> str:
    """The Delta application that commits a table since its last copy."""
    return f"subscriber-{lake.target_identifier}-{table.id}-{table.generation}"


def load(delta: LakeDelta) -> bool:
    """Load the newest version of a table. False if there is none.

    Raises:
        TableStopped: delta-rs cannot read this kind of table.
        TargetError: another error.
    """
    try:
        return delta.load()
    except TargetError as error:
        # paths in delta-rs' text may have these words too, and so may the lines of a stack trace below it
        told = str(error.__cause__).partition("\n")[0].replace(delta.uri, "")
        if _UNREADABLE.search(_PATH.sub("", told)):
            raise TableStopped(f"{error}", hint="remove the feature from the table: ALTER TABLE … DROP FEATURE") from error
        raise


def is_readable(delta: LakeDelta) -> bool:
    """Load a table. False if there is none, or if delta-rs cannot read it."""
    try:
        return load(delta)
    except TableStopped:
        return False
