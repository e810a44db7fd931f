"""Keep writers out of one database, prove that none is left, and let them in again.

A closed database has the table ``subscriber.fence`` with one row: how it was closed, and what opens it. Table and row are made in the
transaction that closes the database. The transaction that opens it deletes the row. The table is dropped when the sessions that began in
between are ended: a process that finds it without a row ends them. This program's own sessions may write in a closed database.

The row has an owner: the slot of the subscription whose cutover has closed the database. Another cutover may find the database closed when
it looked open before. It can then neither leave this database nor open it.

The row also decides between two processes that work on one cutover because the first has lost its session with the target. Before writers
are let into the other database, :meth:`Fence.leave` notes it in the row. From then on no undo opens this database. If it was opened first,
the row is gone, and writers are not let into the other one.

============  =====================================================================================================================
kind          what closes the database
============  =====================================================================================================================
read-only     ``ALTER DATABASE … SET default_transaction_read_only = on``. A session can still override it: only an application that
              does not try is kept out.
revoke        ``REVOKE CONNECT ON DATABASE``, from all roles but those of this program. Superusers can still connect.
============  =====================================================================================================================

Afterwards the sessions that began before are ended. A session reads the setting, and the privilege, while it holds a lock on its database
(``InitPostgres`` of src/backend/utils/init/postinit.c). So after the sessions that hold this lock have become visible, all others were
begun under the fence. A prepared transaction can be committed at any time, also in a closed database: the proof waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from subscriber.catalog.schema_trust import DISTRUSTED, TRUST_HINT
from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.protocol.session_name import session_name
from subscriber.walreceiver.fences.fence_kinds import OWN_DEFAULT, FenceKind, closing, opening
from subscriber.walreceiver.fences.foreign_sessions import ForeignSessions
from subscriber.walreceiver.session import Session

__all__ = ["SCHEMA_IS_EMPTY", "Fence"]

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
_OVERRIDES: Final = """
SELECT DISTINCT r.rolname FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_roles r ON r.oid = s.setrole, unnest(s.setconfig) AS c
WHERE s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())) AND r.rolcanlogin
  AND c LIKE 'default_transaction_read_only=%' AND lower(c) NOT LIKE ALL (ARRAY['%=on', '%=true', '%=yes', '%=1'])
ORDER BY 1
"""
SCHEMA_IS_EMPTY: Final = """
SELECT NOT EXISTS (
    SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'subscriber'
)
"""


class _Closed(NamedTuple):
    """The row of a closed database.

    Attributes:
        owner: the slot of the subscription whose cutover has closed it.
        kind: how it was closed.
        before: JSON: the database's own default_transaction_read_only, or its grants of CONNECT: oid of the role, its name, grant option.
        left: whether writers were let into the other database.
    """

    owner: str
    kind: str
    before: str
    left: bool


class Fence:
    """The fence of one database.

    Args:
        conninfo: of a role that may close the database and end its sessions.
        name: of the subscription.
        slot: name of its slot.
        others: names that sessions of this program also bear: that of the way back.
        place: what the database is, for messages.
        roles: roles of this program, which may connect to a closed database.
        names: values of application_name that its connection strings set.
    """

    def __init__(
        self,
        conninfo: str,
        name: str,
        place: str,
        *,
        slot: str,
        others: Sequence[str],
        roles: Sequence[str],
        names: Sequence[str],
    ) -> None:
        self._conninfo = conninfo
        self._name = name
        self._place = place
        self._roles = roles
        self._owner = slot
        self._foreign = ForeignSessions([name, slot, *others], roles=roles, names=names)

    async def _session(self) -> Session:
        session = await Session.connect(self._conninfo, application_name=session_name(self._name, "cutover"))
        try:
            await self._require_trust(session)
        except BaseException:
            await session.close()
            raise
        return session

    async def is_closed(self) -> bool:
        """Whether a cutover has closed the database.

        Raises:
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            return await self._row(session) is not None

    async def is_opened(self) -> bool:
        """Whether nothing is left of a fence: also no session that began while the database was closed."""
        async with await self._session() as session:
            return not await self._exists(session)

    async def is_owned(self) -> bool:
        """Whether a cutover of this subscription has closed the database."""
        async with await self._session() as session:
            return await self._own_row(session) is not None

    async def has_left(self) -> bool:
        """Whether writers were let into the other database. See :meth:`leave`."""
        async with await self._session() as session:
            found = await self._own_row(session)
        return found is not None and found.left

    async def _own_row(self, session: Session) -> _Closed | None:
        found = await self._row(session)
        return found if found is not None and found.owner == self._owner else None

    @staticmethod
    async def _exists(session: Session) -> bool:
        return await session.execute("SELECT pg_catalog.to_regclass('subscriber.fence')") != [(None,)]

    async def _require_trust(self, session: Session) -> None:
        for what, owner in await session.execute(DISTRUSTED):
            if owner not in self._roles:
                raise ConfigurationError(f'{what} of {self._place} belongs to role "{owner}", which is not trusted', hint=TRUST_HINT)

    @classmethod
    async def _row(cls, session: Session) -> _Closed | None:
        if not await cls._exists(session):
            return None
        rows = await session.execute('SELECT owner, kind, before, "left" FROM subscriber.fence')
        return next((_Closed(owner or "", kind or "", before or "", left == "t") for owner, kind, before, left in rows), None)

    async def leave(self) -> bool:
        """Note that writers are let into the other database now: only :meth:`open` of a move in the other direction opens this one.

        Durable on return.

        Returns:
            False: this database is open, or was closed by another cutover. So the other one must stay closed.

        Raises:
            PublisherError: or a subclass. It is not known whether it was noted.
        """
        async with await self._session() as session:
            if await self._own_row(session) is None:
                return False
            await session.execute("SET synchronous_commit = local")
            return bool(
                await session.execute(f'UPDATE subscriber.fence SET "left" = true WHERE owner = {quote_literal(self._owner)} RETURNING 1')  # noqa: S608
            )

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep other processes from a block of this kind, from :meth:`leave` and from :meth:`open`, while this one runs.

        Raises:
            ConfigurationError: another process has opened this database, or has let writers into the other one.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            if await self._exists(session):
                await session.execute("BEGIN; LOCK TABLE subscriber.fence IN SHARE ROW EXCLUSIVE MODE")
            found = await self._own_row(session)
            if found is None or found.left:
                raise ConfigurationError(
                    f"{self._place} is not kept closed by this cutover any more", hint="another process has finished it, or has undone it"
                )
            yield
            await session.execute("COMMIT")

    async def problems(self, kind: str) -> list[tuple[str, str]]:
        """What keeps the database from being closed: errors, each with a hint."""
        async with await self._session() as session:
            ((role, owner, standby),) = await session.execute(
                "SELECT current_user, pg_catalog.pg_has_role(d.datdba, 'USAGE'), pg_catalog.pg_is_in_recovery()"
                " FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()"
            )
            if standby == "t":
                return [(f"{self._place} is in recovery: writers cannot be kept out there", "connect to the primary server")]
            hint = "give the connection string of its owner with --publisher-admin or --target-admin"
            found = []
            if owner != "t":
                found.append((f'role "{role}" may not close {self._place}: it does not own the database', hint))
            stuck = [each for each in await self._foreign.find(session) if not each.may_end]
            if stuck:
                found.append(
                    (
                        f'role "{role}" may not end {stuck[0].text} in {self._place}',
                        "GRANT pg_signal_backend and pg_read_all_stats to it, or end the session",
                    )
                )
            if kind == FenceKind.READ_ONLY:
                if await self._row(session) is None and await session.execute(f"SELECT ({OWN_DEFAULT})::bool") == [("t",)]:
                    found.append(
                        (
                            f"{self._place} has default_transaction_read_only = on already: its writers override that",
                            "use --fence revoke, or ALTER DATABASE … RESET default_transaction_read_only",
                        )
                    )
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

    async def close(self, kind: str, *, shared: bool = False) -> None:
        """Keep writers out. Durable on return. A database that is closed already stays as it is.

        Args:
            kind: see the module's docstring.
            shared: another cutover may have closed it.

        Raises:
            ConfigurationError: a session cannot be ended, or does not end, or another cutover has closed it. The database stays closed.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            found = await self._row(session)
            if found is None:
                await self._close(session, kind)
            elif found.owner != self._owner and not shared:
                raise ConfigurationError(f"{self._place} was closed by another cutover", hint="end that one first")
            await self._end_others(session)

    async def _close(self, session: Session, kind: str) -> None:
        commands, before = await closing(session, kind, self._roles)
        roles = ", ".join(map(quote_identifier, self._roles))
        values = ", ".join(map(quote_literal, (self._owner, kind, before)))
        await session.execute(
            "BEGIN; SET LOCAL synchronous_commit = local; CREATE SCHEMA IF NOT EXISTS subscriber;"
            f" GRANT USAGE, CREATE ON SCHEMA subscriber TO {roles};"
            " CREATE TABLE IF NOT EXISTS subscriber.fence"
            ' (owner text PRIMARY KEY, kind text NOT NULL, before text NOT NULL, "left" bool NOT NULL)'
        )
        # another role may have made them just now
        await self._require_trust(session)
        await session.execute(f"INSERT INTO subscriber.fence VALUES ({values}, false); {'; '.join([*commands, 'COMMIT'])}")  # noqa: S608

    async def open(self, *, undo: bool = False) -> bool:
        """Let writers in again. Durable on return. Does nothing if the database is open.

        Sessions that began while it was closed are ended: they would stay read-only.

        Args:
            undo: do not open it after :meth:`leave`, nor if another cutover has closed it.

        Returns:
            False: another cutover has closed it.

        Raises:
            ConfigurationError: with ``undo``: writers were let into the other database.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            await self._until_none(session, self._interrupted, "does not end", "end it, and try again")
            if await self._row(session) is not None:
                await session.execute("BEGIN READ WRITE; SET LOCAL synchronous_commit = local; LOCK TABLE subscriber.fence")
            found = await self._row(session)
            if found is not None:
                if undo and found.owner != self._owner:
                    return False
                if found.left and undo:
                    raise ConfigurationError(
                        f"{self._place} stays closed: writers were let into the other database", hint="find out by which process"
                    )
                commands = await opening(session, found.kind, found.before, self._roles)
                await session.execute("; ".join([*commands, "DELETE FROM subscriber.fence", "COMMIT"]))
            if await self._exists(session):
                if found is None or found.kind == FenceKind.READ_ONLY:
                    await self._end_others(session, wait=False)
                await session.execute("BEGIN READ WRITE; SET LOCAL synchronous_commit = local; LOCK TABLE subscriber.fence")
                await session.execute("COMMIT" if await self._row(session) is not None else "DROP TABLE subscriber.fence; COMMIT")
                if await session.execute(SCHEMA_IS_EMPTY) == [("t",)]:
                    await session.execute("DROP SCHEMA subscriber")
        return True

    async def closed_by(self) -> tuple[str, str] | None:
        """How the database was closed, for :meth:`how_to_open`; None: it is open."""
        async with await self._session() as session:
            found = await self._row(session)
        return None if found is None else (found.kind, found.before)

    async def how_to_open(self, kind: str, before: str) -> str:
        """SQL for people that lets writers in. Arguments: from :meth:`closed_by`."""
        async with await self._session() as session:
            commands = await opening(session, kind, before, self._roles)
        return f"BEGIN READ WRITE; {'; '.join([*commands, 'DROP TABLE IF EXISTS subscriber.fence'])}; COMMIT"

    async def drain(self) -> Lsn:
        """Prove that nothing that was begun before the fence can commit any more. Return an LSN after all commits.

        Raises:
            ConfigurationError: a session or a prepared transaction does not end.
            PublisherError: or a subclass.
        """
        async with await self._session() as session:
            await self._end_others(session)
            await self._until_none(session, self._foreign.writing, "writes", "end it, and try again")
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

        async def started(session: Session) -> list[str]:
            nonlocal starting
            starting &= {pid for (pid,) in await session.execute(_STARTING)}
            return [f"session {pid}" for pid in starting]

        await self._until_none(session, started, "is still connecting", "end it, or the session that it waits for, and try again")
        ((before,),) = await session.execute("SELECT pg_catalog.clock_timestamp()")
        since = f"(a.backend_start < {quote_literal(before or '')} OR a.backend_type IS NULL)"

        async def ended(session: Session) -> list[str]:
            others = await self._foreign.find(session, since)
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


async def _prepared(session: Session) -> list[str]:
    rows = await session.execute(
        "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database() ORDER BY prepared"
    )
    return [gid or "" for (gid,) in rows]


async def _as_texts(what: str, session: Session) -> list[str]:
    return [f'{what} "{gid}"' for gid in await _prepared(session)]
