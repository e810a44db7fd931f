"""Publications added, dropped and set (native's topic 024): the same ALTER SUBSCRIPTION by native and by ours, and the same rows."""

from __future__ import annotations

import asyncio

import pytest

from subscriber import ConfigurationError, alter_subscription, create_subscription, drop_subscription
from tests.native.native import Site
from tests.support.managed import QUICK, catch_up, launched
from tests.support.observation import eventually

TABLES = ("one", "two", "three")
STATES = """
SELECT srrelid::regclass::text, srsubstate::text FROM {schema}.pg_subscription_rel
WHERE srrelid IN (SELECT oid FROM pg_class) ORDER BY 1
"""
_WORDS = {"set": "SET", "add": "ADD", "drop": "DROP"}


async def test_add_drop_and_set(site18: Site) -> None:
    site, name = site18, f"pubs_{site18.publisher.name}"
    for table in TABLES:
        site.everywhere(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        site.publisher.execute(f"INSERT INTO {table} VALUES (1); CREATE PUBLICATION {table} FOR TABLE {table}")
    site.publisher.execute("CREATE PUBLICATION pair FOR TABLE one, two")
    site.native.execute(f"CREATE SUBSCRIPTION native_{name} CONNECTION '{site.publisher.conninfo()}' PUBLICATION one")
    await create_subscription(name, connection=site.publisher.conninfo(), publications=["one"], target=site.ours.dsn, settings=QUICK)
    written = 1

    async def write(expected: dict[str, int]) -> None:
        """A row into each table; both targets come to hold so many, of the same tables in the same states."""
        nonlocal written
        written += 1
        for table in TABLES:
            site.publisher.execute(f"INSERT INTO {table} VALUES ({written})")
        lsn = site.publisher.current_lsn()
        replayed = f"SELECT replay_lsn >= '{lsn}' FROM pg_stat_replication WHERE application_name = 'native_{name}' AND state = 'streaming'"
        await eventually(site.native, "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", 0)
        await eventually(site.publisher, replayed, True)
        await eventually(site.ours, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate <> 'r'", 0)
        await asyncio.to_thread(catch_up, site.publisher, site.ours, name)
        for target in (site.native, site.ours):
            assert {table: target.value(f"SELECT count(*) FROM {table}") for table in TABLES} == expected, target.name
        assert site.ours.fetch(STATES.format(schema="subscriber")) == site.native.fetch(STATES.format(schema="pg_catalog"))

    async def alter(form: str, publications: list[str], **options: bool) -> None:
        given = ", ".join(f"{key} = {str(value).lower()}" for key, value in options.items())
        native = f"ALTER SUBSCRIPTION native_{name} {_WORDS[form]} PUBLICATION {', '.join(publications)}"
        site.native.execute(f"{native} WITH ({given})" if given else native)
        async with alter_subscription(name, target=site.ours.dsn, settings=QUICK) as subscription:
            await getattr(subscription, f"{form}_publications")(publications, **options)
        stored = "SELECT subpublications FROM {}.pg_subscription WHERE subname = '{}'"
        assert site.ours.value(stored.format("subscriber", name)) == site.native.value(stored.format("pg_catalog", f"native_{name}"))

    async with launched(site.ours):
        await write({"one": 2, "two": 0, "three": 0})
        await alter("add", ["two"])
        await write({"one": 3, "two": 3, "three": 0})
        # without refresh its table waits for one
        await alter("add", ["three"], refresh=False)
        await write({"one": 4, "two": 4, "three": 0})
        site.native.execute(f"ALTER SUBSCRIPTION native_{name} REFRESH PUBLICATION WITH (copy_data = false)")
        async with alter_subscription(name, target=site.ours.dsn, settings=QUICK) as subscription:
            await subscription.refresh(copy_data=False)
        await write({"one": 5, "two": 5, "three": 1})
        await alter("drop", ["one", "two"])
        await write({"one": 5, "two": 5, "three": 2})
        # a table that another publication still has stays
        site.native.execute("TRUNCATE one, two")
        site.ours.execute("TRUNCATE one, two")
        await alter("set", ["one", "pair"])
        await write({"one": 7, "two": 7, "three": 2})
        await alter("drop", ["one"])
        await write({"one": 8, "two": 8, "three": 2})
        async with alter_subscription(name, target=site.ours.dsn, settings=QUICK) as subscription:
            with pytest.raises(ConfigurationError, match="cannot drop all the publications from a subscription"):
                await subscription.drop_publications(["pair"])
    await drop_subscription(name, target=site.ours.dsn, settings=QUICK)
