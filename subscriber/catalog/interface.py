"""What the verbs, the launcher and ``status`` need of a target's catalog of subscriptions.

:class:`subscriber.abc.Sink` is the work of one subscription; this is about all of them. A target keeps both in the same place, so that a
subscription's definition, its position and its rows are consistent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from subscriber.catalog.definition import Definition

__all__ = ["Catalog", "OwnedCatalog"]


class Catalog(Protocol):
    """A session with a target's catalog. One call at a time, except for :meth:`wait`'s cancellation."""

    async def subscriptions(self) -> Sequence[Definition]:
        """All of them, by name.

        Raises:
            TargetUnavailable: the connection was lost: open the catalog again.
            TargetError: no privilege, or a catalog that this program does not know.
        """
        ...

    def create(self, definition: Definition) -> AbstractAsyncContextManager[Definition]:
        """Store a new subscription, not enabled and not made, and claim it while the block lasts.

        What a process that was killed left of this name has to be removed before (:meth:`claim`, :meth:`remove`).

        Raises:
            TargetError: native's words: subscription already exists.
        """
        ...

    def claim(self, name: str) -> AbstractAsyncContextManager[Definition]:
        """Keep all other processes from a subscription while the block lasts; wait until the process that runs it has stopped.

        Gives the definition as it is then, of a new generation. A worker that is between two connections opens the sink again, sees the new
        generation, and stops.

        Raises:
            TargetError: native's words: subscription does not exist.
            SubscriptionInUse: the process that works on it does not stop.
        """
        ...

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns of a subscription, all or none. To be called under a claim.

        Args:
            oid: the subscription's.
            changes: new values of :class:`Definition`'s attributes, or of its options', by their names.

        Raises:
            TargetError: native's words: the new name is taken.
        """
        ...

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove a subscription with its tables, positions and notes. To be called under a claim.

        Returns:
            Names of prepared transactions that it leaves in the target: the user has to decide about them.
        """
        ...

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Keep an error of a worker that could not report it itself.

        Args:
            oid: the subscription's.
            text: the error, one line.
            details: the worker's details from now on, until it reports again; None: they are not changed.
        """
        ...

    async def reset_statistics(self, name: str) -> None:
        """Set a subscription's counters to zero, and note when. A process that runs it continues, and counts from there.

        Raises:
            TargetError: native's words: subscription does not exist.
        """
        ...

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Names of the prepared transactions that a subscription holds in the target."""
        ...

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """Become the one launcher of this target, until the session ends.

        Args:
            lost: what this gave when this process was the launcher before, through a session that is closed. The target may still serve
                that session: it is terminated.

        Returns:
            The number of the session that is the launcher, if it has one.

        Raises:
            SubscriptionInUse: there is one.
        """
        ...

    async def wait(self, timeout: float) -> None:
        """Return when a verb changed something, or after ``timeout`` seconds.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


@runtime_checkable
class OwnedCatalog(Protocol):
    """A :class:`Catalog` of a target that has roles: each subscription has an owner, with whose rights it is applied."""

    async def set_owner(self, oid: int, role: str) -> None:
        """Give a subscription to a role. To be called under a claim.

        Raises:
            TargetError: there is no such role, or this one cannot become it.
        """
        ...
