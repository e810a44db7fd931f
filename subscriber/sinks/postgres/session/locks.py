"""Advisory locks: one writer at a time.

Each key is a 64-bit hash of the lock's name. The locks are in the target database, where the catalog is. Kinds of keys:

``writer(oid)``
    Held by the apply session as long as it lives. All changes of the subscription's position and state run in that session, or in sessions
    with one of the other locks below. After a process was killed, either its backend still lives and holds the lock, or its transactions
    can no longer commit. So the next process that has the lock reads a state that no other session changes.
``table(oid, relid)``
    The same as ``writer``, for the control session of one table's synchronization.
``copying(oid, relid)``
    Each part of a copy is committed by a separate session, not by the control session. So the backend of a dead process could commit a
    part after the next process undid the copy. To prevent this, the transaction of a part first takes this key *shared*, and then checks
    that the table is still in state ``d`` with the part's attempt number. The next process takes the key *exclusively*, in the transaction
    that undoes the copy. It waits for the parts that already have the key. Later parts find another state or attempt, and write nothing.
``verb(oid)``
    Held by a verb (create, alter, drop) while it works on a subscription. The launcher does not run a subscription with this lock. The
    verb waits until the writer has stopped. So a verb never changes rows while a worker uses them.
``launcher``
    Held by the launcher of the target's subscriptions.
``parallel(oid)``, and fences
    For the sessions that apply streamed transactions before their end: see :mod:`subscriber.sinks.postgres.parallel.sessions`.

The backend of a killed process ends after a moment: at the next read, or within client_connection_check_interval while it waits (see
:func:`subscriber.sinks.postgres.session.settings.end_abruptly`). So taking a lock is retried for some seconds before it is an error. If
only a dead process can have the lock, the session that still holds it is terminated, because behind a proxy a waiting backend may never
end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection
from typing import Final, Protocol

from subscriber.catalog.store import writer_key
from subscriber.waits import take_lock

__all__ = [
    "HOLDERS",
    "Fetch",
    "copying_key",
    "lock_number",
    "parallel_key",
    "table_key",
    "take",
    "writer_number",
]

_log = logging.getLogger(__name__)

_WAIT: Final = 10.0
_COMMIT_SECONDS: Final = 3.0
"""A session of a dead process, or a lost session of this process, has this time to end before it is terminated."""

HOLDERS: Final = """
SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND classid = ((%s::int8 >> 32) & 4294967295)::oid AND objid = (%s::int8 & 4294967295)::oid
ORDER BY pid
"""


# sessions of other users cannot be terminated
_END_HOLDERS: Final = f"""
SELECT pg_catalog.pg_terminate_backend(holder.pid)
FROM ({HOLDERS}) AS holder JOIN pg_catalog.pg_stat_activity AS a ON a.pid = holder.pid
WHERE a.usename = current_user AND (%s OR holder.pid = ANY (%s::int4[]))
"""  # noqa: S608 -- made of constants


class Fetch(Protocol):
    """Runs one query in the session that takes the lock."""

    async def __call__(self, query: str, /, *parameters: object) -> list[tuple[object, ...]]:
        """Return the query's rows."""
        ...


def _key(*parts: object) -> int:
    text = "\0".join(str(part) for part in ("pg-subscriber", *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def lock_number(key: str) -> int:
    """The number of a lock from its name in :mod:`subscriber.catalog.store`."""
    return _key(*key.split("-"))


def writer_number(oid: int) -> int:
    """The number of the lock of the subscription's writer."""
    return lock_number(writer_key(oid))


def parallel_key(oid: int) -> int:
    """The lock that sessions of parallel apply hold shared, and the next process takes exclusively."""
    return _key("parallel", oid)


def table_key(oid: int, relid: int) -> int:
    """The lock of a table's synchronization."""
    return _key("table", oid, relid)


def copying_key(oid: int, relid: int) -> int:
    """The lock that the parts of a table's copy hold shared, and undoing the copy takes exclusively."""
    return _key("copying", oid, relid)


async def take(
    fetch: Fetch,
    key: int,
    what: str,
    *,
    in_transaction: bool = False,
    wait: float | None = None,
    of_the_dead: bool = False,
    lost: Collection[int] = (),
) -> bool:
    """Take a lock exclusively, for the session or for the transaction that is open in it.

    Args:
        fetch: runs queries in the session.
        key: number of the lock.
        what: the activity that the lock protects, for the error: "... is active for PID ...".
        in_transaction: release the lock at the end of the transaction.
        wait: time limit in seconds; None: ten.
        of_the_dead: only sessions of a dead process can hold the lock. After some seconds they are terminated, if the role may do that.
        lost: PIDs of sessions that this process has lost. Behind a broken network, the server may keep such a session for long. If one
            of them holds the lock, it is terminated too.

    Returns:
        Whether sessions were terminated.

    Raises:
        SubscriptionInUse: another session still holds the lock after that time.
    """
    function = "pg_try_advisory_xact_lock" if in_transaction else "pg_try_advisory_lock"
    clock = asyncio.get_running_loop()
    began, ended = clock.time(), False

    async def try_take() -> bool:
        nonlocal ended, of_the_dead, lost
        if (await fetch(f"SELECT pg_catalog.{function}(%s)", key))[0][0]:
            return True
        if (of_the_dead or lost) and clock.time() >= began + _COMMIT_SECONDS:
            ended = bool(await fetch(_END_HOLDERS, key, key, of_the_dead, list(lost)))
            of_the_dead, lost = False, ()
        return False

    async def holders() -> str:
        return ", ".join(str(row[0]) for row in await fetch(HOLDERS, key, key))

    await take_lock(_log, what, try_take, holders, _WAIT if wait is None else wait)
    return ended
