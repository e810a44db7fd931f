"""The values of a verification: what to compare, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from subscriber.catalog.verifications import TableVerification
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn

__all__ = [
    "Progress",
    "Quiet",
    "RowDifference",
    "RowKind",
    "TableReport",
    "VerificationLimits",
    "VerificationReport",
]


class RowKind(StrEnum):
    """How a row differs."""

    MISSING = "missing"
    """Only the publisher has it."""
    EXTRA = "extra"
    """Only the target has it."""
    DIFFERENT = "different"
    """Both have a row with this key, with other values."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One row that differs.

    Attributes:
        kind: how.
        key: values of the key by column; empty for a table without a key.
        columns: the columns that differ, for DIFFERENT.
        count: how many such rows; more than one only without a key.
        publisher, target: values by column, or None; only if they were asked for.
    """

    kind: RowKind
    key: Mapping[str, str | None] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    count: int = 1
    publisher: Mapping[str, str | None] | None = None
    target: Mapping[str, str | None] | None = None

    def to_json(self) -> dict[str, Any]:
        """The difference as an object of the JSON report."""
        found: dict[str, Any] = {"kind": self.kind.value, "key": dict(self.key)}
        if self.columns:
            found["columns"] = list(self.columns)
        if self.count > 1:
            found["count"] = self.count
        for side in ("publisher", "target"):
            if (values := getattr(self, side)) is not None:
                found[side] = dict(values)
        return found


@dataclass(slots=True)
class TableReport:
    """The result of one table.

    Attributes:
        table: its name.
        key: the columns that name its rows; empty: rows are compared as a multiset.
        same_keys: the text of a key names the row on both sides; else equal keys may have other texts there.
        publisher_rows, target_rows: how many rows were compared on each side.
        ranges: into how many parts it was divided.
        differing_ranges: how many of them differ.
        columns: the compared columns.
        row_filters: the row filters of the publications: a row is compared if one of them is true. Empty: all rows are compared.
        changed_only: only rows that changed since the last verification were read.
        whole_lsn: with ``changed_only``, the position of the publisher at which all rows were last compared.
        differences: the rows that differ.
        more: whether there are more differences than ``differences`` has.
        left_out: why the table was not compared; None: it was.
        seconds: how long it took.
    """

    table: TableName
    key: tuple[str, ...] = ()
    same_keys: bool = True
    publisher_rows: int = 0
    target_rows: int = 0
    ranges: int = 0
    differing_ranges: int = 0
    columns: tuple[str, ...] = ()
    row_filters: tuple[str, ...] = ()
    changed_only: bool = False
    whole_lsn: Lsn | None = None
    differences: list[RowDifference] = field(default_factory=list)
    more: bool = False
    left_out: str | None = None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether it was compared and no difference was found."""
        return self.left_out is None and not self.differing_ranges

    @property
    def summary(self) -> str:
        """How many rows differ, by kind, for example "1 missing, 2 different"."""
        counts = Counter[RowKind]()
        for row in self.differences:
            counts[row.kind] += row.count
        return ("at least " if self.more else "") + ", ".join(f"{counts[kind]:,} {kind.value}" for kind in RowKind if counts[kind])

    def to_json(self) -> dict[str, Any]:
        """The table as an object of the JSON report."""
        return {
            "schema": self.table.namespace,
            "table": self.table.name,
            "equal": self.equal if self.left_out is None else None,
            "left_out": self.left_out,
            "key": list(self.key),
            "columns": list(self.columns),
            "row_filters": list(self.row_filters),
            "publisher_rows": self.publisher_rows,
            "target_rows": self.target_rows,
            "ranges": self.ranges,
            "differing_ranges": self.differing_ranges,
            "changed_only": self.changed_only,
            "whole_lsn": None if self.whole_lsn is None else str(self.whole_lsn),
            "seconds": round(self.seconds, 3),
            "differences": [each.to_json() for each in self.differences],
            "more_differences": self.more,
        }


@dataclass(slots=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        subscription: its name.
        lsn: both sides were compared as of this position of the publisher; None: the target has no snapshots.
        held_seconds: how long apply was held.
        tables: the results, sorted by name.
        seconds: how long all took.
        publisher_system: the publisher's system identifier; empty: unknown.
        target_system: identifies the target among all others; empty: unknown.
        results: what was stored in the target's catalog, for each table that was compared.
    """

    subscription: str
    lsn: Lsn | None
    held_seconds: float
    tables: Sequence[TableReport]
    seconds: float = 0.0
    publisher_system: str = ""
    target_system: str = ""
    results: Sequence[TableVerification] = ()

    @property
    def equal(self) -> bool:
        """Whether all tables were compared and are equal."""
        return all(table.equal for table in self.tables)

    @property
    def differing(self) -> Sequence[TableReport]:
        """The tables that were compared and differ."""
        return [table for table in self.tables if table.left_out is None and not table.equal]

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "subscription": self.subscription,
            "publisher_system": self.publisher_system,
            "target_system": self.target_system,
            "lsn": None if self.lsn is None else str(self.lsn),
            "equal": self.equal,
            "held_seconds": self.held_seconds,
            "seconds": round(self.seconds, 3),
            "tables": [table.to_json() for table in self.tables],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationLimits:
    """How much a verification may do.

    Attributes:
        jobs: sessions on each side.
        max_rate: rows per second on each side; None: no limit.
        max_differences: how many rows of a table are named.
        show_values: whether the report has the values of differing rows.
        max_reads: how many times a part may be read to find the rows that differ; None: no limit.
    """

    jobs: int = 2
    max_rate: int | None = None
    max_differences: int = 1000
    show_values: bool = False
    max_reads: int | None = None


class Progress(Protocol):
    """Receives the progress. Calls must not block."""

    def waiting(self, what: str) -> None:
        """The verification waits for something."""
        ...

    def opened(self, lsn: Lsn | None, held_seconds: float, tables: int, rows: int) -> None:
        """Both snapshots are open; so many rows are expected."""
        ...

    def advanced(self, table: TableName, rows: int) -> None:
        """So many further rows of a table were compared."""
        ...

    def finished(self, report: TableReport) -> None:
        """A table is done."""
        ...


class Quiet:
    """Ignores all calls."""

    def waiting(self, what: str) -> None:
        """Nothing."""

    def opened(self, lsn: Lsn | None, held_seconds: float, tables: int, rows: int) -> None:
        """Nothing."""

    def advanced(self, table: TableName, rows: int) -> None:
        """Nothing."""

    def finished(self, report: TableReport) -> None:
        """Nothing."""
