"""What a kind of target implements so that a catalog of subscriptions can be kept in it: rows, transactions, locks, a wait.

The logic over it is written once: :mod:`.subscriptions` (the verbs), :mod:`.states` (one subscription's rows), :mod:`.statistics`
and :mod:`.observing`. What is written with each batch, the position and the fence, is not written through this: it is one statement of the
sink's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from subscriber.abc import TableName
from subscriber.catalog.model import Table
from subscriber.errors import RelationError

__all__ = ["CATALOG_KEY", "LAUNCHER_KEY", "Plus", "Row", "Rows", "Store", "verb_key", "writer_key"]

CATALOG_KEY: Final = "catalog"
"""Held while the catalog is made or migrated, and while a subscription's entry is made."""
LAUNCHER_KEY: Final = "launcher"
"""Of the target's one launcher."""


def writer_key(oid: int) -> str:
    """Of the subscription's one writer."""
    return f"writer-{oid}"


def verb_key(oid: int) -> str:
    """Of a verb at work on the subscription."""
    return f"verb-{oid}"


@dataclass(frozen=True, slots=True)
class Plus:
    """In :meth:`Rows.update`: the column's value is increased by this."""

    number: int


Row = Mapping[str, Any]
"""Values by column, of the types that :class:`subscriber.catalog.model.Kind` names."""


class Rows(Protocol):
    """The catalog's rows, in a transaction that is open.

    ``where`` gives values by column: rows are meant that have all of them. A list stands for any of its values.
    """

    @property
    def hidden(self) -> frozenset[str]:
        """Columns that this session may not read; :meth:`select` gives None for them."""
        ...

    async def select(self, table: Table, where: Row, *, lock: bool = False) -> Sequence[Row]:
        """Read rows.

        A table of ``pg_subscription_rel`` that was dropped in the target may have None for its name.

        Args:
            table: which.
            where: see the class.
            lock: wait for transactions that change one of them, and keep others from that until the end of the transaction.

        Raises:
            TargetError: one of them has a value that this program does not know.
        """
        ...

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Add rows. Columns that only this kind of target has are filled in."""
        ...

    async def update(self, table: Table, where: Row, values: Row) -> int:
        """Change rows; return how many. A value may be a :class:`Plus`."""
        ...

    async def delete(self, table: Table, where: Row) -> None:
        """Remove rows."""
        ...

    async def new_oid(self) -> int:
        """A number that no subscription in this target has had."""
        ...

    async def relids(self, tables: Sequence[TableName]) -> Mapping[TableName, int | RelationError]:
        """The number that each table gets which is added to a subscription; or why it cannot be added: native's words."""
        ...

    async def target_identifier(self) -> str:
        """What tells this target from all others."""
        ...


class Store(Protocol):
    """A session with a target that has a catalog."""

    @property
    def tables(self) -> Sequence[Table]:
        """All tables with rows of subscriptions; ``pg_subscription`` is the last."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Rows]:
        """Read and write; all or nothing, durable when the block is left.

        Raises:
            TargetUnavailable: the connection was lost; it is open whether the transaction took effect.
            TargetError
        """
        ...

    def reading(self) -> AbstractAsyncContextManager[Rows]:
        """Only read.

        Raises:
            TargetUnavailable, TargetError
        """
        ...

    async def take_lock(self, key: str, what: str, wait: float | None = None, *, lost: int | None = None) -> None:
        """Take a lock. It is released at the latest when the session or its process ends.

        Args:
            key: of the lock.
            what: is active for another process, as the error says.
            wait: seconds; None: ten.
            lost: number of a session that this process has lost: if that one has the lock, it is terminated.

        Raises:
            SubscriptionInUse: another session still has it after that time.
        """
        ...

    @property
    def session_number(self) -> int | None:
        """Of the session that takes locks, if the target numbers its sessions."""
        ...

    async def release_lock(self, key: str) -> None:
        """Release a lock; fine if it is not ours.

        Raises:
            TargetUnavailable: the session was lost, and the lock with it.
        """
        ...

    async def held_locks(self, keys: Collection[str]) -> Collection[str]:
        """Those of ``keys`` that any session holds, this one included."""
        ...

    async def live_workers(self, workers: Sequence[Row]) -> Mapping[tuple[int, int], int | None]:
        """Which rows of ``worker`` are current, by ``subid`` and ``relid``, each with the worker's process id in the target."""
        ...

    async def shut_out(self, oid: int) -> None:
        """See that nothing of an earlier writer is written any more. To be called under the writer's lock."""
        ...

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Names of the prepared transactions that a subscription holds in the target."""
        ...

    async def notify(self) -> None:
        """Wake those that :meth:`wait`."""
        ...

    async def wait(self, timeout: float) -> None:
        """Return when something was changed, or after ``timeout`` seconds.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        ...

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...
