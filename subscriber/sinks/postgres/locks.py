"""Advisory locks: one writer at a time.

Kinds of keys, each a 64-bit hash of what it guards; all in the target database, where the catalog is:

``writer(oid)``
    Held by the main apply session as long as it lives. Everything that changes the subscription's state runs in that session. When a
    process is killed, either its backend still lives and holds the lock, or nothing of it can commit any more: the next process that has
    the lock reads a state that no other session changes.
``table(oid, relid)``
    The same for the control session of one table's synchronization.
``copying(oid, relid)``
    Rows of a copy are committed by sessions of their own, beside the control session; a backend of a dead process could commit
    a part after the successor undid the copy. Hence each part's transaction takes this key *shared* first, and then looks
    whether the table is still in state ``d`` with the attempt's number it was started for. A successor takes the key *exclusively*, in the
    transaction that undoes the copy: it waits for parts that were before it, and those that come later find another state
    or another attempt, and write nothing.
``verb(oid)``
    Held by a verb (create, alter, drop) while it works on a subscription. The launcher looks for it, and does not run a claimed one;
    the verb waits until the writer has stopped. So a verb never changes rows while a worker uses them.
``launcher``
    Held by the one process that runs the target's subscriptions.

``parallel(oid)``, and fences
    Of the sessions that apply streamed transactions before their end: see :mod:`subscriber.sinks.postgres.parallel_sessions`.

A killed process's backend notices after a moment (at the next read, or within client_connection_check_interval while it waits for
something; see :func:`subscriber.sinks.postgres.settings.end_abruptly`), so taking a lock is tried for some seconds before it is an error.
Where only a dead process can have it, the session that still has it is then terminated: behind a proxy, a waiting backend may never notice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection
from typing import Final, Protocol

from subscriber.catalog.store import writer_key
from subscriber.errors import SubscriptionInUse
from subscriber.waits import LastingWait

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
_POLL: Final = 0.1
_COMMIT_SECONDS: Final = 3.0
"""What a dead process left under way, or a lost session of this process, has so long to end by itself."""

HOLDERS: Final = """
SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND classid = ((%s::int8 >> 32) & 4294967295)::oid AND objid = (%s::int8 & 4294967295)::oid
ORDER BY pid
"""


# those of another user we may not end
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
    """The number of a lock that :mod:`subscriber.catalog.store` names."""
    return _key(*key.split("-"))


def writer_number(oid: int) -> int:
    """Of the subscription's one writer."""
    return lock_number(writer_key(oid))


def parallel_key(oid: int) -> int:
    """Shared by the sessions that apply streamed transactions before their end, exclusive for the next process."""
    return _key("parallel", oid)


def table_key(oid: int, relid: int) -> int:
    """Of the one synchronization of a table."""
    return _key("table", oid, relid)


def copying_key(oid: int, relid: int) -> int:
    """Shared by the parts of a table's copy, exclusive for undoing it."""
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
        fetch: of the session.
        key: of the lock.
        what: is active for another session, as the error says.
        in_transaction: the lock goes with the transaction.
        wait: seconds; None: ten.
        of_the_dead: none but sessions of a process that has ended can have it; after a while they are terminated, if we may.
        lost: PIDs of sessions that this process has lost. A server behind a broken network does not notice for long; if one of them has
            the lock, it is terminated as well.

    Returns:
        Whether sessions were terminated.

    Raises:
        SubscriptionInUse: another session still has it after that time.
    """
    function = "pg_try_advisory_xact_lock" if in_transaction else "pg_try_advisory_lock"
    clock = asyncio.get_running_loop()
    began, ended = clock.time(), False
    deadline = began + (_WAIT if wait is None else wait)

    async def holders() -> str:
        return ", ".join(str(row[0]) for row in await fetch(HOLDERS, key, key)) or "unknown"

    waited = LastingWait(_log, what, began)
    while True:
        if (await fetch(f"SELECT pg_catalog.{function}(%s)", key))[0][0]:
            return ended
        if clock.time() >= deadline:
            break
        if clock.time() >= waited.due:
            waited.tell(f"waiting for PID {await holders()}, which holds its lock", clock.time())
        if (of_the_dead or lost) and clock.time() >= began + _COMMIT_SECONDS:
            ended = bool(await fetch(_END_HOLDERS, key, key, of_the_dead, list(lost)))
            of_the_dead, lost = False, ()
        await asyncio.sleep(_POLL)
    raise SubscriptionInUse(
        f"{what} is active for PID {await holders()}",
        hint="stop the other process that serves this subscription, or its session in the target",
    )
