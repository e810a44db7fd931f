"""Log waits that last long: first after some seconds, then less and less often.

For a PostgreSQL server this module also has the queries that find the holder of a lock, and the sentence about it. It never shows the query
of another session, which may contain values.

Source: PostgreSQL manual, 27.2.3 (pg_stat_activity), 52.12 (pg_locks), 9.27.1 (pg_blocking_pids).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, Protocol

from subscriber.context_values import holding
from subscriber.errors import SubscriberError, SubscriptionInUse

__all__ = [
    "FIRST_SECONDS",
    "MOST_SECONDS",
    "WAIT_COLUMNS",
    "AskedSession",
    "LastingWait",
    "WaitLog",
    "Watch",
    "awaiting",
    "logged_wait",
    "moved",
    "sessions_query",
    "take_lock",
    "unwatched",
    "wait_text",
    "waits_query",
]

FIRST_SECONDS: Final = 3.0
"""A wait is logged after so many seconds, and again each time its duration has doubled since the last line, or has grown by
:data:`MOST_SECONDS`."""
MOST_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 5.0
_POLL: Final = 0.1


class LastingWait:
    """One wait, and the time of its next log line.

    Args:
        log: the logger.
        name: of the waiting object, at the beginning of each line.
        now: in seconds, as everywhere here.
    """

    def __init__(self, log: logging.Logger, name: str, now: float) -> None:
        self._log = log
        self._name = name
        self._since = now
        self.due = now + FIRST_SECONDS

    def tell(self, what: str, now: float) -> None:
        """Log it now."""
        self._log.warning("%s: %s; this has lasted for %.0f s", self._name, what, now - self._since)
        self.due = now + min(max(now - self._since, FIRST_SECONDS), MOST_SECONDS)


async def take_lock(
    log: logging.Logger,
    what: str,
    try_take: Callable[[], Awaitable[bool]],
    holders: Callable[[], Awaitable[str | None]],
    seconds: float,
) -> None:
    """Take a lock that another session may still hold.

    Args:
        log: receives a line if the wait lasts long.
        what: the activity that the lock protects, for the error: "... is active for PID ...".
        try_take: takes the lock if it is free, and returns whether it did.
        holders: returns the PIDs of the sessions that hold it, as text.
        seconds: time limit.

    Raises:
        SubscriptionInUse: another session still holds the lock after that time.
    """
    clock = asyncio.get_running_loop()
    began = clock.time()
    waited = LastingWait(log, what, began)
    while not await try_take():
        if clock.time() >= began + seconds:
            raise SubscriptionInUse(
                f"{what} is active for PID {await holders() or 'unknown'}",
                hint="stop the other process that runs this subscription, or end its session in the target",
            )
        if clock.time() >= waited.due:
            waited.tell(f"waiting for PID {await holders() or 'unknown'}, which holds its lock", clock.time())
        await asyncio.sleep(_POLL)


class WaitLog:
    """The current waits.

    Args:
        log: the logger.
        name: of the waiting object, at the beginning of each line.
    """

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._waits: dict[str, LastingWait] = {}

    def note(self, waits: Iterable[str], now: float) -> None:
        """Update the current waits. Those that are missing are over.

        Args:
            waits: a sentence for each. The same wait must always have the same sentence.
            now: in seconds.
        """
        before, self._waits = self._waits, {}
        for what in waits:
            wait = self._waits[what] = before.get(what) or LastingWait(self._log, self._name, now)
            if now >= wait.due:
                wait.tell(what, now)


@contextlib.asynccontextmanager
async def logged_wait(log: logging.Logger, name: str, describe: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """Log the cause of the wait if the block takes long.

    Args:
        log: the logger.
        name: of the waiting object.
        describe: finds the cause of the wait. An error in it does not affect the block.
    """
    task = asyncio.create_task(_log_it(log, name, describe), name=f"log of a wait: {name}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _log_it(log: logging.Logger, name: str, describe: Callable[[], Awaitable[str]]) -> None:
    clock = asyncio.get_running_loop().time
    wait = LastingWait(log, name, clock())
    while True:
        await asyncio.sleep(wait.due - clock())
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                text = await describe()
        except (SubscriberError, TimeoutError) as error:
            text = f"still waiting; could not find the cause: {error.one_line() if isinstance(error, SubscriberError) else 'no answer'}"
        wait.tell(text, clock())


class AskedSession(Protocol):
    """A session with the publisher that has a query or command running."""

    async def is_working(self) -> bool:
        """Whether the publisher works on the answer, or waits for something. It is asked through another session.

        Raises:
            SubscriberError: this cannot be found out.
        """
        ...


class Watch:
    """A unit of work for the watchdog: that of a task, and of the tasks that it starts.

    Attributes:
        moved_at: time of the last progress, by the event loop's clock.
        asked: sessions for whose answers it waits; None stands for a connection attempt.
    """

    def __init__(self) -> None:
        self.asked: list[AskedSession | None] = []
        self.moved()

    def moved(self) -> None:
        """Note progress."""
        self.moved_at = asyncio.get_running_loop().time()

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Everything done inside the block belongs to this work."""
        return holding(_current, self)


_current: ContextVar[Watch | None] = ContextVar("watch", default=None)


def unwatched() -> Context:
    """The context for a task that is no part of the current work: what it does is no progress, and what it waits for does not matter."""
    context = copy_context()
    context.run(_current.set, None)
    return context


def moved() -> None:
    """Note progress of the current work."""
    watch = _current.get()
    if watch is not None:
        watch.moved()


@contextlib.contextmanager
def awaiting(session: AskedSession | None) -> Iterator[None]:
    """The current work waits for an answer of this session; None: for a connection attempt, which has its own time limit."""
    watch = _current.get()
    if watch is None:
        yield
        return
    watch.asked.append(session)
    try:
        yield
        watch.moved()
    finally:
        watch.asked.remove(session)


# an active session that waits for its client is idle
_SESSIONS: Final = """
SELECT a.pid, CASE WHEN a.state = 'active' AND a.wait_event_type IS DISTINCT FROM 'Client' THEN 0.0
    ELSE coalesce(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - a.state_change), 0.0) END AS idle
FROM pg_catalog.pg_stat_activity AS a WHERE a.pid IN ({pids})
"""

# pg_blocking_pids returns 0 for a prepared transaction; the activity of other roles may be hidden
_WAITS: Final = """
SELECT a.pid, nullif(blocker.pid, 0) AS blocker, b.application_name AS application, b.state, w.relation,
    pg_catalog.to_char(coalesce(b.xact_start, b.query_start), 'YYYY-MM-DD HH24:MI:SS TZ') AS since
FROM pg_catalog.pg_stat_activity AS a
CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS blocker(pid)
LEFT JOIN pg_catalog.pg_stat_activity AS b ON b.pid = blocker.pid
LEFT JOIN LATERAL (
    SELECT n.nspname || '.' || c.relname AS relation FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_catalog.pg_database AS d ON d.oid = l.database
    WHERE l.pid = a.pid AND NOT l.granted AND d.datname = pg_catalog.current_database() LIMIT 1
) AS w ON true
WHERE a.pid IN ({pids}) AND a.wait_event_type = 'Lock'
ORDER BY a.pid, blocker.pid
"""


WAIT_COLUMNS: Final = ("pid", "blocker", "application", "state", "relation", "since")
"""Columns of :func:`waits_query`."""


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(str(int(pid)) for pid in pids) or "NULL"


def sessions_query(pids: Iterable[int]) -> str:
    """Select for each of these sessions that exists its ``pid`` and for how many seconds it was ``idle``; 0 without track_activities."""
    return _SESSIONS.format(pids=_listed(pids))


def waits_query(pids: Iterable[int]) -> str:
    """Select which of these sessions wait for a lock: a row for each blocker, for :func:`wait_text`."""
    return _WAITS.format(pids=_listed(pids))


def wait_text(row: Mapping[str, Any]) -> str:
    """Return the sentence for a row of :func:`waits_query`."""
    what = f'a lock on table "{row["relation"]}"' if row["relation"] else "a lock"
    if not row["blocker"]:
        holder = "a prepared transaction holds"
    else:
        known = [f'application "{row["application"]}"'] if row["application"] else []
        known += [str(row["state"])] if row["state"] else []
        known += [f"since {row['since']}"] if row["since"] else []
        details = f" ({', '.join(known)})" if known else ""
        holder = f"PID {row['blocker']}{details} holds"
    return f"the session with PID {row['pid']} waits for {what} that {holder}"
