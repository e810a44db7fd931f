"""PostgreSQL 19 as a publisher, from its documentation: no server of it was there to compare with."""

from __future__ import annotations

import subscriber
from subscriber import Settings, SubscriptionOptions
from subscriber.interfaces import TableName
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.subscription.spec import RunSpec
from subscriber.testing.fake_publisher import FakePublisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.sequences import read_sequences
from tests.unit.testing.fake_publisher.replicas import items, replica


async def findings(publisher: FakePublisher, publication: str) -> list[str]:
    found = await subscriber.check("sub", connection=publisher.dsn(), publications=[publication], target=MemorySink(MemoryTarget()))
    return [f"{finding.severity}: {finding.message}" for finding in found]


async def test_wal_level_replica_suffices_and_tables_are_excepted() -> None:
    async with items(19) as publisher:
        publisher.create_table("secret", {"id": "int"}, key=["id"])
        publisher.create_publication("p", all_tables=True, except_tables=["secret"])
        connection = await WalReceiverConnection.connect(publisher.dsn(), application_name="test")
        assert await connection.show("wal_level") == await connection.show("effective_wal_level") == "replica"
        target = MemoryTarget()
        async with replica(publisher, target) as copy:
            async with publisher.transaction() as t:
                t.insert("items", id=1)
                t.insert("secret", id=1)
            await copy.same()
            assert await connection.show("effective_wal_level") == "logical"
        assert TableName("public", "secret") not in target.tables
        assert not [finding for finding in await findings(publisher, "p") if "wal_level" in finding]
        publisher.settings["wal_level"] = publisher.settings["effective_wal_level"] = "minimal"
        assert 'error: wal_level is "minimal" on the publisher' in await findings(publisher, "p")
        await connection.close()


async def test_a_publication_of_sequences_alone() -> None:
    async with items(19) as publisher:
        publisher.create_sequence("numbers", last_value=7, is_called=True)
        publisher.create_publication("s", all_sequences=True)
        assert await findings(publisher, "s") == ["warning: the publications publish sequences only: nothing is copied or followed"]
        connection = await WalReceiverConnection.connect(publisher.dsn(), application_name="test")
        everything = await read_sequences(connection, ["s"])
        await connection.close()
        (found,) = everything.sequences
        assert (str(found.name), found.last_value, found.is_called, everything.unreadable) == ("public.numbers", 7, True, [])


def test_the_timeout_of_a_subscription_replaces_the_setting() -> None:
    for value, used in ((-1.0, 60.0), (0.0, 0.0), (30.0, 30.0)):
        spec = RunSpec(
            name="s",
            conninfo="",
            publications=("p",),
            options=SubscriptionOptions(wal_receiver_timeout=value),
            settings=Settings(),
            sink=MemorySink(MemoryTarget()),
        )
        assert spec.settings.wal_receiver_timeout == used
