"""Whether the target has room for the sessions of a run: connections and replication origins."""

from __future__ import annotations

from typing import Final

from subscriber.interfaces import Finding
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.origins import catalog_run, grant, limit_setting, may_use_origins

__all__ = ["few_connections", "few_origins"]

_OF_A_RUN: Final = 3
"""Connections of a run that synchronizes no table."""
# walsenders and background workers are not counted by max_connections, but only superusers see what a session is
# reserved_connections: since PostgreSQL 16
_FREE: Final = """
SELECT min(l.most - l.used)::int AS free
FROM pg_catalog.pg_roles AS r
JOIN pg_catalog.pg_database AS b ON b.datname = pg_catalog.current_database()
CROSS JOIN LATERAL (
    SELECT pg_catalog.count(*) AS all_sessions, pg_catalog.count(*) FILTER (WHERE a.usename = r.rolname) AS of_role,
           pg_catalog.count(*) FILTER (WHERE a.datname = b.datname) AS of_database
    FROM pg_catalog.pg_stat_activity AS a WHERE a.datname IS NOT NULL
) AS u
CROSS JOIN LATERAL (VALUES
    (pg_catalog.current_setting('max_connections')::int - CASE WHEN r.rolsuper THEN 0 ELSE
         pg_catalog.current_setting('superuser_reserved_connections')::int
         + coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0) END, u.all_sessions),
    (CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit END, u.of_role),
    (CASE WHEN b.datconnlimit >= 0 AND NOT r.rolsuper THEN b.datconnlimit END, u.of_database)
) AS l(most, used)
WHERE r.rolname = current_user
"""
_ORIGINS: Final = "SELECT pg_catalog.count(*) AS used FROM pg_catalog.pg_replication_origin AS o"
_OF_OTHERS: Final = f"""
{_ORIGINS} WHERE NOT EXISTS (
    SELECT FROM subscriber.pg_subscription AS s WHERE s.subname = $1::text::name
    AND pg_catalog.starts_with(o.roname || '_', 'subscriber_' || s.oid::text || '_')
)
"""


async def few_connections(reader: CatalogReader, workers: int) -> list[Finding]:
    """Warn if apply_workers would need more connections than are free.

    Raises:
        TargetUnavailable, TargetError
    """
    free, needed = max((await reader.fetch(_FREE))[0]["free"], 0), workers + _OF_A_RUN
    if free >= needed:
        return []
    message = f"apply_workers = {workers} needs {needed} connections with the target, with those of every run: {free} are free"
    hint = "increase max_connections of the target, or the CONNECTION LIMIT of role or database, or decrease apply_workers"
    return [Finding("warning", message, hint)]


async def few_origins(reader: CatalogReader, name: str | None, *, relied_on: bool, workers: int) -> list[Finding]:
    """Warn if changes would have no replication origin, or if sessions would be missing because they need one each.

    Args:
        reader: a session with the target.
        name: of the subscription, if the target has it already. It uses its own origins again.
        relied_on: whether the subscription seems to rely on origins.
        workers: the setting ``apply_workers``. Each session needs an origin, if the apply session has one.

    Raises:
        TargetUnavailable, TargetError
    """
    consequence = "a subscription to the target with origin = none would receive the replicated changes as the target's own"
    run = catalog_run(reader.connection)
    may, role, version = await may_use_origins(run)
    if not may:
        message = f'role "{role}" may not use replication origins in the target: {consequence}'
        return [Finding("warning", message, grant(role, version))] if relied_on else []
    setting = limit_setting(version)
    ((text,),) = await run(f"SHOW {setting}")
    rows = await (reader.fetch(_ORIGINS) if name is None else reader.fetch(_OF_OTHERS, name))
    limit, used = int(text), rows[0]["used"]
    hint = f"increase {setting} of the target, or drop origins that are not needed"
    if used >= limit:
        message = f"{used} replication origins exist in the target, and no more than {limit} can be in use: {consequence}"
        return [Finding("warning", message, hint)] if relied_on else []
    if workers > 1 and limit - used <= workers:
        message = f"apply_workers = {workers} needs {workers + 1} replication origins in the target: {limit - used} are free"
        return [Finding("warning", message, f"{hint}, or decrease apply_workers")]
    return []
