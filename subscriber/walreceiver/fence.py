"""Keep writers out of one database, prove that none is left, and let them in again.

A closed database has the table ``subscriber.fence`` with one row: how it was closed, and what opens it. Table and row are made in the
transaction that closes the database. This program's own sessions look for the table, and may write nevertheless.

============  =====================================================================================================================
kind          what closes the database
============  =====================================================================================================================
read-only     ``ALTER DATABASE … SET default_transaction_read_only = on``. A session can still override it: only an application that
              does not try is kept out.
revoke        ``REVOKE CONNECT ON DATABASE``, from all roles but those of this program. Superusers can still connect.
command:…     a command of the user, with ``SUBSCRIBER_FENCE=close`` or ``open`` in its environment.
============  =====================================================================================================================

Afterwards the sessions that began before are ended. A session reads the setting, and the privilege, while it holds a lock on its database
(``InitPostgres`` of src/backend/utils/init/postinit.c). So after the sessions that hold this lock have become visible, all others were
begun under the fence. A prepared transaction can be committed at any time, also in a closed database: the proof waits for its end.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.protocol.session_name import session_name
from subscriber.walreceiver.session import Row, Session

__all__ = ["Fence", "FenceKind"]

_POLL: Final = 0.02
_ENDING_SECONDS: Final = 10.0
"""How long sessions and prepared transactions may take to end."""

_DATABASE: Final = "(SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
_STARTING: Final = f"""
SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'object' AND classid = 'pg_catalog.pg_database'::pg_catalog.regclass AND objid = {_DATABASE}
  AND mode = 'RowExclusiveLock' AND pid <> pg_catalog.pg_backend_pid()
"""  # noqa: S608
_FLUSHED: Final = """
BEGIN READ WRITE; SET LOCAL synchronous_commit = local;
SELECT pg_catalog.pg_logical_emit_message(true, 'subscriber', 'cutover'); COMMIT;
SELECT pg_catalog.pg_current_wal_flush_lsn()
"""
_GRANTS: Final = """
SELECT coalesce(r.rolname, ''), a.is_grantable
FROM pg_catalog.pg_database d, pg_catalog.aclexplode(coalesce(d.datacl, pg_catalog.acldefault('d', d.datdba))) a
LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE d.datname = pg_catalog.current_database() AND a.privilege_type = 'CONNECT'
ORDER BY 1
"""
_OVERRIDES: Final = """
SELECT DISTINCT r.rolname FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_roles r ON r.oid = s.setrole, unnest(s.setconfig) AS c
WHERE s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())) AND r.rolcanlogin
  AND c LIKE 'default_transaction_read_only=%' AND lower(c) NOT LIKE ALL (ARRAY['%=on', '%=true', '%=yes', '%=1'])
ORDER BY 1
"""
_EMPTY: Final = """
SELECT NOT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'subscriber'
)
"""


class FenceKind:
    """Names of the kinds."""

    READ_ONLY: Final = "read-only"
    REVOKE: Final = "revoke"
    COMMAND: Final = "command:"


@dataclass(frozen=True, slots=True)
class _Session:
    pid: str
    role: str
    may_end: bool

    @property
    def text(self) -> str:
        return f'session {self.pid} of role "{self.role}"'


class Fence:
    """The fence of one database.

    Args:
        conninfo: of a role that may close the database and end its sessions.
        name: of the subscription; the sessions of this program begin with it.
        place: what the database is, for messages.
        roles: roles of this program, which may connect to a closed database.
        names: values of application_name that its connection strings set.
        run: runs a command of the user with these variables in its environment.
    """

    def __init__(
        self,
        conninfo: str,
        name: str,
        place: str,
        *,
        roles: Sequence[str],
        names: Sequence[str],
        run: Callable[[str, dict[str, str]], Awaitable[None]],
    ) -> None:
        self._conninfo = conninfo
        self._name = name
        self._place = place
        self._roles = roles
        self._run = run
        start = quote_literal(session_name(name, "x")[:-1])
        own = ", ".join(map(quote_literal, [name, f"{name}_back", *names]))
        self._foreign = f"""
            a.datname = pg_catalog.current_database() AND a.pid <> pg_catalog.pg_backend_pid()
            AND NOT (a.usename IN ({", ".join(map(quote_literal, roles))})
                     AND (a.application_name IN ({own}) OR pg_catalog.starts_with(a.application_name, {start})
                          OR pg_catalog.starts_with(a.application_name, {quote_literal(f"{name}_back ")})
                          OR pg_catalog.starts_with(a.application_name, 'subscriber ')))
        """

    async def _session(self) -> Session:
        session = await Session.connect(self._conninfo, application_name=session_name(self._name, "cutover"))
        await session.execute("SET default_transaction_read_only = off")
        return session

    async def number(self) -> str | None:
        """What :meth:`close` was given, if the database is closed.

        Raises:
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            found = await self._row(session)
        return None if found is None else found[0]

    async def _row(self, session: Session) -> Row | None:
        if await session.execute("SELECT pg_catalog.to_regclass('subscriber.fence')") == [(None,)]:
            return None
        return next(iter(await session.execute('SELECT "number", kind, grants FROM subscriber.fence')), None)

    async def problems(self, kind: str) -> list[tuple[str, str]]:
        """What keeps the database from being closed: errors, each with a hint."""
        async with await self._session() as session:
            ((role, owner, standby),) = await session.execute(
                "SELECT current_user, pg_catalog.pg_has_role(d.datdba, 'USAGE'), pg_catalog.pg_is_in_recovery()"
                " FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()"
            )
            if standby == "t":
                return [(f"{self._place} is in recovery: writers cannot be kept out there", "connect to the primary server")]
            hint = "give the connection string of its owner with --publisher-admin or --target-admin, or use --fence command:…"
            found = []
            if owner != "t":
                found.append((f'role "{role}" may not close {self._place}: it does not own the database', hint))
            if kind.startswith(FenceKind.COMMAND):
                found = []
            stuck = [each for each in await self._others(session) if not each.may_end]
            if stuck:
                found.append(
                    (
                        f'role "{role}" may not end {stuck[0].text} in {self._place}',
                        "GRANT pg_signal_backend and pg_read_all_stats to it, or end the session",
                    )
                )
            if kind == FenceKind.READ_ONLY:
                found += [
                    (
                        f'role "{other}" has its own default_transaction_read_only, which counts more than that of {self._place}',
                        f"ALTER ROLE {quote_identifier(other or '')} RESET default_transaction_read_only (or … IN DATABASE …)",
                    )
                    for (other,) in await session.execute(_OVERRIDES)
                ]
            if kind == FenceKind.REVOKE:
                foreign = await session.execute(
                    "SELECT DISTINCT a.grantor::pg_catalog.regrole FROM pg_catalog.pg_database d, pg_catalog.aclexplode(d.datacl) a"
                    " WHERE d.datname = pg_catalog.current_database() AND a.privilege_type = 'CONNECT' AND a.grantor <> d.datdba"
                )
                found += [(f"CONNECT on {self._place} was granted by role {grantor}", "revoke that grant first") for (grantor,) in foreign]
        return found

    async def prepared(self) -> list[str]:
        """The names of the database's prepared transactions."""
        async with await self._session() as session:
            return await _prepared(session)

    async def close(self, kind: str) -> None:
        """Keep writers out. Durable on return. A database that is closed already stays as it is.

        Raises:
            ConfigurationError: a session cannot be ended, or does not end. The database stays closed.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            found = await self._row(session)
            if found is None:
                await self._close(session, kind)
            else:
                # what opens it later is in the row
                kind = found[1] or ""
            if kind.startswith(FenceKind.COMMAND):
                await self._run(kind.removeprefix(FenceKind.COMMAND), self._variables("close"))
            await self._end_others(session)

    async def _close(self, session: Session, kind: str) -> None:
        ((database,),) = await session.execute("SELECT pg_catalog.current_database()")
        name = quote_identifier(database or "")
        commands, grants = list[str](), list[Row]()
        if kind == FenceKind.READ_ONLY:
            commands.append(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        elif kind == FenceKind.REVOKE:
            grants = await session.execute(_GRANTS)
            commands += [f"REVOKE CONNECT ON DATABASE {name} FROM {_grantee(each[0])}" for each in grants]
            commands += [f"GRANT CONNECT ON DATABASE {name} TO {quote_identifier(role)}" for role in self._roles]
        roles = ", ".join(map(quote_identifier, self._roles))
        values = ", ".join(map(quote_literal, (str(uuid.uuid4()), kind, json.dumps(grants))))
        await session.execute(
            "BEGIN; SET LOCAL synchronous_commit = local; CREATE SCHEMA IF NOT EXISTS subscriber;"  # noqa: S608
            f" GRANT USAGE, CREATE ON SCHEMA subscriber TO {roles};"
            ' CREATE TABLE subscriber.fence ("number" text PRIMARY KEY, kind text NOT NULL, grants text NOT NULL);'
            f" INSERT INTO subscriber.fence VALUES ({values}); {'; '.join([*commands, 'COMMIT'])}"
        )

    async def open(self) -> None:
        """Let writers in again. Durable on return. Does nothing if the database is open.

        Sessions that began while it was closed are ended: they would stay read-only.

        Raises:
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            await self._until_none(session, self._interrupted, "does not end", "end it, and try again")
            found = await self._row(session)
            if found is None:
                return
            _, kind, grants = found
            if (kind or "").startswith(FenceKind.COMMAND):
                await self._run((kind or "").removeprefix(FenceKind.COMMAND), self._variables("open"))
            commands = await self.opening(session, kind or "", grants or "[]")
            await session.execute(
                f"BEGIN; SET LOCAL synchronous_commit = local; {'; '.join([*commands, 'DROP TABLE subscriber.fence', 'COMMIT'])}"
            )
            if await session.execute(_EMPTY) == [("t",)]:
                await session.execute("DROP SCHEMA subscriber")
            if kind == FenceKind.READ_ONLY:
                await self._end_others(session, wait=False)

    async def opening(self, session: Session, kind: str, grants: str) -> list[str]:
        """The SQL that lets writers in."""
        ((database,),) = await session.execute("SELECT pg_catalog.current_database()")
        name = quote_identifier(database or "")
        if kind == FenceKind.READ_ONLY:
            return [f"ALTER DATABASE {name} RESET default_transaction_read_only"]
        before = dict(json.loads(grants))
        return [
            *(f"REVOKE CONNECT ON DATABASE {name} FROM {quote_identifier(role)}" for role in self._roles if before and role not in before),
            *(
                f"GRANT CONNECT ON DATABASE {name} TO {_grantee(role)}{' WITH GRANT OPTION' if option == 't' else ''}"
                for role, option in before.items()
            ),
        ]

    async def how_to_open(self) -> str:
        """SQL for people that lets writers in."""
        async with await self._session() as session:
            found = await self._row(session)
            if found is None:
                return ""
            commands = await self.opening(session, found[1] or "", found[2] or "[]")
        return f"BEGIN READ WRITE; {'; '.join([*commands, 'DROP TABLE IF EXISTS subscriber.fence'])}; COMMIT"

    async def drain(self) -> Lsn:
        """Prove that nothing that was begun before the fence can commit any more. Return an LSN after all commits.

        Raises:
            ConfigurationError: a session or a prepared transaction does not end.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            await self._end_others(session)
            await self._until_none(session, self._writing, "writes", "end it, and try again")
            await self._until_none(
                session,
                lambda found: _as_texts("prepared transaction", found),
                "is neither committed nor rolled back",
                "COMMIT PREPARED or ROLLBACK PREPARED it, and try again",
            )
            return await self.flushed(session)

    async def end(self) -> Lsn:
        """Return an LSN after all commits so far, up to which the WAL is flushed.

        Raises:
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            return await self.flushed(session)

    @staticmethod
    async def flushed(session: Session) -> Lsn:
        """As :meth:`end`, in an open session."""
        ((lsn,),) = await session.execute(_FLUSHED)
        return Lsn.parse(lsn or "0/0")

    async def _until_none(self, session: Session, look: Callable[[Session], Awaitable[list[str]]], does: str, hint: str) -> None:
        now = asyncio.get_running_loop().time
        until = now() + _ENDING_SECONDS
        while found := await look(session):
            if now() > until:
                raise ConfigurationError(f"{found[0]} in {self._place} {does} for {_ENDING_SECONDS:g} s", hint=hint)
            await asyncio.sleep(_POLL)

    async def _end_others(self, session: Session, *, wait: bool = True) -> None:
        """End all sessions that are not this program's."""
        starting = {pid for (pid,) in await session.execute(_STARTING)}
        while starting:
            await asyncio.sleep(_POLL)
            starting &= {pid for (pid,) in await session.execute(_STARTING)}
        ((before,),) = await session.execute("SELECT pg_catalog.clock_timestamp()")
        since = f"(a.backend_start < {quote_literal(before or '')} OR a.backend_type IS NULL)"

        async def ended(session: Session) -> list[str]:
            others = await self._others(session, since)
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
            await self._until_none(session, ended, "does not end", "end it, and try again")
        else:
            await ended(session)

    async def _interrupted(self, session: Session) -> list[str]:
        """End sessions of a process that was killed: the server would still make their last statement, for example close the database."""
        rows = await session.execute(
            "SELECT pid, pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"  # noqa: S608
            " WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid() AND usename = current_user"
            f" AND application_name = {quote_literal(session_name(self._name, 'cutover'))}"
        )
        return [f"session {pid} of an earlier cutover" for pid, _ in rows]

    async def _others(self, session: Session, condition: str = "true") -> list[_Session]:
        """Sessions of clients that are not this program's.

        The type and the start of another role's session are NULL, unless this role has pg_read_all_stats: nothing can be proved then.
        """
        rows = await session.execute(f"""
            SELECT a.pid, a.usename, a.backend_type IS NOT NULL AND (
                       me.rolsuper OR (NOT r.rolsuper AND (pg_catalog.pg_has_role('pg_signal_backend', 'USAGE')
                                                           OR pg_catalog.pg_has_role(a.usesysid, 'USAGE'))))
            FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
            JOIN pg_catalog.pg_roles me ON me.rolname = current_user
            WHERE {self._foreign} AND (a.backend_type = 'client backend' OR a.backend_type IS NULL) AND {condition}
            ORDER BY a.pid
        """)  # noqa: S608
        return [_Session(pid or "", role or "", may == "t") for pid, role, may in rows]

    async def _writing(self, session: Session) -> list[str]:
        rows = await session.execute(
            f"SELECT a.pid, a.backend_type FROM pg_catalog.pg_stat_activity a WHERE {self._foreign} AND a.backend_xid IS NOT NULL"  # noqa: S608
            " AND (a.backend_type NOT IN ('autovacuum worker', 'parallel worker')"
            " OR (a.backend_type IS NULL AND a.usesysid IS NOT NULL))"
        )
        return [f"session {pid} ({kind or 'of another role'})" for pid, kind in rows]

    def _variables(self, action: str) -> dict[str, str]:
        return {"SUBSCRIBER_FENCE": action, "SUBSCRIBER_DATABASE": self._place.removeprefix("the ").removesuffix(" database")}


async def _prepared(session: Session) -> list[str]:
    rows = await session.execute(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"
    )
    return [gid or "" for (gid,) in rows]


async def _as_texts(what: str, session: Session) -> list[str]:
    return [f'{what} "{gid}"' for gid in await _prepared(session)]


def _grantee(role: str | None) -> str:
    return quote_identifier(role) if role else "PUBLIC"
