"""The fence: nothing of an earlier writer is written once a later one has opened the subscription.

Each subscription has a row in ``fence`` with a number, the *token*. :meth:`Fence.raise_` adds one to it, when the sink is opened, and that
number is this writer's. Every transaction of ours that writes anything of the subscription (a batch, a piece of a copy, a state) begins
with :meth:`Fence.hold`: it locks the row, shared with other transactions of the same writer, and compares the token. So for each
transaction of an earlier writer, wherever it was when its process was killed, its connection was cut, or its task was cancelled:

* it holds the row: then raising the fence waits for its end, COMMIT or not. What is read after that is final: a COMMIT whose
  answer was lost either shows in the position or never will. (That wait has an end: ``lock_timeout``; then TargetUnavailable, tried again.)
* it has not come to the row: then it finds another token, writes nothing, and is rolled back with SubscriptionInUse.

The lock is a row lock (``FOR SHARE``) where the database has one that others can share, the file's write lock on SQLite, and elsewhere
an UPDATE of the row: exclusive, which costs only that a subscription's transactions take turns.

One process opens its sink again after each error, and so raises the fence against its own earlier sessions too: one of them may still be
about to commit. Table synchronizations, which go on while the sink is closed and opened, read the current token at the beginning
of each transaction; one that was between reading and locking just then is turned away and tried again.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.tables import CatalogTables

__all__ = ["Fence"]

_FOR_SHARE: Final = frozenset({"postgresql", "mysql", "mariadb"})


class Fence:
    """One sink's side of it, shared by all its sessions.

    Args:
        dialect_name: SQLAlchemy's.
        tables: the catalog.
        oid: the subscription's.
    """

    def __init__(self, dialect_name: str, tables: CatalogTables, oid: int) -> None:
        self._dialect_name = dialect_name
        self._fence = tables.fence
        self.oid = oid
        self._token: int | None = None

    async def raise_(self, connection: AsyncConnection) -> None:
        """Shut all earlier writers out, in the transaction that is open; :meth:`raised` once that is committed.

        Raises:
            TargetError: the subscription is gone.
            TargetUnavailable: a transaction of an earlier writer does not end.
        """
        fence = self._fence
        # Until the commit is known to have succeeded this process has no token. One that is lost after the target has carried it out leaves
        # a number that no other process has: a table's synchronization that finds it has to retry; it must not report another process.
        self._token = None
        moved = await connection.execute(update(fence).where(fence.c.srsubid == self.oid).values(token=fence.c.token + 1))
        if moved.rowcount == 0:
            raise TargetError(f"subscription with oid {self.oid} does not exist in the target", hint="it was dropped just now; start again")
        self._raising: int = (await connection.execute(select(fence.c.token).where(fence.c.srsubid == self.oid))).scalar_one()

    def raised(self) -> None:
        """It is committed: from now on the new token counts."""
        self._token = self._raising

    async def hold(self, connection: AsyncConnection) -> None:
        """Be the writer until the transaction that is open ends. To be called before anything else in it.

        Raises:
            SubscriptionInUse: another process is.
            TargetUnavailable: this process opened the sink again just now.
        """
        fence, token = self._fence, self._token
        row = fence.c.srsubid == self.oid
        if self._dialect_name == "sqlite":
            found = (await connection.execute(select(fence.c.token).where(row))).scalar()
        elif self._dialect_name in _FOR_SHARE:
            found = (await connection.execute(select(fence.c.token).where(row).with_for_update(read=True))).scalar()
        else:
            moved = await connection.execute(update(fence).where(row, fence.c.token == token).values(token=fence.c.token))
            found = token if moved.rowcount == 1 else None
        if found == token and token is not None:
            return
        if self._token != token or token is None:
            raise TargetUnavailable("the sink was opened again in the meantime", hint="it is retried")
        raise SubscriptionInUse(
            f"subscription with oid {self.oid} was opened by another process", hint="one process serves a subscription: stop the other one"
        )
