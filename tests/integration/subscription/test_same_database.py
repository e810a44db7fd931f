"""A target that is the publisher is refused; a physical copy of the publisher is not. Subscriptions that form a loop are warned of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest

from subscriber import ConfigurationError, SubscriptionOptions, alter_subscription, create_subscription, drop_subscription
from subscriber.subscription.setup.checks import check
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.managed import create
from tests.support.program import Ended, slots, subscriber
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.roles import role
from tests.support.standby import standby_of

SAME = "target and publisher are the same database"
PUBLISHED = "CREATE TABLE t (v int); INSERT INTO t SELECT generate_series(1, 10); CREATE PUBLICATION pub FOR TABLE t"


def given(database: Database, verb: str, target: str, connection: str | None = None) -> Ended:
    arguments = ["--name", database.name] if verb != "create" else [database.name]
    more = ["--until-caught-up"] if verb == "run" else []
    conninfo = connection or database.conninfo()
    return subscriber(verb, *arguments, "--connection", conninfo, "--publication", "pub", "--target", target, *more)


@pytest.mark.parametrize("verb", ["check", "create", "run"])
def test_verbs_refuse_the_publisher_as_target(publisher18_db: Database, verb: str) -> None:
    publisher18_db.execute(PUBLISHED)
    ended = given(publisher18_db, verb, publisher18_db.dsn)
    assert ended.status == 1
    assert SAME in ended.output + ended.errors
    assert publisher18_db.value("SELECT count(*) FROM t") == 10
    assert slots(publisher18_db) == []


def test_same_database_by_another_address_and_role(publisher18_db: Database) -> None:
    publisher18_db.execute(PUBLISHED)
    with role(publisher18_db, "LOGIN REPLICATION") as replicator:
        publisher18_db.execute(f"GRANT SELECT ON t TO {replicator.name}")
        other = publisher18_db.dsn.replace("127.0.0.1", "localhost")
        assert other != publisher18_db.dsn
        assert SAME in given(publisher18_db, "run", other, replicator.conninfo).errors


@pytest.fixture
def neighbour_db(publisher18: ServerAddress) -> Iterator[Database]:
    """Another database of the publisher's server."""
    with fresh_database(publisher18, "tgt") as database:
        yield database


async def test_known_subscription_that_is_turned_towards_its_target(publisher18_db: Database, neighbour_db: Database) -> None:
    publisher18_db.execute(PUBLISHED)
    neighbour_db.execute("CREATE TABLE t (v int)")
    async with replica(publisher18_db, neighbour_db) as found:
        await found.same("SELECT v FROM t ORDER BY v")
    neighbour_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    with pytest.raises(ConfigurationError, match=SAME):
        await subscription_of(publisher18_db, neighbour_db, conninfo=neighbour_db.conninfo()).run()
    name = await create(publisher18_db, neighbour_db)
    async with alter_subscription(name, target=neighbour_db.dsn, settings=QUICK) as subscription:
        await subscription.set_connection(neighbour_db.conninfo())
        with pytest.raises(ConfigurationError, match=SAME):
            await subscription.refresh()
        await subscription.set_connection(publisher18_db.conninfo())
    await drop_subscription(name, target=neighbour_db.dsn, settings=QUICK)
    assert neighbour_db.value("SELECT count(*) FROM t") == 10


async def test_standby_of_the_target_and_copy_of_the_publisher(make_server: Callable[..., EmbeddedServer]) -> None:
    """A standby that replays the target's WAL is the target; once promoted, it is another database."""
    primary = make_server()
    primary.createdb("pub")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Database(ServerAddress(primary.dsn(), 18), "pub")))
        first.execute(PUBLISHED)
        standby = stack.enter_context(standby_of(primary))
        copy = stack.enter_context(contextlib.closing(Database(ServerAddress(standby.dsn(), 18), "pub")))
        said = await asyncio.to_thread(given, copy, "check", first.dsn)
        assert "error: the publisher is a standby of the target" in said.output
        assert SAME not in said.output
        copy.execute("SELECT pg_promote()")
        async with replica(first, copy, copy_data=False) as found:
            await found.caught_up()
            first.execute("INSERT INTO t VALUES (11)")
            await found.same("SELECT v FROM t ORDER BY v")
        said = await asyncio.to_thread(given, first, "check", copy.dsn)
        assert "error" not in said.output


LOOP = 'warning: the publisher replicates table "public.t" from the target, with subscription "{0}" and replication slot "{0}"'


async def looks(publisher: Database, target: Database, origin: str = "any") -> str:
    options = SubscriptionOptions.parse([f"origin={origin}", "copy_data=false"])
    found = await check("forth", connection=publisher.conninfo(), publications=["pub"], target=target.dsn, options=options)
    return "\n".join(f"{finding.severity}: {finding.message}" for finding in found)


@pytest.mark.parametrize("kind", ["ours", pytest.param("native", marks=pytest.mark.matrix)])
@pytest.mark.publisher(min=16, lacks="origin = none")
async def test_loop_of_subscriptions(publisher_db: Database, target_db: Database, kind: str) -> None:
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE t (v int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    name = f"back_{publisher_db.name}"
    assert "loop" not in await looks(publisher_db, target_db)
    url = publisher_db.dsn
    if kind == "native":
        target_db.fetch(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
        publisher_db.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION '{target_db.conninfo()}' PUBLICATION pub WITH (create_slot = false, enabled = false)"
        )
        # a disabled one receives nothing
        assert "loop" not in await looks(publisher_db, target_db)
        publisher_db.execute(f"ALTER SUBSCRIPTION {name} ENABLE")
    else:
        await create_subscription(name, connection=target_db.conninfo(), publications=["pub"], target=url)
    assert LOOP.format(name) in await looks(publisher_db, target_db)
    # their subscription takes everything: changes of the publisher come back to it
    assert LOOP.format(name) in await looks(publisher_db, target_db, "none")
    if kind == "native":
        publisher_db.execute(f"ALTER SUBSCRIPTION {name} SET (origin = none)")
    else:
        async with alter_subscription(name, target=url) as subscription:
            await subscription.set({"origin": "none"})
    assert "loop" not in await looks(publisher_db, target_db, "none")
    assert LOOP.format(name) in await looks(publisher_db, target_db)
