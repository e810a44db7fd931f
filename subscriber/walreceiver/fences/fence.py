"""Keep writers out of one database, prove that none is left, and let them in again.

============  =====================================================================================================================
kind          what closes the database
============  =====================================================================================================================
read-only     ``ALTER DATABASE … SET default_transaction_read_only = on``. A session can still override it: only an application that
              does not try is kept out.
revoke        ``REVOKE CONNECT ON DATABASE``, from all roles but those of this program. Superusers can still connect.
============  =====================================================================================================================

Afterwards the sessions that began before are ended (:mod:`.foreign_sessions`). This program's own sessions may write in a closed database.
The row of a closed database (:mod:`.fence_row`) says how it was closed, and is the record of the move that leaves it. A read-only database
that was opened keeps the row until the sessions that began in between are ended: they would stay read-only.

The lock of a cutover is an advisory lock in the database that writers leave. Its session does nothing else, so the lock is free as soon as
the process is killed, also while the server still makes its last statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from psycopg.pq import TransactionStatus

from subscriber.catalog.schema_trust import DISTRUSTED, trust_hint
from subscriber.errors import ConfigurationError, PublisherError, SubscriptionInUse
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.protocol.session_name import session_name
from subscriber.walreceiver.fences.fence_kinds import OWN_DEFAULT, FenceKind, closing, opening
from subscriber.walreceiver.fences.fence_row import LOCK, FenceRow, State, begin_change, drop_row, read_row, write_row
from subscriber.walreceiver.fences.foreign_sessions import ForeignSessions
from subscriber.walreceiver.session import Session

__all__ = ["Fence"]

_POLL: Final = 0.02
_LOCK_SECONDS: Final = 2.0
"""How long the lock of a process that was killed may be held."""
_LOCK_KEY: Final = 7310868735423963504
_HOLDER: Final = f"""
SELECT pid FROM pg_catalog.pg_locks
WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND ((classid::bigint << 32) | objid::bigint) = {_LOCK_KEY}
  AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
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


class Fence:
    """The fence of one database. All methods raise PublisherError, or a subclass, if the database cannot be used.

    Args:
        conninfo: of a role that may close the database and end its sessions.
        name: of the subscription.
        owner: identifies the subscription among all that use this database.
        place: what the database is, for messages.
        names: names that sessions of this program also bear: the slot, the way back.
        roles: roles of this program, which may connect to a closed database.
        applications: values of application_name that its connection strings set.
    """

    def __init__(
        self,
        conninfo: str,
        name: str,
        place: str,
        *,
        owner: str,
        names: Sequence[str],
        roles: Sequence[str],
        applications: Sequence[str] = (),
    ) -> None:
        self._conninfo = conninfo
        self._name = name
        self._place = place
        self._roles = roles
        self._owner = owner
        self._foreign = ForeignSessions(place, [name, *names], roles=roles, names=applications)
        self._lock: Session | None = None
        self._keeps = False
        self._kept: Session | None = None

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        session = await self._reused() or await self._connect("cutover")
        try:
            yield session
        except BaseException:
            await session.close()
            raise
        if self._keeps and self._kept is None and session.pgconn.transaction_status == TransactionStatus.IDLE:
            self._kept = session
        else:
            await session.close()

    async def _reused(self) -> Session | None:
        """The session of the step before, if it is still there."""
        session, self._kept = self._kept, None
        if session is not None:
            try:
                await self._require_trust(session)
            except BaseException as error:
                await session.close()
                if not isinstance(error, PublisherError):
                    raise
                return None
        return session

    def keep_session(self) -> None:
        """Use one session for all steps from now on, until :meth:`unlock`: to connect takes time, which writers wait for."""
        self._keeps = True

    async def _connect(self, role: str) -> Session:
        session = await Session.connect(self._conninfo, application_name=session_name(self._name, role))
        try:
            await self._require_trust(session)
        except BaseException:
            await session.close()
            raise
        return session

    async def _require_trust(self, session: Session) -> None:
        for what, owner in await session.execute(DISTRUSTED):
            if owner not in self._roles:
                raise ConfigurationError(
                    f'{what} of {self._place} belongs to role "{owner}", which is not trusted', hint=trust_hint(owner or "")
                )

    async def row(self, *, own: bool = True) -> FenceRow | None:
        """The row of the database.

        Args:
            own: only if a cutover of this subscription has made it.
        """
        async with self._session() as session:
            found = await read_row(session)
        return None if found is None or (own and found.owner != self._owner) else found

    async def problems(self, kind: str) -> list[tuple[str, str]]:
        """What keeps the database from being closed: errors, each with a hint."""
        async with self._session() as session:
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
                if await read_row(session) is None and await session.execute(f"SELECT ({OWN_DEFAULT})::bool") == [("t",)]:
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

    # --- the lock

    async def lock(self) -> None:
        """Take the lock of a cutover, unless this process has it. End the statements of a process that was killed.

        Raises:
            SubscriptionInUse: another process has it.
        """
        if self._lock is not None:
            with contextlib.suppress(PublisherError):
                await self._lock.execute("SELECT 1")
                return
            await self._lock.close()
            self._lock = None
        session = await self._connect("cutover lock")
        try:
            until = asyncio.get_running_loop().time() + _LOCK_SECONDS
            while await session.execute(f"SELECT pg_catalog.pg_try_advisory_lock({_LOCK_KEY})") != [("t",)]:
                holder = await session.execute(_HOLDER)
                if holder and asyncio.get_running_loop().time() > until:
                    raise SubscriptionInUse(f"another cutover of {self._place} is active for PID {holder[0][0]}", hint="wait for its end")
                await asyncio.sleep(_POLL)
            await self._foreign.until_none(lambda: self._interrupted(session), "does not end", "end it, and try again")
        except BaseException:
            await session.close()
            raise
        self._lock = session

    async def unlock(self) -> None:
        """Release the lock, and end the session that is kept. Idempotent."""
        for session in (self._lock, self._kept):
            if session is not None:
                await session.close()
        self._lock = self._kept = None
        self._keeps = False

    @contextlib.asynccontextmanager
    async def held(self, attempt: str) -> AsyncIterator[None]:
        """Keep the row as it is during a block, which changes something that belongs to the move elsewhere.

        Raises:
            ConfigurationError: another process, or a person, has changed the row.
            PublisherError: the lock is lost, because its session is.
        """
        assert self._lock is not None, "it was locked"
        await self._lock.execute("BEGIN")
        try:
            if await read_row(self._lock) is not None:
                await self._lock.execute(LOCK)
            self._expected(await read_row(self._lock), State.UNDER_WAY, attempt)
            yield
        finally:
            with contextlib.suppress(PublisherError):
                await self._lock.execute("ROLLBACK")

    def _expected(self, row: FenceRow | None, states: Collection[str], attempt: str) -> FenceRow:
        if row is None or row.owner != self._owner or row.attempt != attempt or row.state not in states:
            if row is not None and row.owner == self._owner and row.state in {State.LEFT, State.MOVED}:
                raise ConfigurationError(f"writers have left {self._place}", hint="another process has finished this")
            raise ConfigurationError(f"{self._place} was opened meanwhile", hint="find out by whom, and try again")
        return row

    async def _interrupted(self, session: Session) -> list[str]:
        """End sessions of a process that was killed: the server would still make their last statement, for example close the database."""
        rows = await session.execute(
            "SELECT pid, pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"  # noqa: S608
            " WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid() AND usename = current_user"
            f" AND application_name = {quote_literal(session_name(self._name, 'cutover'))}"
        )
        return [f"session {pid} of an earlier cutover" for pid, _ in rows]

    # --- the source of a move

    async def begin(self, kind: str, details: Mapping[str, Any]) -> FenceRow:
        """Record that a move away from this database begins. Durable on return, as all changes of the row.

        Raises:
            ConfigurationError: it is closed, or another move is under way.
        """
        row = FenceRow(self._owner, uuid.uuid4().hex, State.BEGUN, kind, "null", details, None)
        async with self._session() as session:
            if await self._begin(session) is not None:
                raise ConfigurationError(f"{self._place} was closed by another cutover", hint="end that one first")
            await write_row(session, row)
        return row

    async def close(self, attempt: str) -> None:
        """Keep writers out of the source.

        Raises:
            ConfigurationError: a session cannot be ended, or does not end. The database stays closed.
        """
        async with self._session() as session:
            row = self._expected(await begin_change(session), {State.BEGUN}, attempt)
            commands, before = await closing(session, row.kind, self._roles)
            await write_row(session, replace(row, state=State.CLOSED, before=before), commands)
            await self._foreign.end(session)

    async def drain(self) -> Lsn:
        """Prove that nothing that was begun before the fence can commit any more. Return an LSN after all commits.

        Raises:
            ConfigurationError: a session or a prepared transaction does not end.
        """
        async with self._session() as session:
            await self._foreign.drain(session)
            return await self.flushed(session)

    async def end(self) -> Lsn:
        """Return an LSN after all commits so far, up to which the WAL is flushed."""
        async with self._session() as session:
            return await self.flushed(session)

    @staticmethod
    async def flushed(session: Session) -> Lsn:
        """As :meth:`end`, in an open session."""
        ((lsn,),) = await session.execute(_FLUSHED)
        return Lsn.parse(lsn or "0/0")

    async def advance(self, attempt: str, state: str) -> None:
        """Record that writers are let into the other database (``left``: from now on nothing is undone), or that the move is finished.

        Raises:
            ConfigurationError: this database is open. So the other one must stay closed.
            PublisherError: it is not known whether it was recorded.
        """
        async with self._session() as session:
            before = State.CLOSED if state == State.LEFT else State.LEFT
            row = self._expected(await begin_change(session), {before}, attempt)
            await write_row(session, replace(row, state=state))

    async def undo(self, attempt: str) -> float | None:
        """Let writers into the source again. The row stays: the rest is undone next.

        Returns:
            For how many seconds it was closed. None: it was open.

        Raises:
            ConfigurationError: writers were let into the other database, or another process has undone it.
        """
        async with self._session() as session:
            row = self._expected(await begin_change(session), {State.BEGUN, State.CLOSED, State.UNDONE}, attempt)
            commands = await opening(session, row.kind, row.before, self._roles) if row.state == State.CLOSED else []
            await write_row(session, replace(row, state=State.UNDONE), commands)
            await self._end_read_only(session, row)
        return row.seconds if row.state == State.CLOSED else None

    async def forget(self, attempt: str) -> None:
        """Drop the row of a move that is undone."""
        async with self._session() as session:
            self._expected(await read_row(session), {State.UNDONE}, attempt)
            await drop_row(session)

    # --- the destination of a move

    async def bar(self, kind: str, attempt: str) -> None:
        """Keep writers out of the destination. If it is closed already, it stays as it is, also after an undone move.

        Raises:
            ConfigurationError: another cutover moves writers, or a session cannot be ended. The database stays closed.
        """
        async with self._session() as session:
            found = await self._begin(session)
            if found is None or found.state == State.OPENED:
                commands, before = await closing(session, kind, self._roles)
                await write_row(session, FenceRow(self._owner, attempt, State.BARRED, kind, before, {}, None), commands)
            elif found.state in {State.KEPT, State.MOVED}:
                await session.execute("COMMIT")
            elif found.state == State.BARRED and found.owner == self._owner:
                await write_row(session, replace(found, attempt=attempt))
            else:
                raise ConfigurationError(f"{self._place} was closed by another cutover", hint="end that one first")
            await self._foreign.end(session)

    async def keep(self, attempt: str) -> None:
        """Let the destination stay closed if the move is undone: writers may be led here."""
        async with self._session() as session:
            found = await begin_change(session)
            if found is not None and found.state == State.BARRED:
                await write_row(session, replace(self._expected(found, {State.BARRED}, attempt), state=State.KEPT))

    async def open(self, *states: str) -> bool:
        """Let writers in, if the database is closed and has one of these states.

        Returns:
            Whether the database is open.
        """
        async with self._session() as session:
            row = await begin_change(session)
            if row is None:
                return True
            if row.state not in {*states, State.OPENED}:
                return False
            commands = [] if row.state == State.OPENED else await opening(session, row.kind, row.before, self._roles)
            await write_row(session, replace(row, state=State.OPENED), commands)
            await self._end_read_only(session, row)
            await drop_row(session)
        return True

    async def how_to_open(self, row: FenceRow) -> str:
        """SQL for people that lets writers in."""
        async with self._session() as session:
            commands = await opening(session, row.kind, row.before, self._roles)
        return f"BEGIN READ WRITE; {'; '.join([*commands, 'DROP TABLE IF EXISTS subscriber.fence'])}; COMMIT"

    async def _begin(self, session: Session) -> FenceRow | None:
        found = await begin_change(session, readers=self._roles)
        # another role may have made schema or table just now
        await self._require_trust(session)
        return found

    async def _end_read_only(self, session: Session, row: FenceRow) -> None:
        """End the sessions that began while the database was closed: they would stay read-only."""
        if row.kind == FenceKind.READ_ONLY and row.state != State.BEGUN:
            await self._foreign.end(session, wait=False)
