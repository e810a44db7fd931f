"""Replication origins: what tells the target's own publications that a change came from elsewhere.

A session that has an origin set up marks every change it writes. A subscriber of the target with ``origin = none`` gets none of them: that
is what keeps two databases that replicate into each other from a loop.

Names: ``subscriber_<subscription oid>`` for the apply session, ``subscriber_<oid>_<relid>`` for a table's synchronization,
``subscriber_<oid>_<relid>_<k>`` for the sessions that commit the parts of its copy, ``subscriber_<oid>_parallel_<k>`` for those of
parallel apply (one origin serves one session at a time). Native's
names, ``pg_<oid>`` and so on, are reserved: no SQL function makes them. The LSN of an origin is for monitoring and never read by us: the
position row is what counts, so an origin may be dropped, or be missing, at any time.

An origin that was ever set up occupies one of the server's few state slots until it is dropped. So those of a table go with
its synchronization, and those a killed process left are swept at the next start.

No origin to be had (no privilege, no free slot) is no error: replication goes on, after one warning for each reason.

Source: PostgreSQL manual, Replication Progress Tracking; 9.28.6 (Replication Management Functions).
"""

# names are made of numbers
# ruff: noqa: S608

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

import asyncpg

from subscriber.errors import SubscriptionInUse, TargetError
from subscriber.sinks.postgres.errors import translated

__all__ = [
    "PARALLEL",
    "Origins",
    "Run",
    "asyncpg_run",
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
"""Behind the name of the apply session's origin: those of the sessions of parallel apply, which are as good as its own."""
_WAIT: Final = 10.0
_POLL: Final = 0.1
_LOST_SECONDS: Final = 3.0
"""A session that this process has lost has so long to end by itself."""

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

# before 14 the functions look at rolsuper themselves
_MAY_USE: Final = f"""
SELECT current_user::text, pg_catalog.current_setting('server_version_num')::int,
       CASE WHEN pg_catalog.current_setting('server_version_num')::int < 140000 THEN pg_catalog.bool_and(r.rolsuper)
            ELSE pg_catalog.bool_and(pg_catalog.has_function_privilege('pg_catalog.' || f.name, 'EXECUTE')) END
FROM pg_catalog.pg_roles AS r, pg_catalog.unnest(ARRAY['{"', '".join(_FUNCTIONS)}']) AS f(name) WHERE r.rolname = current_user
"""

Run = Callable[[str], Awaitable[Sequence[Sequence[Any]]]]
"""Runs one query without parameters, outside a transaction, and returns its rows. Raises TargetError."""


def asyncpg_run(connection: asyncpg.Connection[Any]) -> Run:
    """Queries through a session of asyncpg."""

    async def run(query: str) -> Sequence[Sequence[Any]]:
        with translated():
            return [tuple(row) for row in await connection.fetch(query)]

    return run


def origin_name(oid: int, relid: int = 0, part: int | None = None) -> str:
    """Of a subscription, of one of its tables, of one session that copies that table."""
    numbers = [oid, *([relid] if relid else []), *([part] if part is not None else [])]
    return "_".join(["subscriber", *map(str, numbers)])


def parallel_origin(oid: int, number: int) -> str:
    """Of a session that applies streamed transactions before their end."""
    return f"{origin_name(oid)}{PARALLEL}{number}"


def grant(role: str, version: int) -> str:
    """The hint for a role that may not use origins."""
    if version < 140000:
        return "connect to the target as a superuser: PostgreSQL 13 lets nobody else use replication origins"
    functions = ", ".join(f"pg_catalog.{name}" for name in _FUNCTIONS)
    return f'GRANT EXECUTE ON FUNCTION {functions} TO "{role}"'


def limit_setting(version: int) -> str:
    """The setting that limits how many origins can be in use."""
    return "max_active_replication_origins" if version >= 180000 else "max_replication_slots"


async def may_use_origins(run: Run) -> tuple[bool, str, int]:
    """Whether the session's role may; the role and the server's version number."""
    ((role, version, may),) = await run(_MAY_USE)
    return bool(may), str(role), int(version)


class Origins:
    """Sets origins up in the sessions of one sink, and tells once for each reason why there is none.

    Args:
        relied_on: whether somebody seems to rely on them, so that it is a warning.
        lost: gives the PIDs of sessions that the sink has lost; one that keeps an origin in use is terminated.
    """

    def __init__(self, *, relied_on: bool, lost: Callable[[], Collection[int]]) -> None:
        self._lost = lost
        self._level = logging.WARNING if relied_on else logging.INFO
        self._warned: set[str] = set()

    async def set_up(self, run: Run, name: str) -> int | None:
        """Let a session's changes carry this origin from now on; made if it is missing.

        Returns:
            The origin's id in the server (``pg_replication_origin.roident``), or None: there is none to be had.

        Raises:
            SubscriptionInUse: another session still has it after ten seconds.
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
                # made or dropped by another session just now: at once again
                if error.sqlstate not in {_UNIQUE, _UNDEFINED, _IN_USE}:
                    raise
                if error.sqlstate == _IN_USE and clock.time() >= deadline - _WAIT + _LOST_SECONDS:
                    await self._end_lost(run, error)
                if clock.time() >= deadline:
                    hint = "stop the other process that serves this subscription, or its session in the target"
                    raise SubscriptionInUse(f'replication origin "{name}" cannot be used: {error}', hint=hint) from None
            await asyncio.sleep(_POLL)

    async def _end_lost(self, run: Run, error: TargetError) -> None:
        """Terminate the session that has the origin, if the sink has lost it. Only the error tells which one has it."""
        for number in {int(found) for found in re.findall(r"\d+", str(error))[-1:]}.intersection(self._lost()):
            await run(f"SELECT pg_catalog.pg_terminate_backend({number})")

    def _warn(self, reason: str, hint: str) -> None:
        if hint not in self._warned:
            self._warned.add(hint)
            _log.log(
                self._level,
                "changes are made in the target without a replication origin: %s; a subscriber of the target with origin = none gets"
                " them as the target's own (hint: %s)",
                reason,
                hint,
            )


async def _set_up(run: Run, name: str) -> int:
    if not await run(_named(name)):
        await run(f"SELECT pg_catalog.pg_replication_origin_create('{name}')")
    await run(f"SELECT pg_catalog.pg_replication_origin_session_setup('{name}')")
    # not before: somebody may have dropped it and made it anew; from here on nobody can
    ((_, identifier),) = await run(_named(name))
    return int(identifier)


def _named(name: str) -> str:
    return f"SELECT roname, roident::int FROM pg_catalog.pg_replication_origin WHERE roname = '{name}'"


async def drop_origins(run: Run, oid: int, relid: int = 0, *, parts_only: bool = False, wait: bool = True) -> None:
    """Drop all origins of a subscription, or those of one of its tables, or only those of the table's copy. None is fine.

    Args:
        run: of a session that has none of them set up.
        oid: of the subscription.
        relid: of the table; 0: the subscription's and those of all its tables.
        parts_only: those of sessions that copy parts of the table.
        wait: for sessions that still have one, for ten seconds; else theirs stay.

    Raises:
        SubscriptionInUse: a session still has one.
        TargetError: no privilege, though there is something to drop; or another subclass.
    """
    pattern = f"^{origin_name(oid, relid)}{'_' if parts_only else '(_|$)'}"
    await _drop(run, f"SELECT roname FROM pg_catalog.pg_replication_origin WHERE roname ~ '{pattern}'", wait=wait)


async def sweep_origins(run: Run, oid: int) -> None:
    """Drop what killed processes left: origins of tables that are not being synchronized. Those still in use stay, for another time.

    Those of parallel apply stay too: what they changed is known as our own by their names.

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
                    hint = "end the session that uses it, in the target"
                    raise SubscriptionInUse(f'replication origin "{name}" cannot be dropped: {error}', hint=hint) from None
                await asyncio.sleep(_POLL)
            else:
                break
