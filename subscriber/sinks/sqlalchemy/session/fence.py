"""The fence: once a writer has opened a subscription, no earlier writer can write anything of it.

Each subscription has a row in ``fence`` with a number, the *fencing token*. When the sink is opened, :meth:`Fence.raise_` increases the
token by one, and the new number belongs to this writer. Every transaction that writes anything of the subscription (a batch, a piece of a
copy, a state) begins with :meth:`Fence.hold`, which locks the row and compares the token. Transactions of the same writer share the lock.

A transaction of an earlier writer may be unfinished because its process was killed, its connection was cut, or its task was cancelled:

* If it holds the lock, raising the fence waits until it has ended, by COMMIT or ROLLBACK. The state that is read afterwards is final: a
  COMMIT whose answer was lost is visible in the position, or will never take effect. The wait ends after the database's lock timeout, with
  TargetUnavailable, and the open is retried.
* If it does not hold the lock yet, it finds another token, writes nothing, and is rolled back with SubscriptionInUse.

The lock is a row lock (``FOR SHARE``) on databases that have shared row locks, and the file's write lock on SQLite. On other databases it
is an UPDATE of the row, which is exclusive: there a subscription's transactions only run one after another.

A process opens its sink again after each error. This also raises the fence against its own earlier sessions, one of which may be about to
commit. Table synchronizations continue while the sink is closed and opened. They read the current token at the beginning of each
transaction. If the token changes between that read and the lock, the transaction fails with TargetUnavailable and is retried.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.catalog_tables import TABLES

__all__ = ["Fence"]

_FOR_SHARE: Final = frozenset({"mysql", "mariadb"})


class Fence:
    """The fence of one sink, shared by all its sessions.

    Args:
        oid: the subscription's.
    """

    def __init__(self, oid: int) -> None:
        self.oid = oid
        self._token: int | None = None

    async def raise_(self, connection: AsyncConnection) -> None:
        """Shut out all earlier writers, in the open transaction. Call :meth:`raised` once that is committed.

        Raises:
            TargetError: the subscription does not exist any more.
            TargetUnavailable: a transaction of an earlier writer does not end.
        """
        fence = TABLES["fence"]
        # This process has no token until the commit is known to have succeeded. If the answer to a successful commit is lost, the row has a
        # token that no process has: a table's synchronization that finds it has to retry, and must not report another process.
        self._token = None
        moved = await connection.execute(update(fence).where(fence.c.srsubid == self.oid).values(token=fence.c.token + 1))
        if moved.rowcount == 0:
            raise TargetError(f"subscription with oid {self.oid} does not exist in the target", hint="it has been dropped")
        self._raising: int = (await connection.execute(select(fence.c.token).where(fence.c.srsubid == self.oid))).scalar_one()

    def raised(self) -> None:
        """Use the new token, after the transaction of :meth:`raise_` was committed."""
        self._token = self._raising

    async def hold(self, connection: AsyncConnection) -> None:
        """Lock the fence until the open transaction ends, and check the token. Call it before any other statement of the transaction.

        Raises:
            SubscriptionInUse: another process is the writer.
            TargetUnavailable: this process has just opened the sink again.
        """
        fence, token = TABLES["fence"], self._token
        row = fence.c.srsubid == self.oid
        if connection.dialect.name == "sqlite":
            found = (await connection.execute(select(fence.c.token).where(row))).scalar()
        elif connection.dialect.name in _FOR_SHARE:
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
