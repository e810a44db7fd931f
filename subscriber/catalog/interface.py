"""The interface of a target's catalog of subscriptions for the verbs, the launcher and ``status``.

:class:`subscriber.interfaces.Sink` serves one subscription; a catalog serves all subscriptions of a target. A target stores the catalog
beside the replicated rows, so that a subscription's definition, its position and its rows are consistent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from subscriber.catalog.definition import Definition
from subscriber.interfaces import SubscriptionState, TableEntry, TableName

__all__ = ["Catalog", "MovableCatalog", "OwnedCatalog", "RestartingCatalog", "ResyncingCatalog"]


class Catalog(Protocol):
    """A session with a target's catalog. One call at a time, except for :meth:`wait`'s cancellation."""

    async def subscriptions(self) -> Sequence[Definition]:
        """Return all subscriptions, sorted by name.

        Raises:
            TargetUnavailable: the connection was lost: open the catalog again.
            TargetError: no privilege, or a catalog that this program does not know.
        """
        ...

    def create(self, definition: Definition) -> AbstractAsyncContextManager[Definition]:
        """Store a new subscription, not enabled and not made, and claim it until the block ends.

        If a killed process left a subscription of this name, remove that first (:meth:`claim`, :meth:`remove`).

        Raises:
            TargetError: the subscription already exists, in PostgreSQL's words.
        """
        ...

    def claim(self, name: str) -> AbstractAsyncContextManager[Definition]:
        """Keep all other processes from a subscription until the block ends; wait until the process that runs it has stopped.

        Gives the definition as it is then, with a new generation. A worker that is between two connections opens the sink again, sees the
        new generation, and stops.

        Raises:
            TargetError: the subscription does not exist, in PostgreSQL's words.
            SubscriptionInUse: the process that runs it, or another verb, does not stop.
        """
        ...

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns of a subscription, all or none. Call it under a claim.

        Args:
            oid: the subscription's.
            changes: new values by names of attributes of :class:`Definition` or of its options.

        Raises:
            TargetError: the new name is taken, in PostgreSQL's words.
        """
        ...

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove a subscription with its table states, positions and statistics. Call it under a claim.

        Returns:
            The names of prepared transactions that stay in the target: the user has to commit them or roll them back.
        """
        ...

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Store an error of a worker that could not report it itself.

        Args:
            oid: the subscription's.
            text: the error, one line.
            details: the worker's details until it reports again; None: do not change them.
        """
        ...

    async def reset_statistics(self, name: str) -> None:
        """Set a subscription's counters to zero and store the time. A process that runs it continues to count from there.

        Raises:
            TargetError: the subscription does not exist, in PostgreSQL's words.
        """
        ...

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Return the names of the prepared transactions that a subscription has in the target."""
        ...

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """Become the only launcher of this target until the session ends.

        Args:
            lost: the number that this method returned when this process became the launcher before, if that session was lost. The target
                may not have noticed that: if the session still has the lock, it is terminated.

        Returns:
            The number of this session in the target, if the target numbers its sessions.

        Raises:
            SubscriptionInUse: another process is the launcher.
        """
        ...

    async def wait(self, timeout: float) -> None:
        """Return when the catalog may have changed, after ``timeout`` seconds at the latest.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


@runtime_checkable
class ResyncingCatalog(Protocol):
    """A :class:`Catalog` that can let a subscription begin again, for some tables or for all.

    Attributes:
        reconciles: tables are compared with the publisher's. False: they are copied into new versions, which can only follow the old ones
            if their LSNs are higher.
    """

    reconciles: bool

    async def resync(self, oid: int, tables: Sequence[TableName], *, copy: bool) -> None:
        """Let the next run of the subscription synchronize these tables again. Call it under a claim.

        Args:
            oid: the subscription's.
            tables: of the subscription.
            copy: write all rows again. False: compare the rows, where this kind of target can do that, and write only what differs.

        Raises:
            RelationError: a table is not part of the subscription. Nothing was changed.
            TargetError: the target rejects it.
        """
        ...


@runtime_checkable
class RestartingCatalog(ResyncingCatalog, Protocol):
    """A :class:`ResyncingCatalog` that can let a subscription begin again at a new slot, with the rows that the target has."""

    async def restart(
        self, oid: int, *, accept_target: bool = False, dry_run: bool = False
    ) -> tuple[SubscriptionState, Mapping[TableName, TableEntry]]:
        """Forget the position, and let all tables be reconciled or copied. The next start creates the slot. Call it under a claim.

        Args:
            oid: the subscription's.
            accept_target: make this target the one of a subscription whose rows were restored or copied here.
            dry_run: make all checks, but change nothing. No claim is needed.

        Returns:
            The subscription and its tables, as they were before.

        Raises:
            ConfigurationError: the subscription's rows are a copy of another target's, or it has prepared transactions in the target.
            RelationError: rows of a table belong to another subscription, too.
            TargetError: the target rejects it.
        """
        ...


@runtime_checkable
class OwnedCatalog(Protocol):
    """A :class:`Catalog` of a target that has roles: each subscription has an owner.

    With ``run_as_owner`` changes are made with the owner's rights; without it, the owner must be able to become each table's owner.
    """

    async def set_owner(self, oid: int, role: str) -> None:
        """Change the owner of a subscription. Call it under a claim.

        Raises:
            TargetError: the role does not exist, or the current role cannot SET ROLE to it.
        """
        ...


@runtime_checkable
class MovableCatalog(Protocol):
    """A :class:`Catalog` that knows for which target its rows were written. It refuses those that were copied from another target."""

    def claim_copied(self, name: str) -> AbstractAsyncContextManager[Definition]:
        """As :meth:`Catalog.claim`, for a subscription whose rows may be copies."""
        ...

    async def accept_target(self, name: str) -> None:
        """Make this target the one of a subscription whose rows were restored or copied here.

        Raises:
            TargetError: the subscription does not exist, or a table is missing or was being copied. Nothing was changed.
            SubscriptionInUse: a process that runs it does not stop.
        """
        ...
