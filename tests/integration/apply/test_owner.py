"""OWNER TO: a created subscription is applied with the rights of its owner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from subscriber import ConfigurationError, SubscriptionOptions, TargetError, alter_subscription, create_subscription, drop_subscription
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import eventually
from tests.support.program import subscriber
from tests.support.replica import QUICK
from tests.support.roles import Role, role

ROWS = "SELECT id FROM t ORDER BY id"
ERROR = "SELECT coalesce((SELECT last_error FROM subscriber.subscription_stats), '')"


@pytest.fixture
def owner(target_db: Database) -> Iterator[Role]:
    with role(target_db) as found:
        yield found


@pytest.fixture
def publisher_and_target(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t, u; INSERT INTO t VALUES (1)")
    return publisher18_db, target_db


async def test_changes_are_made_with_the_owners_rights(publisher_and_target: tuple[Database, Database], owner: Role) -> None:
    """Copied and followed; what the role may not do is an error of the table alone while it is copied."""
    publisher, target = publisher_and_target
    name = await create(publisher, target, options=SubscriptionOptions(run_as_owner=True))
    assert target.value("SELECT subowner = current_user FROM subscriber.pg_subscription")
    ended = subscriber("alter", name, "--target", target.dsn, "--owner", owner.name)
    assert (ended.status, ended.errors) == (0, "")
    assert target.value("SELECT subowner::text FROM subscriber.pg_subscription") == owner.name
    target.execute(f"GRANT ALL ON u TO {owner.name}")
    async with launched(target):
        await eventually(target, f"SELECT position('permission denied for table t' IN ({ERROR})) > 0", True)
        await eventually(target, "SELECT srsubstate IN ('s', 'r') FROM subscriber.pg_subscription_rel WHERE srrelid = 'u'::regclass", True)
        target.execute(f"GRANT SELECT, INSERT ON t TO {owner.name}")
        await same(publisher, target, name, ROWS)
        publisher.execute("INSERT INTO t VALUES (2)")
        await same(publisher, target, name, ROWS)
        target.execute(f"REVOKE INSERT ON t FROM {owner.name}; UPDATE subscriber.subscription_stats SET last_error = NULL")
        publisher.execute("INSERT INTO t VALUES (3)")
        await eventually(target, f"SELECT position('permission denied for table t' IN ({ERROR})) > 0", True)
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.set_owner("postgres")
        await same(publisher, target, name, ROWS)
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_owner_that_cannot_become_the_tables_owner(publisher_and_target: tuple[Database, Database], owner: Role) -> None:
    publisher, target = publisher_and_target
    target.execute(f"ALTER TABLE u OWNER TO {owner.name}")
    name = await create(publisher, target)
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.set_owner(owner.name)
    async with launched(target):
        said = f'role "{owner.name}", the owner of the subscription, cannot SET ROLE to the owner of relation "public.t"'
        await eventually(target, f"SELECT position('{said}' IN ({ERROR})) > 0", True)
        await eventually(target, "SELECT srsubstate IN ('s', 'r') FROM subscriber.pg_subscription_rel WHERE srrelid = 'u'::regclass", True)
        target.execute(f"ALTER TABLE t OWNER TO {owner.name}")
        await same(publisher, target, name, ROWS)
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_roles_that_cannot_own_the_subscription(publisher_and_target: tuple[Database, Database], owner: Role) -> None:
    publisher, target = publisher_and_target
    name = await create(publisher, target)
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        with pytest.raises(TargetError, match='role "nobody" does not exist'):
            await subscription.set_owner("nobody")
    target.execute(f"GRANT USAGE ON SCHEMA subscriber TO {owner.name}; GRANT ALL ON ALL TABLES IN SCHEMA subscriber TO {owner.name}")
    async with alter_subscription(name, target=owner.conninfo, settings=QUICK) as subscription:
        with pytest.raises(TargetError, match='must be able to SET ROLE "postgres"'):
            await subscription.set_owner("postgres")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_targets_without_owners(publisher18_db: Database, tmp_path: object) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    url, name = f"sqlite:///{tmp_path}/replica.db", f"sub_{publisher18_db.name}"
    await create_subscription(name, connection=publisher18_db.conninfo(), publications=["pub"], target=url)
    async with alter_subscription(name, target=url) as subscription:
        with pytest.raises(ConfigurationError, match="this kind of target has no owners of subscriptions"):
            await subscription.set_owner("postgres")
    await drop_subscription(name, target=url)
