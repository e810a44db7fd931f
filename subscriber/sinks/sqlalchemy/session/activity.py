"""Observes the sink's sessions through another session. See :class:`subscriber.interfaces.WatchedSink`.

MariaDB shows the holder of a row lock only to a role with the privilege PROCESS. It shows a wait for a table lock without the holder. MySQL
has other system tables for row locks; they are not read. For an SQLite file it is only known that another program has the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import TargetError
from subscriber.interfaces import TargetActivity
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.session import Session

__all__ = ["activity"]

_LOCK_SECONDS: Final = 2.0

_MYSQL_SESSIONS: Final = """
SELECT id AS pid, CASE command WHEN 'Sleep' THEN time ELSE 0 END AS idle, state FROM information_schema.processlist WHERE id IN ({ids})
"""
_MARIADB_ROW_LOCKS: Final = """
SELECT w.trx_mysql_thread_id AS waiting, b.trx_mysql_thread_id AS blocker, b.trx_started AS since, l.lock_table AS name
FROM information_schema.innodb_lock_waits AS x
JOIN information_schema.innodb_trx AS w ON w.trx_id = x.requesting_trx_id
JOIN information_schema.innodb_trx AS b ON b.trx_id = x.blocking_trx_id
JOIN information_schema.innodb_locks AS l ON l.lock_id = x.requested_lock_id
WHERE w.trx_mysql_thread_id IN ({ids})
"""


async def activity(database: Database, applying: Session | None) -> TargetActivity:
    """Observe all sessions of a target.

    Args:
        database: the target.
        applying: the session that applies, if there is one.

    Raises:
        TargetError: the sessions cannot be observed.
    """
    sessions = database.sessions()
    if database.path is not None:
        now = asyncio.get_running_loop().time()
        locking = [since for session in sessions if (since := session.locking_since) is not None and now - since >= _LOCK_SECONDS]
        # writing transactions run one after another: each session may wait for any other session
        idle = 0.0 if any(session.busy for session in sessions if session not in database.kept) else math.inf
        return TargetActivity(idle, idle, (f'another program has the file "{database.path}" locked',) if locking else ())
    numbers = [session.number for session in sessions if session.number is not None]
    own = applying.number if applying is not None and applying.usable else None
    if not numbers:
        return TargetActivity(math.inf)
    async with database.reading() as connection:
        ids = ", ".join(map(str, numbers))
        found = await _rows(connection, _MYSQL_SESSIONS.format(ids=ids))
        waits = await _mysql_waits(connection, ids, found)
    seconds = {int(row["pid"]): float(row["idle"]) for row in found}
    copying = seconds.keys() - {own, *(session.number for session in database.kept)}
    return TargetActivity(seconds.get(own or 0, math.inf), min((seconds[number] for number in copying), default=math.inf), waits)


async def _rows(connection: AsyncConnection, query: str) -> Sequence[dict[str, Any]]:
    return [dict(row) for row in (await connection.execute(text(query.replace(":", "\\:")))).mappings()]


async def _mysql_waits(connection: AsyncConnection, ids: str, sessions: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    waits = [
        f"the session with id {row['pid']} waits: {state[0].lower()}{state[1:]}, which another session holds"
        for row in sessions
        if "lock" in (state := str(row["state"] or "")) and state.startswith("Waiting for ")
    ]
    rows: Sequence[dict[str, Any]] = []
    # without the privilege the query fails
    with contextlib.suppress(TargetError), translated():
        rows = await _rows(connection, _MARIADB_ROW_LOCKS.format(ids=ids))
    waits += [
        f"the session with id {row['waiting']} waits for a lock on table {row['name']} that the session with id {row['blocker']}"
        f" (transaction since {row['since']}) holds"
        for row in rows
    ]
    return tuple(sorted(set(waits)))
