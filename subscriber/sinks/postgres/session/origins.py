"""Replication origins: the mark of replicated changes for the target's own publications.

A session with an origin marks every change that it writes. A subscriber of the target with ``origin = none`` does not receive marked
changes. This prevents a loop between two databases that replicate into each other.

An origin can be used by one session at a time. So there is one for each session:

- ``subscriber_<subscription oid>`` for the apply session,
- ``subscriber_<oid>_<relid>`` for a table's synchronization,
- ``subscriber_<oid>_<relid>_<k>`` for the sessions that commit the parts of its copy,
- ``subscriber_<oid>_parallel_<k>`` for the sessions of parallel apply.

PostgreSQL's own names (``pg_<oid>`` and so on) are reserved, and no SQL function creates them. The LSN of an origin is only for
monitoring. The sink never reads it, because the position is stored in a table. So an origin may be dropped or missing at any time.

An origin that was ever set up occupies one of the server's few state slots until it is dropped. So the origins of a table are dropped at
the end of its synchronization, and those of a killed process at the next start.

If no origin can be used (no privilege, no free slot), this is no error: replication continues, after one warning for each reason.

Source: PostgreSQL manual, Replication Progress Tracking; 9.28.6 (Replication Management Functions).
"""

# the variable parts of names are numbers
# ruff: noqa: S608

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from subscriber.errors import SubscriptionInUse, TargetError
from subscriber.sinks.postgres.session.catalog_reader import CatalogSession
from subscriber.sinks.postgres.session.postgres_errors import translated

__all__ = [
    "PARALLEL",
    "Origins",
    "Run",
    "catalog_run",
    "drop_origins",
    "grant",
    "limit_setting",
    "may_use_origins",
    "origin_name",
    "parallel_origin",
    "sweep_origins",
]

_log = logging.getLogger(__name__)

PARALLEL: Final = "_parallel_"
"""Part of the origins' names of parallel apply, after the name of the apply session's origin. Their changes count as our own."""
_WAIT: Final = 10.0
_POLL: Final = 0.1
_LOST_SECONDS: Final = 3.0
"""A session that this process has lost has this time to end before it is terminated."""

_UNIQUE: Final = "23505"
_UNDEFINED: Final = "42704"
_IN_USE: Final = "55006"
_PREREQUISITE: Final = "55000"
_LIMIT: Final = "53400"

_FUNCTIONS: Final = (
    "pg_replication_origin_create(text)",
    "pg_replication_origin_drop(text)",
    "pg_replication_origin_session_reset()",
    "pg_replication_origin_session_setup(text)",
    "pg_replication_origin_xact_setup(pg_lsn, timestamptz)",
)

# before PostgreSQL 14 the functions check rolsuper
_MAY_USE: Final = f"""
SELECT current_user::text, pg_catalog.current_setting('server_version_num')::int,
       CASE WHEN pg_catalog.current_setting('server_version_num')::int < 140000 THEN pg_catalog.bool_and(r.rolsuper)
            ELSE pg_catalog.bool_and(pg_catalog.has_function_privilege('pg_catalog.' || f.name, 'EXECUTE')) END
FROM pg_catalog.pg_roles AS r, pg_catalog.unnest(ARRAY['{"', '".join(_FUNCTIONS)}']) AS f(name) WHERE r.rolname = current_user
"""

Run = Callable[[str], Awaitable[Sequence[Sequence[Any]]]]
"""Runs one query without parameters, outside a transaction, and returns its rows. It raises TargetError."""


def catalog_run(connection: CatalogSession) -> Run:
    """A :data:`Run` for a session of a catalog reader."""

    async def run(query: str) -> Sequence[Sequence[Any]]:
        with translated():
            return [tuple(row.values()) for row in await connection.fetch(query)]

    return run


def origin_name(oid: int, relid: int = 0, part: int | None = None) -> str:
    """The origin's name for a subscription, one of its tables, or a session that copies a part of that table."""
    numbers = [oid, *([relid] if relid else []), *([part] if part is not None else [])]
    return "_".join(["subscriber", *map(str, numbers)])


def parallel_origin(oid: int, number: int) -> str:
    """The origin's name for a session of parallel apply."""
    return f"{origin_name(oid)}{PARALLEL}{number}"


def grant(role: str, version: int) -> str:
    """The hint if the role may not use origins."""
    if version < 140000:
        return "connect to the target as a superuser: in PostgreSQL 13 only superusers can use replication origins"
    functions = ", ".join(f"pg_catalog.{name}" for name in _FUNCTIONS)
    return f'GRANT EXECUTE ON FUNCTION {functions} TO "{role}"'


def limit_setting(version: int) -> str:
    """The setting that limits the number of origins in use."""
    return "max_active_replication_origins" if version >= 180000 else "max_replication_slots"


async def may_use_origins(run: Run) -> tuple[bool, str, int]:
    """Whether the session's role may use origins, the role, and the server's version number."""
    ((role, version, may),) = await run(_MAY_USE)
    return bool(may), str(role), int(version)


class Origins:
    """Sets up origins in the sessions of one sink. If there is none, it logs each reason once.

    Args:
        relied_on: the subscription seems to rely on origins, so a missing one is a warning.
        lost: returns the PIDs of sessions that the sink has lost. A lost session that keeps an origin in use is terminated.
    """

    def __init__(self, *, relied_on: bool, lost: Callable[[], Collection[int]]) -> None:
        self._lost = lost
        self._level = logging.WARNING if relied_on else logging.INFO
        self._warned: set[str] = set()

    async def set_up(self, run: Run, name: str) -> int | None:
        """Mark the session's changes with this origin from now on. The origin is created if it is missing.

        Returns:
            The origin's id in the server (``pg_replication_origin.roident``); None: no origin can be used.

        Raises:
            SubscriptionInUse: another session still uses it after ten seconds.
            TargetError: or a subclass.
        """
        may, role, version = await may_use_origins(run)
        if not may:
            self._warn("permission denied for the functions of replication origins", grant(role, version))
            return None
        clock = asyncio.get_running_loop()
        deadline = clock.time() + _WAIT
        while True:
            try:
                return await _set_up(run, name)
            except TargetError as error:
                if error.sqlstate in {_LIMIT, _PREREQUISITE}:
                    self._warn(str(error), f"increase {limit_setting(version)} of the target")
                    await _drop(run, _named(name), wait=False)
                    return None
                # another session has just created or dropped it, or still uses it: retry
                if error.sqlstate not in {_UNIQUE, _UNDEFINED, _IN_USE}:
                    raise
                if error.sqlstate == _IN_USE and clock.time() >= deadline - _WAIT + _LOST_SECONDS:
                    await self._end_lost(run, error)
                if clock.time() >= deadline:
                    hint = "stop the other process that runs this subscription, or end its session in the target"
                    raise SubscriptionInUse(f'replication origin "{name}" cannot be used: {error}', hint=hint) from None
            await asyncio.sleep(_POLL)

    async def _end_lost(self, run: Run, error: TargetError) -> None:
        """Terminate the session that uses the origin, if the sink has lost it. Only the error contains the PID of that session."""
        for number in {int(found) for found in re.findall(r"\d+", str(error))[-1:]}.intersection(self._lost()):
            await run(f"SELECT pg_catalog.pg_terminate_backend({number})")

    def _warn(self, reason: str, hint: str) -> None:
        if hint not in self._warned:
            self._warned.add(hint)
            _log.log(
                self._level,
                "changes are applied to the target without a replication origin: %s; a subscription to the target with origin = none"
                " receives them as the target's own changes (hint: %s)",
                reason,
                hint,
            )


async def _set_up(run: Run, name: str) -> int:
    if not await run(_named(name)):
        await run(f"SELECT pg_catalog.pg_replication_origin_create('{name}')")
    await run(f"SELECT pg_catalog.pg_replication_origin_session_setup('{name}')")
    # read the id after the setup: before, another session could drop the origin and create it again; now it is in use
    ((_, identifier),) = await run(_named(name))
    return int(identifier)


def _named(name: str) -> str:
    return f"SELECT roname, roident::int FROM pg_catalog.pg_replication_origin WHERE roname = '{name}'"


async def drop_origins(run: Run, oid: int, relid: int = 0, *, parts_only: bool = False, wait: bool = True) -> None:
    """Drop all origins of a subscription, or those of one of its tables, or only those of the table's copy.

    Args:
        run: runs queries in a session that uses none of them.
        oid: oid of the subscription.
        relid: oid of the table; 0: drop the origins of the subscription and of all its tables.
        parts_only: drop only the origins of sessions that copy parts of the table.
        wait: wait up to ten seconds for sessions that use an origin; else keep origins that are in use.

    Raises:
        SubscriptionInUse: a session still uses an origin.
        TargetError: a missing privilege, if there is an origin to drop; or a subclass.
    """
    pattern = f"^{origin_name(oid, relid)}{'_' if parts_only else '(_|$)'}"
    await _drop(run, f"SELECT roname FROM pg_catalog.pg_replication_origin WHERE roname ~ '{pattern}'", wait=wait)


async def sweep_origins(run: Run, oid: int) -> None:
    """Drop origins that killed processes left: those of tables that are not being synchronized. Origins in use are kept for the next start.

    Origins of parallel apply are kept too, because their names show that their changes are our own.

    Raises:
        TargetError: or a subclass.
    """
    await _drop(
        run,
        f"""
        SELECT o.roname FROM pg_catalog.pg_replication_origin AS o
         WHERE o.roname ~ '^{origin_name(oid)}_[0-9]'
           AND NOT EXISTS (SELECT FROM subscriber.pg_subscription_rel AS r
                            WHERE r.srsubid = {oid}::oid AND r.srsubstate::text IN ('i', 'd', 'f')
                              AND r.srrelid::text = pg_catalog.split_part(o.roname, '_', 3))
        """,
        wait=False,
    )


async def _drop(run: Run, names: str, *, wait: bool) -> None:
    clock = asyncio.get_running_loop()
    deadline = clock.time() + _WAIT
    for name, *_ in await run(names):
        while True:
            try:
                await run(f"SELECT pg_catalog.pg_replication_origin_drop('{name}')")
            except TargetError as error:
                if error.sqlstate == _UNDEFINED:
                    break
                if error.sqlstate != _IN_USE:
                    raise
                if not wait:
                    break
                if clock.time() >= deadline:
                    hint = "end the session in the target that uses it"
                    raise SubscriptionInUse(f'replication origin "{name}" cannot be dropped: {error}', hint=hint) from None
                await asyncio.sleep(_POLL)
            else:
                break
