"""Lines in the log about waits that last: after some seconds one with what is waited for, and then ever more rarely.

For a PostgreSQL server here are also the queries that tell who holds a lock, and the sentence about it. Never the text of a query of
another session: it may hold values.

Source: PostgreSQL manual, 27.2.3 (pg_stat_activity), 52.12 (pg_locks), 9.27.1 (pg_blocking_pids).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

from subscriber.errors import SubscriberError

__all__ = [
    "FIRST_SECONDS",
    "WAIT_COLUMNS",
    "AskedSession",
    "LastingWait",
    "WaitLog",
    "Watch",
    "awaiting",
    "logged_wait",
    "moved",
    "sessions_query",
    "wait_text",
    "waits_query",
]

FIRST_SECONDS: Final = 3.0
"""After so long a wait is logged for the first time, and then each time it has lasted twice as long as at the line before, or
``_LONGEST`` longer."""
_LONGEST: Final = 300.0
_LOOK_SECONDS: Final = 5.0


class LastingWait:
    """One wait, and when it is logged next.

    Args:
        log: where to.
        name: of what waits, at the beginning of each line.
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
        self.due = now + min(max(now - self._since, FIRST_SECONDS), _LONGEST)


class WaitLog:
    """Which waits there are.

    Args:
        log: where to.
        name: of what waits, at the beginning of each line.
    """

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._waits: dict[str, LastingWait] = {}

    def note(self, waits: Iterable[str], now: float) -> None:
        """These waits there are now; what is not among them is over.

        Args:
            waits: a sentence for each; the same wait has the same sentence each time.
            now: in seconds.
        """
        before, self._waits = self._waits, {}
        for what in waits:
            wait = self._waits[what] = before.get(what) or LastingWait(self._log, self._name, now)
            if now >= wait.due:
                wait.tell(what, now)


@contextlib.asynccontextmanager
async def logged_wait(log: logging.Logger, name: str, describe: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """Log what the block waits for, if it lasts.

    Args:
        log: where to.
        name: of what waits.
        describe: finds out what is waited for, and who is in the way. An error of its own is no error of the block.
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
            text = f"still waiting; could not find out for what: {error.one_line() if isinstance(error, SubscriberError) else 'no answer'}"
        wait.tell(text, clock())


class AskedSession(Protocol):
    """A session with the publisher that was asked something."""

    async def is_working(self) -> bool:
        """Whether the publisher is at work on the answer, or waits for something itself; it is asked through another session.

        Raises:
            SubscriberError: that cannot be found out.
        """
        ...


class Watch:
    """One piece of work, as the watchdog sees it. It is that of a task, and of the tasks that this task starts.

    Attributes:
        moved_at: when it made progress last, by the event loop's clock.
        asked: sessions whose answers it waits for; None stands for a connection that is being made.
    """

    def __init__(self) -> None:
        self.asked: list[AskedSession | None] = []
        self.moved()

    def moved(self) -> None:
        """It has made progress."""
        self.moved_at = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What is done inside is this work."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Watch | None] = ContextVar("watch", default=None)


def moved() -> None:
    """The current work has made progress."""
    watch = _current.get()
    if watch is not None:
        watch.moved()


@contextlib.contextmanager
def awaiting(session: AskedSession | None) -> Iterator[None]:
    """The current work waits for an answer of this session; None: for a connection, which takes its own time and has its own limit."""
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


# an active session that waits for its client does nothing
_SESSIONS: Final = """
SELECT a.pid, CASE WHEN a.state = 'active' AND a.wait_event_type IS DISTINCT FROM 'Client' THEN 0.0
    ELSE coalesce(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - a.state_change), 0.0) END AS idle
FROM pg_catalog.pg_stat_activity AS a WHERE a.pid IN ({pids})
"""

# pg_blocking_pids gives 0 for a prepared transaction; what another role does may be hidden
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
"""Of the rows of :func:`waits_query`."""


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(str(int(pid)) for pid in pids) or "NULL"


def sessions_query(pids: Iterable[int]) -> str:
    """For each of these sessions that exists, its ``pid`` and for how many seconds it has been ``idle``; 0 without track_activities."""
    return _SESSIONS.format(pids=_listed(pids))


def waits_query(pids: Iterable[int]) -> str:
    """Which of these sessions wait for a lock: a row for each blocker, for :func:`wait_text`."""
    return _WAITS.format(pids=_listed(pids))


def wait_text(row: Mapping[str, Any]) -> str:
    """What a row of :func:`waits_query` says."""
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
