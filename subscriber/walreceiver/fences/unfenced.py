"""Writers that a fence does not keep out of its database.

An apply worker changes tables without a check for read-only transactions (``ExecSimpleRelationInsert`` of
src/backend/executor/execReplication.c), and this program's own sessions may write into a closed database. A background worker, such as one
of pg_cron or TimescaleDB, reads the database's settings when it starts. It is not ended: only its extension knows how it is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.walreceiver.publisher_subscriptions import subscribed_tables
from subscriber.walreceiver.session import Session

__all__ = ["background_workers", "writing_subscriptions"]

# the types of PostgreSQL's own processes that have a database. All others are background workers of extensions
_WORKERS: Final = """
SELECT DISTINCT a.backend_type FROM pg_catalog.pg_stat_activity a
WHERE a.datname = pg_catalog.current_database() AND a.backend_type NOT LIKE 'logical replication %'
  AND a.backend_type NOT IN ('client backend', 'walsender', 'autovacuum worker', 'parallel worker', 'slotsync worker')
ORDER BY 1
"""


async def background_workers(session: Session) -> list[str]:
    """The types of the background workers of extensions that are connected to this database."""
    return [kind or "" for (kind,) in await session.execute(_WORKERS)]


async def writing_subscriptions(session: Session, publications: Sequence[str]) -> list[str]:
    """Names of the enabled subscriptions of this database that write into tables of these publications."""
    return sorted({found.subscription for found in await subscribed_tables(session, publications) if found.enabled})
