"""The tables of a target's catalog, declared once. Each kind of target maps the kinds of columns to its own types.

Tables and columns have the same names as in PostgreSQL's system catalogs, where they hold the same data:

``pg_subscription``
    one row for each subscription of this program.
``pg_subscription_rel``
    the state of each table. ``srrelid`` is the table's number in the target, ``srnspname`` and ``srrelname`` are its name. ``srcolumns``
    are the columns of the publisher that its columns follow (:class:`subscriber.transaction.column_history.KnownColumns`).
``position``
    the position of the subscription (``srrelid`` 0), and of each table that catches up.
``worker``
    the latest reports of the workers of a process, renewed about once a second.
``subscription_stats``
    counters, and the last error.
``snapshot_request``
    what a verb asks the process that runs a subscription to do at one LSN (:mod:`subscriber.catalog.snapshot_requests`).
``verification``
    the last verification of each table.
``migration``
    the steps of a migration that were made (:mod:`subscriber.subscription.migration`).

A kind of target can add columns and tables that only it needs (:meth:`Table.extended`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Self

from subscriber.config import STORED, Option
from subscriber.errors import TargetError
from subscriber.interfaces import SyncMode

__all__ = [
    "COUNTERS",
    "MIGRATION",
    "PG_SUBSCRIPTION",
    "PG_SUBSCRIPTION_REL",
    "POSITION",
    "SNAPSHOT_REQUEST",
    "SUBSCRIPTION_STATS",
    "VERIFICATION",
    "WORKER",
    "Column",
    "Kind",
    "Table",
    "known_values",
]


class Kind(Enum):
    """The kinds of columns, each with the Python type of its values."""

    OID = auto()
    """``int``."""
    INTEGER = auto()
    """``int``."""
    REAL = auto()
    """``float``."""
    TIME = auto()
    """``float``: seconds since 1970."""
    BOOLEAN = auto()
    """``bool``."""
    CODE = auto()
    """``str`` of one letter."""
    NAME = auto()
    """``str`` of at most 63 bytes."""
    TEXT = auto()
    """``str``."""
    LONG_TEXT = auto()
    """``str`` that may have more than 64 kB."""
    NAMES = auto()
    """``tuple[str, ...]``."""
    LSN = auto()
    """:class:`subscriber.protocol.lsn.Lsn`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: its name.
        kind: the kind of its values.
        null: whether it may be NULL.
        length: the largest number of characters of a TEXT; None: no limit.
        unique: no two rows have the same value.
        default: its value in a row that is inserted without one.
    """

    name: str
    kind: Kind
    null: bool = False
    length: int | None = None
    unique: bool = False
    default: Any = None


class Table:
    """One table.

    Attributes:
        name: its name.
        subscription: the column that holds the subscription's oid; None: its rows do not belong to a subscription.
        columns: its columns by name.
        key: the columns of its primary key.
    """

    def __init__(self, name: str, *columns: Column, key: tuple[str, ...] = (), subscription: str | None = None) -> None:
        self.name = name
        self.subscription = subscription
        self.key = key
        self.columns = {column.name: column for column in columns}

    def extended(self, *columns: Column) -> Self:
        """A copy of the table with further columns."""
        return type(self)(self.name, *self.columns.values(), *columns, key=self.key, subscription=self.subscription)

    def __repr__(self) -> str:
        return f"<table {self.name}>"


@contextlib.contextmanager
def known_values(table: Table) -> Iterator[None]:
    """Convert the errors of code that reads values of the catalog.

    Raises:
        TargetError: this program does not know one of the values.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, StopIteration) as error:
        raise TargetError(
            f"the catalog in the target holds a value in {table.name} that this program does not know: {error}",
            hint="restore the catalog from a backup",
        ) from None


def _option_column(option: Option) -> Column:
    kinds = {bool: Kind.BOOLEAN, int: Kind.INTEGER, float: Kind.REAL, str: Kind.CODE if option.codes else Kind.TEXT}
    kind = kinds[type(option.default)]
    length = option.length if kind is Kind.TEXT else None
    return Column(option.column, kind, length=length, default=option.stored(option.default))


PG_SUBSCRIPTION: Final = Table(
    "pg_subscription",
    Column("oid", Kind.OID),
    Column("subname", Kind.NAME, unique=True),
    Column("subenabled", Kind.BOOLEAN),
    Column("subslotname", Kind.NAME, null=True),
    Column("subpublications", Kind.NAMES),
    Column("subtwophasestate", Kind.CODE),
    Column("subskiplsn", Kind.LSN),
    *map(_option_column, STORED.values()),
    Column("subconninfo", Kind.TEXT, null=True),
    Column("submade", Kind.BOOLEAN),
    Column("subgeneration", Kind.INTEGER),
    Column("subrefresh", Kind.TEXT, length=10, null=True),
    key=("oid",),
    subscription="oid",
)


PG_SUBSCRIPTION_REL: Final = Table(
    "pg_subscription_rel",
    Column("srsubid", Kind.OID),
    Column("srrelid", Kind.OID),
    Column("srnspname", Kind.NAME),
    Column("srrelname", Kind.NAME),
    Column("srsubstate", Kind.CODE),
    Column("srsublsn", Kind.LSN, null=True),
    Column("srmode", Kind.CODE, default=SyncMode.COPY.value),
    Column("srerror", Kind.TEXT, null=True),
    Column("srerrortime", Kind.TIME, null=True),
    Column("srcolumns", Kind.LONG_TEXT, null=True),
    key=("srsubid", "srrelid"),
    subscription="srsubid",
)

POSITION: Final = Table(
    "position",
    Column("srsubid", Kind.OID),
    Column("srrelid", Kind.OID),
    Column("slot_name", Kind.TEXT, length=63),
    Column("system_identifier", Kind.TEXT, length=20),
    Column("timeline", Kind.INTEGER),
    Column("remote_lsn", Kind.LSN),
    key=("srsubid", "srrelid"),
    subscription="srsubid",
)

WORKER: Final = Table(
    "worker",
    Column("subid", Kind.OID),
    Column("relid", Kind.OID),
    Column("worker_type", Kind.TEXT, length=40),
    Column("received_lsn", Kind.LSN, null=True),
    Column("applied_lsn", Kind.LSN, null=True),
    Column("flushed_lsn", Kind.LSN, null=True),
    Column("last_msg_send_time", Kind.TIME, null=True),
    Column("last_msg_receipt_time", Kind.TIME, null=True),
    Column("latest_end_lsn", Kind.LSN, null=True),
    Column("latest_end_time", Kind.TIME, null=True),
    Column("transactions", Kind.INTEGER, null=True),
    Column("changes", Kind.INTEGER, null=True),
    Column("transactions_per_second", Kind.REAL, null=True),
    Column("changes_per_second", Kind.REAL, null=True),
    Column("copied_rows", Kind.INTEGER, null=True),
    Column("estimated_rows", Kind.INTEGER, null=True),
    Column("details", Kind.LONG_TEXT, null=True),
    key=("subid", "relid"),
    subscription="subid",
)

COUNTERS: Final = (
    "apply_error_count",
    "sync_error_count",
    "confl_insert_exists",
    "confl_update_origin_differs",
    "confl_update_exists",
    "confl_update_missing",
    "confl_delete_origin_differs",
    "confl_delete_missing",
    "confl_multiple_unique_conflicts",
)
"""The counters, named as in pg_stat_subscription_stats and as in :class:`subscriber.interfaces.ApplyStatistics`."""

SUBSCRIPTION_STATS: Final = Table(
    "subscription_stats",
    Column("subid", Kind.OID),
    *(Column(name, Kind.INTEGER) for name in COUNTERS),
    Column("stats_reset", Kind.TIME, null=True),
    Column("last_error", Kind.TEXT, null=True),
    Column("last_error_time", Kind.TIME, null=True),
    key=("subid",),
    subscription="subid",
)

SNAPSHOT_REQUEST: Final = Table(
    "snapshot_request",
    Column("subid", Kind.OID),
    Column("request", Kind.TEXT, length=36),
    Column("state", Kind.CODE),
    Column("payload", Kind.LONG_TEXT, null=True),
    Column("answer", Kind.LONG_TEXT, null=True),
    key=("subid",),
    subscription="subid",
)

VERIFICATION: Final = Table(
    "verification",
    Column("subid", Kind.OID),
    Column("nspname", Kind.NAME),
    Column("relname", Kind.NAME),
    Column("lsn", Kind.LSN),
    Column("whole_lsn", Kind.LSN),
    Column("verified_at", Kind.TIME),
    Column("row_count", Kind.INTEGER),
    Column("differences", Kind.INTEGER),
    Column("more", Kind.BOOLEAN),
    Column("seconds", Kind.REAL),
    Column("compared", Kind.TEXT, length=32),
    Column("publisher_xmin", Kind.INTEGER),
    Column("target_xmin", Kind.INTEGER),
    Column("publisher_system", Kind.TEXT, length=20),
    Column("target_system", Kind.TEXT, length=20),
    key=("subid", "nspname", "relname"),
    subscription="subid",
)

MIGRATION: Final = Table(
    "migration",
    Column("subid", Kind.OID),
    Column("step", Kind.TEXT, length=40),
    Column("began_at", Kind.TIME),
    Column("ended_at", Kind.TIME),
    key=("subid", "step"),
    subscription="subid",
)
