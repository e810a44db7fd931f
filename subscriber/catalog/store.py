"""The primitives that a kind of target implements to store a catalog of subscriptions: rows, transactions, locks, notifications.

The logic above them is written once: :mod:`.subscriptions` (the verbs), :mod:`.subscription_rows` (one subscription's rows),
:mod:`.statistics` and :mod:`.observe`. The sink itself writes the position and checks the fence of each batch, with its own statements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from subscriber.catalog.model import Table
from subscriber.errors import RelationError
from subscriber.interfaces import TableName

__all__ = ["CATALOG_KEY", "LAUNCHER_KEY", "FiringTrigger", "Plus", "Row", "Rows", "SharedTable", "Store", "verb_key", "writer_key"]

CATALOG_KEY: Final = "catalog"
"""Key of the lock that is held while the catalog is created, and while a subscription is added or renamed."""
LAUNCHER_KEY: Final = "launcher"
"""Key of the lock that the target's only launcher holds."""


def writer_key(oid: int) -> str:
    """Key of the lock that the subscription's only writer holds."""
    return f"writer-{oid}"


def verb_key(oid: int) -> str:
    """Key of the lock that a verb holds while it works on the subscription: the claim."""
    return f"verb-{oid}"


@dataclass(frozen=True, slots=True)
class Plus:
    """A value for :meth:`Rows.update` that increases the column by ``number``."""

    number: int


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table that has rows of another one: the same, or its ancestor or descendant in a tree of partitions or of inheritance.

    Attributes:
        name: the table's.
        relid: its number in the target; None: its name tells it from all others.
        of: the table that was asked for.
        native: a subscription of PostgreSQL itself that writes the table.
    """

    name: TableName
    relid: int | None
    of: TableName
    native: str | None = None


@dataclass(frozen=True, slots=True)
class FiringTrigger:
    """A trigger of the target that fires for changes that are applied.

    Attributes:
        table: its table.
        name: its name.
        disable: SQL that keeps it from firing.
        enable: what undoes that.
    """

    table: TableName
    name: str
    disable: str
    enable: str

    @property
    def reads_parked(self) -> RelationError:
        """The error of ``on_error = park``."""
        return RelationError(
            f'trigger "{self.name}" of table "{self.table}" fires for changes, and may read a table that is parked',
            sqlstate="55000",
            hint=f"{self.disable}, or use on_error = retry",
        )

    def fires_for_replaced(self, table: TableName) -> RelationError:
        """The error of a table that is reconciled: a row that is only updated is deleted and stored again, which it would see."""
        return RelationError(
            f'trigger "{self.name}" of table "{self.table}" fires for the rows that are deleted and written while table "{table}" is'
            " reconciled",
            sqlstate="55000",
            hint=f"{self.disable}; afterwards {self.enable}",
        )


Row = Mapping[str, Any]
"""Values by column. :class:`subscriber.catalog.model.Kind` defines their types."""


class Rows(Protocol):
    """The catalog's rows, in an open transaction.

    ``where`` holds values by column, and selects the rows that have all these values. A list matches any of its values.
    """

    @property
    def hidden(self) -> frozenset[str]:
        """Columns that this session may not read; :meth:`select` gives None for them."""
        ...

    async def select(self, table: Table, where: Row, *, lock: bool = False) -> Sequence[Row]:
        """Read rows.

        Args:
            table: the table.
            where: see the class.
            lock: lock the rows: wait for transactions that change one of them, and keep other transactions from changing them until the
                end of this transaction.

        Raises:
            TargetError: one of them has a value that this program does not know.
        """
        ...

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Insert rows. The target itself fills in columns that only this kind of target has."""
        ...

    async def update(self, table: Table, where: Row, values: Row) -> int:
        """Update rows; return their number. A value may be a :class:`Plus`."""
        ...

    async def delete(self, table: Table, where: Row) -> None:
        """Delete rows."""
        ...

    async def new_oid(self) -> int:
        """Return a number that no subscription in this target has had."""
        ...

    async def relids(self, tables: Sequence[TableName]) -> Mapping[TableName, int | RelationError]:
        """Return the number of each table that is to be added to a subscription, or why it cannot be added, in PostgreSQL's words."""
        ...

    async def sharing(self, tables: Sequence[TableName]) -> Sequence[SharedTable]:
        """Return the tables that have rows of these tables, including themselves."""
        ...

    async def firing_trigger(self, tables: Sequence[TableName]) -> FiringTrigger | None:
        """Return a trigger of one of these tables, or of their partitions, that fires for changes that are applied."""
        ...

    async def target_identifier(self) -> str:
        """Return a text that identifies this target among all others."""
        ...


class Store(Protocol):
    """A connection to a target that has a catalog."""

    @property
    def tables(self) -> Sequence[Table]:
        """All tables that hold rows of subscriptions; ``pg_subscription`` is the last."""
        ...

    @property
    def prepared_tables(self) -> Sequence[Table]:
        """Those of :attr:`tables` that hold prepared transactions; empty: they are the database's own."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Rows]:
        """Open a transaction that reads and writes. It is durable when the block ends, and rolled back after an error.

        Raises:
            TargetUnavailable: the connection was lost; it is not known whether the transaction took effect.
            TargetError
        """
        ...

    def reading(self) -> AbstractAsyncContextManager[Rows]:
        """Open a transaction that only reads.

        Raises:
            TargetUnavailable, TargetError
        """
        ...

    async def take_lock(self, key: str, what: str, wait: float | None = None, *, lost: int | None = None) -> None:
        """Take a lock. It is released when the session or its process ends, or before by :meth:`release_lock`.

        Args:
            key: the key of the lock.
            what: names the locked object in the error: "<what> is active for PID …".
            wait: how many seconds to wait for the lock; None: ten.
            lost: the number of a session that this process has lost: if that session has the lock, it is terminated.

        Raises:
            SubscriptionInUse: another session still has the lock after that time.
        """
        ...

    @property
    def session_number(self) -> int | None:
        """The number of the session that takes locks, if the target numbers its sessions."""
        ...

    async def release_lock(self, key: str) -> None:
        """Release a lock. Does nothing if this session does not have it.

        Raises:
            TargetUnavailable: the session was lost, and the lock with it.
        """
        ...

    @property
    def has_locks(self) -> bool:
        """Whether the target has locks. Without them :meth:`held_locks` finds none."""
        ...

    async def held_locks(self, keys: Collection[str]) -> Collection[str]:
        """Return those of ``keys`` that any session holds, including this one."""
        ...

    async def live_workers(self, workers: Sequence[Row]) -> Mapping[tuple[int, int], int | None]:
        """Return which rows of ``worker`` are current, by ``subid`` and ``relid``, each with the worker's process id in the target."""
        ...

    async def shut_out(self, oid: int) -> None:
        """Ensure that no earlier writer can write anything more. Call it under the writer's lock."""
        ...

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Return the names of the prepared transactions that a subscription has in the target."""
        ...

    async def notify(self) -> None:
        """Wake the processes in :meth:`wait`."""
        ...

    async def wait(self, timeout: float) -> None:
        """Return when the catalog may have changed, after ``timeout`` seconds at the latest.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        ...

    def now(self) -> float:
        """The time, in seconds since 1970."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
