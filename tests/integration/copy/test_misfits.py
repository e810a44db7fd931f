"""One table that does not fit: its own synchronization fails, and the other tables are copied and followed."""

from __future__ import annotations

import pytest

from subscriber import RelationError
from tests.support.database import Database
from tests.support.observation import eventually, slot_of, until
from tests.support.program import slots
from tests.support.replica import replica, subscription_of

TABLES = "CREATE TABLE {} (id int PRIMARY KEY, v text)"
SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
MISFIT = 'logical replication target relation "public.a" is missing replicated column: "v"'


@pytest.fixture
def publisher_and_target(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    for name in ("a", "b"):
        publisher18_db.execute(f"{TABLES.format(name)}; INSERT INTO {name} VALUES (1, 'x')")
        target_db.execute(TABLES.format(name))
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE a, b")
    target_db.execute("ALTER TABLE a DROP v")
    return publisher18_db, target_db


async def test_first_run_continues_with_the_other_tables(
    publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture
) -> None:
    publisher, target = publisher_and_target
    async with replica(publisher, target) as found:
        # a fails before b is copied
        await eventually(target, "SELECT count(*) FROM b", 1)
        await until(lambda: caplog.text.count(f'table "public.a" failed, next attempt in 0.2 s: {MISFIT}') > 1, "it is retried")
        # b's is dropped, and for a none is made
        await eventually(publisher, SLOTS, [(slot_of(publisher),)])
        target.execute("ALTER TABLE a ADD v text")
        publisher.execute("INSERT INTO a VALUES (2, 'y')")
        await found.same("SELECT id, v FROM a ORDER BY id")


async def test_first_run_without_a_table_that_fits_makes_nothing(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE b DROP v")
    with pytest.raises(Exception, match=r"public\.a") as caught:
        await subscription_of(publisher, target).run()
    assert "public.b" in caught.value.one_line()  # type: ignore[attr-defined]
    assert slots(publisher) == []


async def test_first_run_ends_when_every_table_has_failed(publisher_and_target: tuple[Database, Database]) -> None:
    """Found only while they are copied."""
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE b ADD CHECK (v <> 'x'); ALTER TABLE a ADD v text CHECK (v <> 'x')")
    with pytest.raises(Exception, match="violates check constraint"):
        await subscription_of(publisher, target).run()


async def test_slot_of_an_attempt_is_dropped_when_the_table_stops_to_fit(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE a ADD v text CHECK (v <> 'x')")
    async with replica(publisher, target) as found:
        await until(lambda: isinstance(found.subscription.status.last_error, Exception), "the copy was refused")
        target.execute("ALTER TABLE a DROP v")
        await until(lambda: isinstance(found.subscription.status.last_error, RelationError), "the table does not fit")
        await eventually(publisher, SLOTS, [(slot_of(publisher),)])


async def test_position_after_an_error_of_the_target(
    publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt resumes at the target's LSN, not where the session started."""
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE a ADD v text")
    caplog.set_level("INFO", "subscriber")
    async with replica(publisher, target) as found:
        for number in range(2, 6):
            publisher.execute(f"INSERT INTO b VALUES ({number}, 'x')")
            await found.caught_up()
        target.execute("INSERT INTO b VALUES (6, 'in the way')")
        publisher.execute("INSERT INTO b VALUES (6, 'y')")
        at = 'SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'
        await until(lambda: f"the target has everything up to {target.value(at)}" in caplog.text, "the target's position is told")
        logged = [record.getMessage() for record in caplog.records if "next attempt" in record.getMessage()]
        assert logged
        assert all(text.endswith("next attempt in 0.2 s") for text in logged)
        target.execute("DELETE FROM b WHERE id = 6")
        await found.same("SELECT id, v FROM b ORDER BY id")
