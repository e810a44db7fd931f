"""The interface of a target for the suite: it creates tables, and reads their rows without the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from subscriber.config import Settings
from subscriber.interfaces import Sink
from subscriber.testing.compliance.sample_messages import Table

__all__ = ["ComplianceTarget", "Row", "SettableTarget", "Traits", "WorkersTarget"]

Row = tuple[object, ...]
"""Values in the order of the table's columns: PostgreSQL's text, or the value of the target's driver. None is NULL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the suite cannot learn from a sink: how its tables behave."""

    any_key: bool = False
    """The sink finds rows by any unique key of the target that is part of the publisher's replica identity. Otherwise it uses the primary
    key, or the target's own replica identity, as PostgreSQL does."""
    given_tables: bool = True
    """A user creates its tables beforehand. Missing columns are reported, additional ones are ignored. Otherwise the sink creates the
    tables."""
    constraints: bool = True
    """Its tables reject duplicate keys, NULL in NOT NULL columns, and texts that are not valid for their type."""
    shared_tables: bool = True
    """Other programs may write into its tables too."""
    several_subscriptions: bool = True
    """One target can hold any number of subscriptions."""
    binary: bool = True
    """The sink accepts values in the binary format."""
    counts_missing: bool = True
    """:attr:`subscriber.interfaces.Stream.statistics` counts rows that a change did not find. If not, another program counts."""
    copies_visible: bool = True
    """Rows are visible once they are copied. Otherwise only when the apply worker has taken over the table."""


class ComplianceTarget(Protocol):
    """A target that is empty at the start of a scenario. It is never accessed through the sink.

    Implement it for your sink, and run :data:`subscriber.testing.compliance.SCENARIOS` on it.
    """

    @property
    def traits(self) -> Traits:
        """How its tables behave. A class attribute is enough."""
        ...

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
    """A target whose sink honours the settings ``create_tables`` and ``schema_change``."""

    def new_sink_with(self, settings: Settings) -> Sink:
        """Return a new sink with these settings, as :meth:`new_sink`."""
        ...


@runtime_checkable
class WorkersTarget(ComplianceTarget, Protocol):
    """A target whose sink honours the setting ``apply_workers``. If a sink has that ability, its target must be one."""

    def new_sink_with_workers(self, workers: int) -> Sink:
        """Return a new sink that applies transactions in so many sessions, as :meth:`new_sink`."""
        ...
