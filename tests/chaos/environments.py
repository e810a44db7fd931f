"""A publisher, a target of one kind, the proxies, the load and the program: what one round is about."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from subscriber.protocol.lsn import Lsn
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import create_tables
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.ports import LOOPBACK
from subscriber.testing.server import EmbeddedServer
from tests.chaos.forgeries import FORGED_XID
from tests.chaos.process import SETTINGS, ChaosProcess
from tests.crash import other_targets, scenario
from tests.crash.other_targets import MariaDBReader, SqliteReader, TargetReader, make_specimens_of_text
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.framing import MariaDBFraming, PostgresFraming
from tests.support.mariadb_database import MariaDatabase, fresh_mariadb_database
from tests.support.proxy import Proxy

KINDS = ("postgres15", "postgres18", "sqlite", "mariadb")
_ROWS = 4_000
_HUGE_ROWS = 1_500
_PUBLISHER = {"wal_sender_timeout": "6s", "wal_receiver_status_interval": "1s"}
_POSITION = "SELECT remote_lsn FROM {} WHERE srrelid = 0"


@dataclass
class Environment(ABC):
    """See the module.

    Attributes:
        server: the publisher's.
        to_publisher, to_target: the proxies; a file has none.
    """

    kind: str
    rng: random.Random
    server: EmbeddedServer
    publisher: Database
    to_publisher: Proxy
    to_target: Proxy | None
    process: ChaosProcess
    load: MixedLoad

    @abstractmethod
    def position(self) -> Lsn:
        """Up to where the target has everything; 0/0 before it has any."""

    @abstractmethod
    def are_tables_ready(self) -> bool:
        """No table is being copied."""

    @abstractmethod
    async def assert_same(self) -> None:
        """The rows of all tables, and what the program has left. It does not run."""

    @abstractmethod
    def forget_forged(self) -> None:
        """Remove the empty prepared transaction that a forged PREPARE left: its COMMIT PREPARED never comes."""

    @property
    def proxies(self) -> list[Proxy]:
        return [self.to_publisher] if self.to_target is None else [self.to_publisher, self.to_target]

    def confirmed(self) -> Lsn:
        """What was acknowledged to the publisher."""
        found = self.publisher.fetch(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{self.process.name}'")
        return Lsn.parse(found[0][0]) if found and found[0][0] else Lsn(0)


@dataclass
class PostgresEnvironment(Environment):
    """The target is PostgreSQL of the publisher's version."""

    target_server: EmbeddedServer
    target: Database

    def position(self) -> Lsn:
        return Lsn.parse(str(self._value(_POSITION.format('subscriber."position"')) or "0/0"))

    def _value(self, query: str) -> Any:
        if not self.target.value("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL"):
            return None
        rows = self.target.fetch(query)
        return rows[0][0] if rows else None

    def are_tables_ready(self) -> bool:
        return bool(self._value("SELECT count(*) > 0 AND bool_and(srsubstate = 'r') FROM subscriber.pg_subscription_rel"))

    def forget_forged(self) -> None:
        for (gid,) in self.target.fetch(f"SELECT gid FROM pg_prepared_xacts WHERE gid LIKE 'pg\\_gid\\_%\\_{FORGED_XID}'"):
            self.target.execute(f"ROLLBACK PREPARED '{gid}'")
        self.target.execute(f"DELETE FROM subscriber.prepared_transaction WHERE xid = {FORGED_XID}")

    async def assert_same(self) -> None:
        await scenario.assert_same(cast("Any", self.process))


@dataclass
class OtherEnvironment(Environment):
    """The target is no PostgreSQL."""

    reader: TargetReader
    database: MariaDatabase | None
    path: Path | None

    def position(self) -> Lsn:
        return Lsn.parse(self.reader.value(_POSITION.format("subscriber_position")) or "0/0")

    def are_tables_ready(self) -> bool:
        states = self.reader.value("SELECT group_concat(srsubstate) FROM subscriber_pg_subscription_rel") or ""
        return bool(states) and set(states) <= {"r", ","}

    def forget_forged(self) -> None:
        for table in ("prepared_transaction_chunk", "prepared_transaction"):
            self.execute(f"DELETE FROM subscriber_{table} WHERE xid = {FORGED_XID}")

    def execute(self, *statements: str) -> None:
        """In the target, on a session of its own that waits for no lock for long."""
        if self.path is not None:
            with contextlib.closing(self.open_file()) as file:
                for statement in statements:
                    file.execute(statement)
            return
        assert self.database is not None
        with contextlib.closing(self.database.connect()) as session, session.cursor() as cursor:
            cursor.execute("SET lock_wait_timeout = 2, innodb_lock_wait_timeout = 2")
            for statement in statements:
                cursor.execute(statement)

    def is_there(self) -> bool:
        """Whether the program has made the file."""
        return self.path is None or self.path.exists()

    def open_file(self) -> sqlite3.Connection:
        """Another program that has the file open; any thread may use it."""
        assert self.path is not None
        return sqlite3.connect(self.path, timeout=2, isolation_level=None, check_same_thread=False)

    async def assert_same(self) -> None:
        await other_targets.assert_same(cast("Any", self.process))


@dataclass
class Servers:
    """Started once for all rounds of a kind."""

    publisher: EmbeddedServer
    target: EmbeddedServer | EmbeddedMariaDB | None

    @classmethod
    def start(cls, kind: str, stack: contextlib.ExitStack) -> Servers:
        version = 15 if kind == "postgres15" else 18
        publisher = stack.enter_context(EmbeddedServer.create(version, settings=_PUBLISHER))
        if kind.startswith("postgres"):
            return cls(publisher, stack.enter_context(EmbeddedServer.create(version)))
        return cls(publisher, stack.enter_context(EmbeddedMariaDB.create()) if kind == "mariadb" else None)


@contextlib.asynccontextmanager
async def make_environment(kind: str, servers: Servers, rng: random.Random, directory: Path, rate: float) -> AsyncIterator[Environment]:
    """Everything for one round, empty target included; removed afterwards."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_context
        version = servers.publisher.version
        publisher = enter(fresh_database(ServerAddress(servers.publisher.dsn(), version), "pub"))
        await create_tables(publisher.dsn, rows=_ROWS)
        publisher.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA load")

        def log_event(text: str) -> None:
            if process:
                process[0].note(text)

        process: list[ChaosProcess] = []

        async def proxy(port: int, framing: type[PostgresFraming] | type[MariaDBFraming]) -> Proxy:
            made = Proxy(LOOPBACK, port, framing, rng, log_event)
            return await stack.enter_async_context(made)

        to_publisher = await proxy(servers.publisher.port, PostgresFraming)
        load = MixedLoad(
            publisher.dsn, seed=rng.randrange(10**6), rate=rate, sessions=3, huge_rows=_HUGE_ROWS, weights=scenario._WEIGHTS, reconnect=True
        )
        connection = publisher.conninfo(host=LOOPBACK, port=str(to_publisher.port), sslmode="disable")

        def make_process(url: str, proxied: str, settings: tuple[str, ...]) -> ChaosProcess:
            process.append(
                ChaosProcess(
                    publisher=publisher,
                    target_url=url,
                    directory=directory,
                    settings=settings,
                    connection=connection,
                    proxied_target=proxied,
                    secrets=[server.password for server in (servers.publisher, servers.target) if server is not None],
                )
            )
            stack.callback(process[0].end)
            return process[0]

        if isinstance(servers.target, EmbeddedServer):
            target = enter(fresh_database(ServerAddress(servers.target.dsn(), version), "tgt"))
            await create_tables(target.dsn)
            to_target = await proxy(servers.target.port, PostgresFraming)
            made = make_process(target.dsn, _moved(target.dsn, to_target.port) + "?sslmode=disable", SETTINGS)
            cast("Any", made).target = target
            yield PostgresEnvironment(kind, rng, servers.publisher, publisher, to_publisher, to_target, made, load, servers.target, target)
            return
        settings = (*SETTINGS, "create_tables=on")
        reader: TargetReader
        if isinstance(servers.target, EmbeddedMariaDB):
            database = enter(fresh_mariadb_database(servers.target))
            await make_specimens_of_text(database.url)
            to_target = await proxy(servers.target.port, MariaDBFraming)
            made = make_process(database.url, _moved(database.url, to_target.port), settings)
            reader = MariaDBReader(database)
            environment = OtherEnvironment(
                kind, rng, servers.publisher, publisher, to_publisher, to_target, made, load, reader, database, None
            )
        else:
            path = directory / "replica.db"
            reader = SqliteReader(path)
            made = make_process(reader.url, reader.url, settings)
            environment = OtherEnvironment(kind, rng, servers.publisher, publisher, to_publisher, None, made, load, reader, None, path)
        cast("Any", made).reader = reader
        yield environment


def _moved(url: str, port: int) -> str:
    """The same database at another port."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition(":")[0] + f":{port}").geturl()


async def in_thread(function: Any, *arguments: Any) -> Any:
    """What blocks, except the proxies."""
    return await asyncio.to_thread(function, *arguments)
