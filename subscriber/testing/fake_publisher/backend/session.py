"""One connection to the fake publisher: startup, authentication, and the loop over the client's messages.

Replication commands and SQL come by the simple query protocol; SQL also by the extended one, which JDBC uses. SQL is no more than a table
of known queries (:mod:`subscriber.testing.fake_publisher.catalog`). Any other text ends in an error that shows it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from struct import unpack
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend import wire
from subscriber.testing.fake_publisher.backend.authentication import authenticate
from subscriber.testing.fake_publisher.backend.extended import ExtendedProtocol
from subscriber.testing.fake_publisher.backend.parameters import reported_parameters
from subscriber.testing.fake_publisher.backend.results import CopyResult, Result
from subscriber.testing.fake_publisher.backend.statements import split_statements
from subscriber.testing.fake_publisher.catalog import find_query
from subscriber.testing.fake_publisher.replication.commands import StartReplication, is_command, parse_command
from subscriber.testing.fake_publisher.replication.requests import run_command
from subscriber.testing.fake_publisher.replication.snapshots import Snapshot
from subscriber.testing.fake_publisher.replication.walsender import WalSender
from subscriber.testing.fake_publisher.server_errors import ClientGone, ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.publisher import FakePublisher

__all__ = ["Session"]

_STARTUP_LIMIT: Final = 10000
_SHORT: Final = 8
_ABORTED: Final = ServerError("25P02", "current transaction is aborted, commands ignored until end of transaction block")


class Session:
    """A connection.

    Attributes:
        pid: its number, as the process id of a server's backend.
        database, user: from the startup packet.
        replication: whether it is a walsender.
        parameters: the run-time parameters that it has set.
        snapshot: that its transaction uses, or None.
        exported: the name of the snapshot that it exports, or None.
        status: ``I``, ``T`` or ``E``: as in ReadyForQuery.
        transaction_mode: the isolation level and access mode that its transaction was given.
        has_queried: whether its transaction has run a query.
        read_tables: the tables that its transaction has read, and therefore locked.
        query: the text of its latest query.
        cancelled: set by a cancel request.
    """

    def __init__(self, publisher: FakePublisher, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.publisher = publisher
        self.pid = pid
        self.key = os.urandom(4)
        self.reader = reader
        self.writer = writer
        self.database = self.user = self.application_name = ""
        self.replication = False
        self.parameters: dict[str, str] = {}
        self.snapshot: Snapshot | None = None
        self.exported: str | None = None
        self.status = "I"
        self.transaction_mode = ""
        self.has_queried = False
        self.read_tables: set[int] = set()
        self._savepoints: list[tuple[str, frozenset[int]]] = []
        self.query = ""
        self.cancelled = asyncio.Event()
        self._extended = ExtendedProtocol(self)

    # --- bytes

    def write(self, data: bytes) -> None:
        """Buffer bytes for the client."""
        self.writer.write(data)

    async def drain(self) -> None:
        """Send what is buffered.

        Raises:
            ClientGone: the connection is lost.
        """
        try:
            await self.writer.drain()
        except (ConnectionError, ssl.SSLError):
            raise ClientGone from None

    async def read_message(self) -> tuple[bytes, bytes]:
        """The next message of the client: its tag and body.

        Raises:
            ClientGone: the connection is lost.
            ServerError: the length is not valid.
        """
        head = await self._exactly(5)
        (length,) = unpack(">I", head[1:])
        if not 4 <= length <= wire.MAX_MESSAGE:
            raise ServerError("08P01", "invalid message length", fatal=True)
        return head[:1], await self._exactly(length - 4)

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            raise ClientGone from None

    # --- the connection

    async def run(self) -> None:
        """Serve the client until one side ends the connection."""
        try:
            try:
                if await self._start():
                    await self._loop()
            except ServerError as error:
                if error.message:
                    self.write(wire.error_response(error))
                await self.drain()
        except ClientGone:
            pass
        finally:
            self.end_transaction()
            self.publisher.session_ended(self)
            self.writer.close()

    async def _start(self) -> bool:
        while True:
            (length,) = unpack(">I", await self._exactly(4))
            if not _SHORT <= length <= _STARTUP_LIMIT:
                raise ServerError("08P01", "invalid length of startup packet", fatal=True)
            startup = wire.read_startup(await self._exactly(length - 4))
            if startup.code == wire.CANCEL:
                self.publisher.cancel(*startup.cancel)
                return False
            if startup.code in {wire.TLS, wire.GSS}:
                context = self.publisher.tls if startup.code == wire.TLS else None
                self.write(b"N" if context is None else b"S")
                await self.drain()
                if context is not None:
                    await self.writer.start_tls(context)
                continue
            break
        unknown = [name for name in startup.parameters if name.startswith("_pq_.")]
        if startup.minor or unknown:
            self.write(wire.negotiate_version(unknown))
        self.user = startup.parameters["user"]
        self.database = startup.parameters.get("database") or self.user
        self.application_name = startup.parameters.get("application_name", "")
        replication = startup.parameters.get("replication", "false").lower()
        self.replication = replication not in {"false", "off", "no", "0"}
        if self.replication and replication != "database":
            raise ServerError(
                "0A000", "the fake publisher has no physical replication", hint="connect with replication=database", fatal=True
            )
        if self.publisher.require_tls and self.writer.get_extra_info("ssl_object") is None:
            raise ServerError(
                "28000",
                f'no pg_hba.conf entry for host "127.0.0.1", user "{self.user}", database "{self.database}", no encryption',
                fatal=True,
            )
        await authenticate(self, self.publisher.password)
        if self.database != self.publisher.database:
            raise ServerError("3D000", f'database "{self.database}" does not exist', fatal=True)
        if self.publisher.stopping:
            raise ServerError("57P03", "the database system is shutting down", fatal=True)
        self.write(wire.authentication(0))
        for name, value in reported_parameters(self.publisher, self).items():
            self.write(wire.parameter_status(name, value))
        self.write(wire.backend_key(self.pid, self.key) + wire.READY["I"])
        await self.drain()
        return True

    async def _loop(self) -> None:
        while True:
            tag, body = await self.read_message()
            if tag == b"X":
                return
            if tag == b"Q":
                await self._query(wire.Reader(body).string())
            elif self.replication and tag in b"PBDECHS":
                raise ServerError("08P01", "extended query protocol not supported in a replication connection", fatal=True)
            elif tag in b"PBDECHS":
                await self._extended.message(tag, body)
            elif tag not in b"dcf":
                raise ServerError("08P01", f"invalid frontend message type {tag[0]}", fatal=True)

    async def _query(self, text: str) -> None:
        self.exported = None
        self.query = text
        self.cancelled.clear()
        self.publisher.changed()
        try:
            await self._statements(text)
        except ServerError as error:
            if error.fatal:
                raise
            self.failed()
            self.write(wire.error_response(error))
        self.write(wire.READY[self.status])
        await self.drain()

    async def _statements(self, text: str) -> None:
        command = parse_command(text, self.publisher.caps) if self.replication else None
        if command is not None and self.status == "E":
            raise _ABORTED
        if isinstance(command, StartReplication):
            if self.status == "T":
                raise ServerError("25001", "START_REPLICATION cannot run inside a transaction block")
            await WalSender(self.publisher, self, command).run()
            return
        if command is not None:
            self._answer(await run_command(self, command))
            return
        statements = split_statements(text)
        if not statements:
            self.write(wire.message(b"I"))
        for statement in statements:
            await self._give(await self.execute(statement))

    async def execute(self, statement: str) -> Result | CopyResult:
        """Run a statement of SQL.

        Raises:
            ServerError: it failed, or is not known.
        """
        found = find_query(statement)
        if self.status == "E" and not (found is not None and found.ends_transaction):
            raise _ABORTED
        if found is None and (wrong := is_command(statement)) is not None:
            raise ServerError("42601", f'syntax error at or near "{wrong}"')
        if found is None:
            raise ServerError(
                "0A000",
                f"the fake publisher does not know this query: {statement}",
                hint="use a server of subscriber.testing.server, or add the query to subscriber.testing.fake_publisher.catalog",
            )
        answer = await found.run(self)
        self.has_queried |= self.status == "T" and not (isinstance(answer, Result) and answer.fields is None)
        return answer

    async def _give(self, found: Result | CopyResult) -> None:
        if isinstance(found, CopyResult):
            self.write(wire.copy_out(found.columns, binary=found.binary))
            for place, line in enumerate(found.lines):
                self.write(wire.copy_data(line))
                if place % 100 == 0:
                    await self.drain()
            self.write(wire.COPY_DONE + wire.command_complete(f"COPY {found.rows}"))
        else:
            self._answer(found)

    def _answer(self, found: Result) -> None:
        if found.fields is not None:
            self.write(wire.row_description(found.fields))
            for row in found.rows:
                self.write(wire.data_row(row))
        self.write(wire.command_complete(found.tag))

    def warn(self, sqlstate: str, text: str) -> None:
        """Send a warning."""
        self.write(wire.warning(sqlstate, text))

    def set_parameter(self, name: str, value: str) -> None:
        """SET. A parameter that the client is told of is reported.

        Raises:
            ServerError: there is no such parameter.
        """
        publisher = self.publisher
        if not publisher.knows_parameter(self, name):
            raise ServerError("42704", f'unrecognized configuration parameter "{name}"')
        self.parameters[name.lower()] = value
        for reported in reported_parameters(publisher, self):
            if reported.lower() == name.lower():
                self.write(wire.parameter_status(reported, value))

    # --- transactions

    def begin(self, mode: str = "") -> None:
        """BEGIN, with its transaction mode."""
        if self.status == "T":
            self.warn("25001", "there is already a transaction in progress")
        elif self.status == "I":
            self.status = "T"
            self.transaction_mode = mode.upper()

    def end_transaction(self) -> None:
        """COMMIT or ROLLBACK."""
        self.status = "I"
        self.transaction_mode = ""
        self.has_queried = False
        self.snapshot = None
        self.read_tables.clear()
        self._savepoints.clear()

    def set_savepoint(self, name: str) -> None:
        """SAVEPOINT.

        Raises:
            ServerError: there is no transaction.
        """
        if self.status != "T":
            raise ServerError("25P01", "SAVEPOINT can only be used in transaction blocks")
        self._savepoints.append((name, frozenset(self.read_tables)))

    def release_savepoint(self, name: str) -> None:
        """RELEASE SAVEPOINT.

        Raises:
            ServerError: there is no such savepoint.
        """
        del self._savepoints[self._savepoint(name, "RELEASE SAVEPOINT") :]

    def rollback_to_savepoint(self, name: str) -> None:
        """ROLLBACK TO SAVEPOINT: it stays, and locks that were taken since are released.

        Raises:
            ServerError: there is no such savepoint.
        """
        place = self._savepoint(name, "ROLLBACK TO SAVEPOINT")
        del self._savepoints[place + 1 :]
        self.read_tables = set(self._savepoints[place][1])
        self.status = "T"

    def _savepoint(self, name: str, statement: str) -> int:
        if self.status == "I":
            raise ServerError("25P01", f"{statement} can only be used in transaction blocks")
        found = [place for place, (known, _) in enumerate(self._savepoints) if known == name]
        if not found:
            raise ServerError("3B001", f'savepoint "{name}" does not exist')
        return found[-1]

    def failed(self) -> None:
        """A statement failed."""
        if self.status == "T":
            self.status = "E"
