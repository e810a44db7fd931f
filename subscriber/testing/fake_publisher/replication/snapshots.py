"""Snapshots: the committed rows of all tables at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subscriber.testing.fake_publisher.tables import RowValues, TableShape

__all__ = ["Snapshot", "TableContent"]


@dataclass(frozen=True, slots=True)
class TableContent:
    """The rows of one table."""

    shape: TableShape
    rows: tuple[RowValues, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot.

    Attributes:
        name: for SET TRANSACTION SNAPSHOT, or empty.
        tables: by oid.
    """

    name: str
    tables: Mapping[int, TableContent]
