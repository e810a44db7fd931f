"""The same changes followed by PostgreSQL's own subscription and by ours, and the two targets compared row by row.

A :class:`Nodes` is three databases: one publishes, one has a native subscription, one has ours, with the same publications and
parameters. What a scenario does, it does to the publisher alone, or to all three; then both targets have to hold the same, and, unless the
publications leave something out, what the publisher holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from subscriber import Settings, SubscriberError, TableName
from subscriber.protocol.quoting import quote_identifier
from subscriber.testing.comparison import compare, published_tables
from subscriber.testing.server import EmbeddedServer
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import eventually
from tests.support.replica import QUICK, Replica, replica

_TABLES = """
SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema$|subscriber$)' ORDER BY 1, 2
"""
_NOT_SYNCHRONIZED = """
SELECT count(*) FROM pg_subscription_rel r JOIN pg_subscription s ON s.oid = r.srsubid
WHERE s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND r.srsubstate <> 'r'
"""


def _option(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"


@dataclass
class BothSubscriptions:
    """Both subscriptions while they run."""

    publisher: Database
    native: Database
    replica: Replica
    server: EmbeddedServer
    publications: Sequence[str]
    name: str
    log_start: int = field(default=0)

    @property
    def ours(self) -> Database:
        """The target of our subscription."""
        return self.replica.target

    async def caught_up(self) -> None:
        """Both have copied all tables and applied everything that is committed on the publisher now."""
        lsn = self.publisher.current_lsn()
        await eventually(self.native, _NOT_SYNCHRONIZED, 0)
        replayed = f"SELECT replay_lsn >= '{lsn}' FROM pg_stat_replication WHERE application_name = '{self.name}' AND state = 'streaming'"
        await eventually(self.publisher, replayed, True)
        await self.replica.subscription.wait_for(lsn, 30)

    async def equal(self, *, publisher: bool = True) -> None:
        """Catch up; both targets hold the same rows in all tables, and in published ones the publisher's (unless False)."""
        await self.caught_up()
        tables = [TableName(*row) for row in self.native.fetch(_TABLES)]
        assert tables == [TableName(*row) for row in self.ours.fetch(_TABLES)]
        pairs = [(self.native, tables)]
        if publisher:
            pairs.append((self.publisher, await published_tables(self.publisher.conninfo(), self.publications)))
        for other, names in pairs:
            found = await compare(other.conninfo(), self.ours.conninfo(), names)
            different = [table for table in found if not table.equal]
            assert not different, f"ours differs from {other.name}: {different}"

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Catch up; the query gives the same rows in both targets; return them."""
        await self.caught_up()
        found = self.ours.fetch(query)
        assert found == self.native.fetch(query)
        return found

    async def same(self, query: str) -> list[tuple[Any, ...]]:
        """As :meth:`rows`, and the publisher gives them too."""
        found = await self.rows(query)
        assert found == self.publisher.fetch(query)
        return found

    async def value(self, query: str) -> Any:
        """The first column of the first of :meth:`rows`."""
        return (await self.rows(query))[0][0]

    def native_errors(self) -> list[str]:
        """What the native subscription's workers said since this began, warnings included."""
        text = self.server.log()[self.log_start :]
        found = re.findall(r"^\S+ \S+ \S+ \[\d+\] logical replication [a-z ]+worker (?:ERROR|WARNING): +(.*)$", text, re.MULTILINE)
        return [line for line in found if not line.startswith("terminating logical replication worker due to administrator")]

    async def both_report(self, native: str, kind: type[SubscriberError], ours: str | None = None) -> None:
        """Wait until native's log has an error with these words, and our last error is of this class and has them too (or others)."""
        words = native if ours is None else ours

        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            error, said = self.replica.subscription.status.last_error, self.native_errors()
            if any(native in line for line in said) and isinstance(error, kind) and words in error.one_line():
                return
            assert time.monotonic() < deadline, f"native says {sorted(set(said))}, ours {error!r}"
            await asyncio.sleep(0.02)

    async def assert_no_errors(self) -> None:
        """Neither had an error, and neither missed a row."""
        await self.caught_up()
        assert self.native_errors() == []
        status = self.replica.subscription.status
        assert status.last_error is None
        assert (status.statistics.confl_update_missing, status.statistics.confl_delete_missing) == (0, 0)


@dataclass
class Nodes:
    """Three empty databases: the publisher's, native's target, ours."""

    publisher: Database
    native: Database
    ours: Database
    server: EmbeddedServer

    def everywhere(self, query: str) -> None:
        """Run SQL in all three."""
        for database in (self.publisher, self.native, self.ours):
            database.execute(query)

    def in_targets(self, query: str) -> None:
        """Run SQL in both targets."""
        for database in (self.native, self.ours):
            database.execute(query)

    @contextlib.asynccontextmanager
    async def followed(
        self, *publications: str, settings: Settings = QUICK, ready: bool = True, conninfo: str | None = None, **options: Any
    ) -> AsyncIterator[BothSubscriptions]:
        """Both subscriptions while the block lasts.

        Args:
            publications: ``pub`` if none is given.
            settings: of ours.
            ready: wait until both have copied all tables.
            conninfo: how to reach the publisher.
            options: parameters of CREATE SUBSCRIPTION.
        """
        names = publications or ("pub",)
        name = f"native_{self.publisher.name}"
        log_start = len(self.server.log())
        self.native.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION '{conninfo or self.publisher.conninfo()}' "
            f"PUBLICATION {', '.join(map(quote_identifier, names))} "
            f"WITH ({', '.join(f'{key} = {_option(value)}' for key, value in {'enabled': True, **options}.items())})"
        )
        async with replica(self.publisher, self.ours, publications=names, settings=settings, conninfo=conninfo, **options) as ours:
            both = BothSubscriptions(self.publisher, self.native, ours, self.server, names, name, log_start)
            if ready:
                await both.caught_up()
            yield both


async def in_thread(database: Database, query: str) -> None:
    """Run SQL that waits for a subscription of this loop, on its own session."""
    with contextlib.closing(database.connect()) as session:
        await asyncio.to_thread(session.execute, query.encode())
