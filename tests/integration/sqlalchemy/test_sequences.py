"""``sequences sync`` for SQLite and MariaDB: no value repeats after both sides inserted."""

from __future__ import annotations

from subscriber import SequenceState, sync_sequences
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import OtherTarget

COUNTED = {"sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT", "mariadb": "INTEGER PRIMARY KEY AUTO_INCREMENT"}


async def test_counters_are_set_beyond_what_was_handed_out(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute(
        'CREATE SCHEMA s; CREATE TABLE s."T t" (id int GENERATED ALWAYS AS IDENTITY (CACHE 10) PRIMARY KEY, v int);'
        "CREATE TABLE plain (id serial PRIMARY KEY); CREATE TABLE ahead (id serial PRIMARY KEY, v int); CREATE SEQUENCE free;"
        'INSERT INTO s."T t" (v) VALUES (1), (2); INSERT INTO plain DEFAULT VALUES; INSERT INTO ahead DEFAULT VALUES;'
        "CREATE PUBLICATION pub FOR ALL TABLES"
    )
    quote = "`" if other_target.kind == "mariadb" else '"'
    table = f"{quote}s__T t{quote}"
    other_target.execute(f"CREATE TABLE {table} (id {COUNTED[other_target.kind]}, v int)")
    other_target.execute("CREATE TABLE plain (id int PRIMARY KEY)")
    other_target.execute(f"CREATE TABLE ahead (id {COUNTED[other_target.kind]}, v int)")
    other_target.execute("INSERT INTO ahead (id) VALUES (20)")

    async def sync(*, dry_run: bool = False, force: bool = False) -> dict[str, SequenceState]:
        results = await sync_sequences(
            target=other_target.url,
            connection=publisher18_db.conninfo(),
            publications=["pub"],
            sequences=["public.*"],
            dry_run=dry_run,
            force=force,
        )
        return {result.sequence.name: result.state for result in results}

    left = {"plain_id_seq": SequenceState.LEFT, "ahead_id_seq": SequenceState.LEFT, "free": SequenceState.LEFT}
    assert await sync(dry_run=True) == {"T t_id_seq": SequenceState.SET, **left}
    assert await sync() == {"T t_id_seq": SequenceState.SET, **left}
    assert await sync() == {"T t_id_seq": SequenceState.EQUAL, **left}
    publisher18_db.execute('INSERT INTO s."T t" (v) VALUES (3)')
    other_target.execute(f"INSERT INTO {table} (v) VALUES (4)")
    ((theirs,),) = other_target.fetch(f"SELECT id FROM {table}")
    assert theirs == 11, "10 values were in the cache of the publisher's session"
    ended = subscriber(
        "sequences", "sync", "--target", other_target.url, "--connection", publisher18_db.conninfo(), "--publication", "pub", loud=True
    )
    assert ended.status == 1
    assert "column id of table plain: not set: it has no AUTO_INCREMENT in the target: define it there\n" in ended.output
    assert (await sync(force=True))["ahead_id_seq"] is SequenceState.LEFT, "its rows have higher values"
    other_target.execute("DELETE FROM ahead")
    assert (await sync(force=True))["ahead_id_seq"] is not SequenceState.LEFT
    other_target.execute("INSERT INTO ahead (v) VALUES (1)")
    assert other_target.fetch("SELECT id FROM ahead") == [(2,)]
