"""The target databases of the demonstration. A user's own target is inspected first, and left as it was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from subscriber.config import Settings
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.testing.comparison import PreparedComparison, compare, compare_prepared
from subscriber.testing.load.tables import create_tables, drop_tables
from subscriber.verification.model import TableReport

__all__ = ["DatabaseFacts", "DemoTarget", "Example", "PostgresTarget", "forget_subscription", "inspect_database"]

_CATALOG_SCHEMA: Final = "subscriber"


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """Facts about a database.

    Attributes:
        description: version and place for the user, without password.
        two_phase: whether transactions can be prepared or stored there.
        had_catalog: whether it has the catalog of another subscription.
    """

    description: str
    two_phase: bool
    had_catalog: bool


@dataclass(frozen=True, slots=True)
class Example:
    """An example program.

    Attributes:
        text: of the program.
        run: runs it, and returns its output. Blocks. Raises TargetError if it fails.
    """

    text: str
    run: Callable[[], str]


class DemoTarget(Protocol):
    """The methods that the demonstration needs from a target. They are called in the order in which they are defined."""

    @property
    def url(self) -> str:
        """The value for ``--target``."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings of a subscription for it."""
        ...

    @property
    def makes_tables(self) -> bool:
        """Whether the subscription itself creates the tables. A partitioned table is then a single one."""
        ...

    async def inspect(self) -> DatabaseFacts:
        """Connect and return the facts.

        Raises:
            TargetError: it cannot be reached, or rejects a query.
        """
        ...

    async def make_tables(self, schema: str) -> None:
        """Create the tables, or check that tables of these names do not exist.

        Raises:
            ConfigurationError: they exist.
            TargetError: a privilege is missing.
        """
        ...

    async def reached(self, lsn: Lsn) -> None:
        """Wait until readers of the target see everything up to this LSN, which is durable there, in all tables.

        Raises:
            SubscriberError: this will not happen.
        """
        ...

    def visible(self, flushed: Lsn) -> Lsn:
        """The position up to which readers see everything, if ``flushed`` is durable."""
        ...

    @property
    def proof(self) -> str:
        """A description of how :meth:`compare` compares."""
        ...

    async def compare(self, publisher_dsn: str, tables: Sequence[TableName]) -> list[TableReport]:
        """Compare tables."""
        ...

    async def compare_prepared(self, publisher_dsn: str) -> PreparedComparison | None:
        """Compare the prepared transactions of both sides. None if the target cannot hold any."""
        ...

    @property
    def examples(self) -> Sequence[Example]:
        """Example programs for the target."""
        ...

    async def forget(self, name: str) -> None:
        """Remove what the subscription left besides the tables."""
        ...

    async def remove_tables(self, schema: str) -> None:
        """Remove the tables."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class PostgresTarget:
    """A PostgreSQL database, with PostgreSQL's own sink.

    Args:
        dsn: of the database.
        temporary: whether the whole database is temporary, so that nothing need be removed.
    """

    settings: Final = Settings()
    makes_tables: Final = False
    proof: Final = "every row of both, as a checksum over all columns"
    examples: Final[Sequence[Example]] = ()

    def __init__(self, dsn: str, *, temporary: bool) -> None:
        self.url: Final = dsn
        self._temporary = temporary
        self._facts: DatabaseFacts | None = None

    async def inspect(self) -> DatabaseFacts:
        self._facts = await inspect_database(self.url)
        return self._facts

    async def make_tables(self, schema: str) -> None:
        with translated():
            await create_tables(self.url, schema=schema)

    async def reached(self, lsn: Lsn) -> None:
        """Do nothing: durable changes are visible."""

    def visible(self, flushed: Lsn) -> Lsn:
        """Everything durable is visible."""
        return flushed

    async def compare(self, publisher_dsn: str, tables: Sequence[TableName]) -> list[TableReport]:
        return await compare(publisher_dsn, self.url, tables)

    async def compare_prepared(self, publisher_dsn: str) -> PreparedComparison | None:
        assert self._facts is not None
        with translated():
            return await compare_prepared(publisher_dsn, self.url) if self._facts.two_phase else None

    async def forget(self, name: str) -> None:
        assert self._facts is not None
        if not self._temporary:
            await forget_subscription(self.url, name, had_catalog=self._facts.had_catalog)

    async def remove_tables(self, schema: str) -> None:
        if not self._temporary:
            with translated():
                await drop_tables(self.url, schema=schema)

    async def close(self) -> None:
        """See :class:`DemoTarget`."""


async def inspect_database(dsn: str) -> DatabaseFacts:
    """Read the facts about a database. Changes nothing.

    Raises:
        ConfigurationError: ``dsn`` is neither a conninfo nor a URL of PostgreSQL.
        TargetError: it cannot be reached, or rejects a query.
    """
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise ConfigurationError(
            "the target is not a URL or conninfo of PostgreSQL", hint="example: postgresql://user@host:5432/dbname"
        ) from None
    with translated():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT current_setting('server_version'), current_setting('max_prepared_transactions')::integer > 0,"
                " to_regnamespace(%s) IS NOT NULL",
                [_CATALOG_SCHEMA],
            )
            row = await cursor.fetchone()
            assert row is not None
            version, two_phase, had_catalog = row
            info = connection.info
            place = f'{info.host}:{info.port}, database "{info.dbname}"'
    return DatabaseFacts(f"PostgreSQL {version.split()[0]} on {place}", two_phase, had_catalog)


async def forget_subscription(dsn: str, name: str, *, had_catalog: bool) -> None:
    """Remove what an ended subscription left in the target: prepared transactions and its rows in the catalog.

    The catalog itself is removed too if it did not exist before (``had_catalog``) and no other subscription uses it.
    """
    with translated():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute("SELECT to_regclass('subscriber.pg_subscription')")
            if await cursor.fetchone() == (None,):
                return
            cursor = await connection.execute("SELECT oid::bigint FROM subscriber.pg_subscription WHERE subname = %s", [name])
            for (oid,) in await cursor.fetchall():
                await _remove(dsn, connection, oid)
            if not had_catalog:
                await _drop_unused_catalog(connection)


async def _remove(dsn: str, connection: psycopg.AsyncConnection[Any], oid: int) -> None:
    catalog = await PostgresCatalog.open(dsn, "subscriber demo")
    try:
        for gid in await catalog.remove(oid):
            await connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
    finally:
        await catalog.close()


async def _drop_unused_catalog(connection: psycopg.AsyncConnection[Any]) -> None:
    async with connection.transaction():
        await connection.execute("LOCK TABLE subscriber.pg_subscription IN ACCESS EXCLUSIVE MODE")
        cursor = await connection.execute("SELECT EXISTS (SELECT FROM subscriber.pg_subscription)")
        if await cursor.fetchone() == (False,):
            await connection.execute("DROP SCHEMA subscriber CASCADE")
