"""Publications added, dropped and set (native's topic 024): the same ALTER SUBSCRIPTION by native and by ours, and the same rows."""

from __future__ import annotations

import asyncio

import pytest

from subscriber import ConfigurationError, alter_subscription, create_subscription, drop_subscription
from tests.native.native import Nodes
from tests.support.managed import catch_up, launched
from tests.support.observation import eventually
from tests.support.replica import QUICK

TABLES = ("one", "two", "three")
STATES = """
SELECT srrelid::regclass::text, srsubstate::text FROM {schema}.pg_subscription_rel
WHERE srrelid IN (SELECT oid FROM pg_class) ORDER BY 1
"""
_WORDS = {"set": "SET", "add": "ADD", "drop": "DROP"}


async def test_add_drop_and_set(nodes18: Nodes) -> None:
    nodes, name = nodes18, f"pubs_{nodes18.publisher.name}"
    for table in TABLES:
        nodes.everywhere(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        nodes.publisher.execute(f"INSERT INTO {table} VALUES (1); CREATE PUBLICATION {table} FOR TABLE {table}")
    nodes.publisher.execute("CREATE PUBLICATION pair FOR TABLE one, two")
    nodes.native.execute(f"CREATE SUBSCRIPTION native_{name} CONNECTION '{nodes.publisher.conninfo()}' PUBLICATION one")
    await create_subscription(name, connection=nodes.publisher.conninfo(), publications=["one"], target=nodes.ours.dsn, settings=QUICK)
    written = 1

    async def write(expected: dict[str, int]) -> None:
        """A row into each table; both targets come to hold so many, of the same tables in the same states."""
        nonlocal written
        written += 1
        for table in TABLES:
            nodes.publisher.execute(f"INSERT INTO {table} VALUES ({written})")
        lsn = nodes.publisher.current_lsn()
        replayed = f"SELECT replay_lsn >= '{lsn}' FROM pg_stat_replication WHERE application_name = 'native_{name}' AND state = 'streaming'"
        await eventually(nodes.native, "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", 0)
        await eventually(nodes.publisher, replayed, True)
        await eventually(nodes.ours, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate <> 'r'", 0)
        await asyncio.to_thread(catch_up, nodes.publisher, nodes.ours, name)
        for target in (nodes.native, nodes.ours):
            assert {table: target.value(f"SELECT count(*) FROM {table}") for table in TABLES} == expected, target.name
        assert nodes.ours.fetch(STATES.format(schema="subscriber")) == nodes.native.fetch(STATES.format(schema="pg_catalog"))

    async def alter(form: str, publications: list[str], **options: bool) -> None:
        given = ", ".join(f"{key} = {str(value).lower()}" for key, value in options.items())
        native = f"ALTER SUBSCRIPTION native_{name} {_WORDS[form]} PUBLICATION {', '.join(publications)}"
        nodes.native.execute(f"{native} WITH ({given})" if given else native)
        async with alter_subscription(name, target=nodes.ours.dsn, settings=QUICK) as subscription:
            await getattr(subscription, f"{form}_publications")(publications, **options)
        stored = "SELECT subpublications FROM {}.pg_subscription WHERE subname = '{}'"
        assert nodes.ours.value(stored.format("subscriber", name)) == nodes.native.value(stored.format("pg_catalog", f"native_{name}"))

    async with launched(nodes.ours):
        await write({"one": 2, "two": 0, "three": 0})
        await alter("add", ["two"])
        await write({"one": 3, "two": 3, "three": 0})
        # without refresh its table waits for one
        await alter("add", ["three"], refresh=False)
        await write({"one": 4, "two": 4, "three": 0})
        nodes.native.execute(f"ALTER SUBSCRIPTION native_{name} REFRESH PUBLICATION WITH (copy_data = false)")
        async with alter_subscription(name, target=nodes.ours.dsn, settings=QUICK) as subscription:
            await subscription.refresh(copy_data=False)
        await write({"one": 5, "two": 5, "three": 1})
        await alter("drop", ["one", "two"])
        await write({"one": 5, "two": 5, "three": 2})
        # a table that another publication still has stays
        nodes.native.execute("TRUNCATE one, two")
        nodes.ours.execute("TRUNCATE one, two")
        await alter("set", ["one", "pair"])
        await write({"one": 7, "two": 7, "three": 2})
        await alter("drop", ["one"])
        await write({"one": 8, "two": 8, "three": 2})
        async with alter_subscription(name, target=nodes.ours.dsn, settings=QUICK) as subscription:
            with pytest.raises(ConfigurationError, match="cannot drop all the publications from a subscription"):
                await subscription.drop_publications(["pair"])
    await drop_subscription(name, target=nodes.ours.dsn, settings=QUICK)
