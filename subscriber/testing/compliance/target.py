"""What the suite needs of a target beside its sink: tables made in it, and their rows read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from subscriber.abc import Sink
from subscriber.config import Settings
from subscriber.testing.compliance.values import Table

__all__ = ["ComplianceTarget", "Row", "SettableTarget"]

Row = tuple[object, ...]
"""Values in the order of the table's columns: PostgreSQL's text of each, or what the target's driver gives for it; None is NULL."""


class ComplianceTarget(Protocol):
    """A target that is empty at the beginning of a scenario, and looked at from the outside: never through the sink.

    Write one for your sink, and run :data:`subscriber.testing.compliance.SCENARIOS` over it.
    """

    def new_sink(self) -> Sink:
        """A sink for this target, not opened. Those of one target see the same catalog and the same tables, as several processes would."""
        ...

    async def create_table(self, table: Table) -> None:
        """Make the table: its columns, primary key and unique constraint. A column that only the target has takes its default."""
        ...

    async def rows(self, table: Table) -> list[Row]:
        """All rows, committed, in any order."""
        ...

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Put rows into the table, as somebody else would who writes into the target: texts or None, one for each column."""
        ...

    async def clear(self, table: Table) -> None:
        """Delete all rows of the table, as somebody else would."""
        ...


@runtime_checkable
class SettableTarget(ComplianceTarget, Protocol):
    """One whose sink declares ``creates_tables``, ``follows_columns`` or ``upserts``."""

    def new_sink_with(self, settings: Settings) -> Sink:
        """As :meth:`new_sink`, with these settings."""
        ...
