"""Which sessions wait for a lock in a PostgreSQL server, and who holds it: the queries, and the sentence for the log.

Never the text of a query: it may hold values.

Source: PostgreSQL manual, 27.2.3 (pg_stat_activity), 52.12 (pg_locks), 9.27.1 (pg_blocking_pids).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["sessions_query", "wait_text", "waits_query"]

_SESSIONS: Final = """
SELECT a.pid, CASE WHEN a.state = 'active' THEN 0.0
    ELSE pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - a.state_change) END AS idle
FROM pg_catalog.pg_stat_activity AS a WHERE a.pid IN ({pids})
"""

# pg_blocking_pids gives 0 for a prepared transaction; what another role does may be hidden
_WAITS: Final = """
SELECT a.pid, blocker.pid AS blocker, b.application_name AS application, b.state, w.relation,
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


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(str(int(pid)) for pid in pids) or "NULL"


def sessions_query(pids: Iterable[int]) -> str:
    """For each of these sessions that exists, its ``pid`` and for how many seconds it has been ``idle``."""
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
