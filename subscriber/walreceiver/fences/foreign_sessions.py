"""The sessions of a database that are not this program's: those that a fence ends.

A session reads the database's setting, and its privilege, while it holds a lock on its database (``InitPostgres`` of
src/backend/utils/init/postinit.c). So after the sessions that hold this lock have become visible, all others were begun under the fence. A
prepared transaction can be committed at any time, also in a closed database: the proof that nothing can commit waits for its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_literal
from subscriber.protocol.session_name import session_marks
from subscriber.walreceiver.session import Session

__all__ = ["ForeignSession", "ForeignSessions"]

_POLL: Final = 0.02
_ENDING_SECONDS: Final = 10.0
"""How long sessions and prepared transactions may take to end."""

_OTHER_PROGRAM: Final = "subscriber "
"""How the names of sessions begin that belong to no subscription."""
_STARTING: Final = """
SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'object' AND classid = 'pg_catalog.pg_database'::pg_catalog.regclass
  AND objid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND mode = 'RowExclusiveLock' AND pid <> pg_catalog.pg_backend_pid()
"""
_PREPARED: Final = "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"


@dataclass(frozen=True, slots=True)
class ForeignSession:
    """A session of a client.

    Attributes:
        pid: its process id.
        role: its role.
        may_end: whether this role may end it, and knows enough about it to do so.
    """

    pid: str
    role: str
    may_end: bool

    @property
    def text(self) -> str:
        """What it is, for messages."""
        return f'session {self.pid} of role "{self.role}"'


class ForeignSessions:
    """Finds the sessions of the current database that are not this program's.

    Args:
        place: what the database is, for messages.
        subscriptions: names of subscriptions and slots; the sessions of this program bear them.
        roles: the roles of this program.
        names: values of application_name that its connection strings set.
    """

    def __init__(self, place: str, subscriptions: Sequence[str], *, roles: Sequence[str], names: Sequence[str]) -> None:
        self._place = place
        marks = [session_marks(name) for name in subscriptions]
        starts = [_OTHER_PROGRAM, *(start for start, _ in marks)]
        own = [
            f"a.application_name IN ({', '.join(map(quote_literal, [*subscriptions, *names]))})",
            *(f"pg_catalog.starts_with(a.application_name, {quote_literal(start)})" for start in starts),
            *(f"pg_catalog.strpos(a.application_name, {quote_literal(mark)}) > 0" for _, mark in marks),
        ]
        self._condition = f"""
            a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
            AND NOT (a.usename IN ({", ".join(map(quote_literal, roles))}) AND ({" OR ".join(own)}))
        """

    async def find(self, session: Session, condition: str = "true") -> list[ForeignSession]:
        """Sessions of clients.

        The type and the start of another role's session are NULL, unless this role has pg_read_all_stats: nothing can be proved then.
        """
        rows = await session.execute(f"""
            SELECT a.pid, a.usename, a.backend_type IS NOT NULL AND (
                       me.rolsuper OR (NOT r.rolsuper AND (pg_catalog.pg_has_role('pg_signal_backend', 'USAGE')
                                                           OR pg_catalog.pg_has_role(a.usesysid, 'USAGE'))))
            FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
            JOIN pg_catalog.pg_roles me ON me.rolname = current_user
            WHERE {self._condition} AND (a.backend_type = 'client backend' OR a.backend_type IS NULL) AND {condition}
            ORDER BY a.pid
        """)  # noqa: S608
        return [ForeignSession(pid or "", role or "", may == "t") for pid, role, may in rows]

    async def writing(self, session: Session) -> list[str]:
        """Sessions and background workers whose transaction has changed something, as texts."""
        rows = await session.execute(
            f"SELECT a.pid, a.backend_type FROM pg_catalog.pg_stat_activity a WHERE {self._condition} AND a.backend_xid IS NOT NULL"  # noqa: S608
            " AND (a.backend_type NOT IN ('autovacuum worker', 'parallel worker')"
            " OR (a.backend_type IS NULL AND a.usesysid IS NOT NULL))"
        )
        return [f"session {pid} ({kind or 'of another role'})" for pid, kind in rows]

    async def end(self, session: Session, *, wait: bool = True) -> None:
        """End all of them that began before now.

        Raises:
            ConfigurationError: one of them cannot be ended, or does not end.
        """
        starting = {pid for (pid,) in await session.execute(_STARTING)}

        async def started() -> list[str]:
            nonlocal starting
            starting &= {pid for (pid,) in await session.execute(_STARTING)}
            return [f"session {pid}" for pid in starting]

        await self.until_none(started, "is still connecting", "end it, or the session that it waits for, and try again")
        ((before,),) = await session.execute("SELECT pg_catalog.clock_timestamp()")
        since = f"(a.backend_start < {quote_literal(before or '')} OR a.backend_type IS NULL)"

        async def ended() -> list[str]:
            others = await self.find(session, since)
            for each in others:
                if not each.may_end:
                    raise ConfigurationError(
                        f"{each.text} in {self._place} cannot be ended: permission denied",
                        hint="give the connection string of a superuser with --publisher-admin or --target-admin, or end the session",
                    )
            if others:
                pids = ", ".join(f"({each.pid})" for each in others)
                await session.execute(f"SELECT pg_catalog.pg_terminate_backend(pid) FROM (VALUES {pids}) AS v (pid)")  # noqa: S608 (numbers)
            return [each.text for each in others]

        if wait:
            await self.until_none(ended, "does not end", "end it, and try again")
        else:
            await ended()

    async def drain(self, session: Session) -> None:
        """Prove that nothing of them can commit any more.

        Raises:
            ConfigurationError: a session or a prepared transaction does not end.
        """

        async def prepared() -> list[str]:
            return [f'prepared transaction "{gid}"' for (gid,) in await session.execute(_PREPARED)]

        await self.end(session)
        await self.until_none(lambda: self.writing(session), "writes", "end it, and try again")
        hint = "COMMIT PREPARED or ROLLBACK PREPARED it, and try again"
        await self.until_none(prepared, "is neither committed nor rolled back", hint)

    async def until_none(self, look: Callable[[], Awaitable[list[str]]], does: str, hint: str) -> None:
        """Wait until nothing is found.

        Raises:
            ConfigurationError: something is still found after some seconds.
        """
        now = asyncio.get_running_loop().time
        until = now() + _ENDING_SECONDS
        while found := await look():
            if now() > until:
                raise ConfigurationError(f"{found[0]} in {self._place} {does} for {_ENDING_SECONDS:g} s", hint=hint)
            await asyncio.sleep(_POLL)
