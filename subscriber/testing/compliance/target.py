"""The interface of a target for the suite: it creates tables, and reads their rows without the sink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from subscriber.abc import Sink
from subscriber.config import Settings
from subscriber.testing.compliance.sample_messages import Table

__all__ = ["ComplianceTarget", "Row", "SettableTarget"]

Row = tuple[object, ...]
"""Values in the order of the table's columns: PostgreSQL's text, or the value of the target's driver. None is NULL."""


class ComplianceTarget(Protocol):
    """A target that is empty at the start of a scenario. It is never accessed through the sink.

    Implement it for your sink, and run :data:`subscriber.testing.compliance.SCENARIOS` on it.
    """

    def new_sink(self) -> Sink:
        """Return a new sink that is not open. All sinks of a target use the same catalog and tables, as several processes would."""
        ...

    async def create_table(self, table: Table) -> None:
        """Create the table: its columns, primary key and unique constraint. Columns that only the target has get their defaults."""
        ...

    async def rows(self, table: Table) -> list[Row]:
        """Return all committed rows, in any order."""
        ...

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows into the table, as another program would: texts or None, one for each column."""
        ...

    async def clear(self, table: Table) -> None:
        """Delete all rows of the table, as another program would."""
        ...


@runtime_checkable
class SettableTarget(ComplianceTarget, Protocol):
    """A target whose sink declares ``creates_tables``, ``follows_columns`` or ``upserts``."""

    def new_sink_with(self, settings: Settings) -> Sink:
        """Return a new sink with these settings, as :meth:`new_sink`."""
        ...
