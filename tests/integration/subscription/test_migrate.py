"""``subscriber migrate``: everything up to the cutover."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from subscriber import ConfigurationError, Migration, PublisherError
from subscriber.subscription.management.schema import SchemaOptions
from subscriber.subscription.migration import migration_plan, preconditions
from subscriber.testing.binaries import find_binaries
from subscriber.testing.server import EmbeddedServer
from tests.integration.subscription.test_schema_copy import dumped
from tests.support.database import Database, ServerAddress
from tests.support.managed import closed_window
from tests.support.program import running, subscriber
from tests.support.roles import role
from tests.support.row_gates import closed_gates, make_row_gate

BINDIR = str(find_binaries(18))
SCHEMA = """
CREATE TABLE a (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int); CREATE INDEX a_v ON a (v);
CREATE TABLE b (id bigserial PRIMARY KEY, a int NOT NULL REFERENCES a, UNIQUE (a, id)); CREATE INDEX b_a ON b (a);
INSERT INTO a (v) SELECT g FROM generate_series(1, 2000) AS g; INSERT INTO b (a) SELECT g FROM generate_series(1, 2000) AS g
"""
WRITE = (
    "WITH new AS (INSERT INTO a (v) VALUES (0) RETURNING id) INSERT INTO b (a) SELECT id FROM new",
    "UPDATE a SET v = v + 1 WHERE id % 50 = 0",
)
STEPS = ["publish", "schema", "create", "copy", "indexes", "follow", "verify"]


class Writers:
    """Write on the publisher until the end of the block."""

    def __init__(self, publisher: Database) -> None:
        self._publisher = publisher
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        with self._publisher.connect() as session:
            while not self._end.wait(0.02):
                for statement in WRITE:
                    session.execute(statement)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def arguments(publisher: Database, target: Database, *more: str) -> tuple[str, ...]:
    name = f"move_{publisher.name}"
    return ("migrate", name, "--from", publisher.conninfo(), "--to", target.dsn, "--bindir", BINDIR, *more)


@pytest.mark.endurance
@pytest.mark.slow
def test_it_continues_after_a_kill_at_each_step(publisher_db: Database, target_db: Database) -> None:
    publisher_db.execute(SCHEMA)
    with Writers(publisher_db):
        # a step's line is printed at its end: it is killed in each one, and at last before the end
        for step in ("target", *STEPS):
            with running(*arguments(publisher_db, target_db), loud=True) as program:
                program.says(f"{step}: ")
                program.send(signal.SIGKILL)
                assert program.ended().status == -signal.SIGKILL
        with running(*arguments(publisher_db, target_db), loud=True) as program:
            program.says("ready for the cutover")
            assert target_db.value("SELECT count(*) FROM subscriber.migration") == len(STEPS)
            program.send(signal.SIGTERM)
            assert program.ended().status == 0
    if publisher_db.version == target_db.version:
        assert dumped(target_db) == dumped(publisher_db)
    assert subscriber(*arguments(publisher_db, target_db, "--until-ready", "--no-verify")).status == 0
    for table in ("a", "b"):
        query = f"SELECT count(*), sum(id), sum({'v' if table == 'a' else 'a'}) FROM {table}"
        assert target_db.fetch(query) == publisher_db.fetch(query)


@contextlib.contextmanager
def opened(servers: Sequence[EmbeddedServer]) -> Iterator[list[Database]]:
    """Sessions with both, which a restart would end."""
    found = [Database(ServerAddress(server.dsn(), 18), "postgres") for server in servers]
    yield found
    for database in found:
        database.close()


def test_it_continues_when_servers_restart(make_server: Callable[..., EmbeddedServer]) -> None:
    servers = [make_server(), make_server()]
    with opened(servers) as (source, target):
        source.execute(SCHEMA)
    with running(*arguments(source, target), loud=True) as program:
        for number, step in enumerate(STEPS[:-1]):
            program.says(f"{step}: ")
            servers[number % 2].restart("immediate")
            if step == "create":
                servers[1].restart("immediate")
        program.says("ready for the cutover")
        servers[1].stop("immediate")
        program.says("run: ")
        servers[1].start()
        servers[0].restart("immediate")
        with opened(servers) as (source, target):
            source.execute("INSERT INTO a (id, v) OVERRIDING SYSTEM VALUE VALUES (0, 0)")
            target.wait("SELECT count(*)::int FROM a WHERE id = 0", 1)
        program.send(signal.SIGTERM)
        assert program.ended().status == 0


def test_differences_and_bad_input(publisher18_db: Database, target_db: Database) -> None:
    # a deferrable key is no replica identity; neither is an index that was dropped
    publisher18_db.execute("""
        CREATE TABLE keyless (id int); CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE); CREATE TABLE dropped (id int NOT NULL);
        CREATE UNIQUE INDEX i ON dropped (id); ALTER TABLE dropped REPLICA IDENTITY USING INDEX i; DROP INDEX i;
        CREATE TABLE "unique" (a int NOT NULL, b int NOT NULL, c int UNIQUE, d int, UNIQUE (a, b, c), UNIQUE (b, a) INCLUDE (d));
        CREATE TABLE nullable (a int UNIQUE, b int NOT NULL, UNIQUE (b) DEFERRABLE); CREATE UNIQUE INDEX ON nullable (b) WHERE a = 1
    """)
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"))
    assert done.status == 1
    lacking = 'table "public.{}" has no replica identity: once published, its UPDATE and DELETE fail on the publisher'
    statements = {
        "deferred": "FULL",
        "dropped": "FULL",
        "keyless": "FULL",
        "nullable": "FULL",
        "unique": 'USING INDEX "unique_b_a_d_key"',
    }
    for table, identity in statements.items():
        assert f'{lacking.format(table)} (hint: ALTER TABLE "public"."{table}" REPLICA IDENTITY {identity};)' in done.errors
    assert publisher18_db.fetch("SELECT FROM pg_publication") == []
    # so does a publication that exists, unless it publishes neither
    name = f"move_{publisher18_db.name}"
    publisher18_db.execute(f"CREATE PUBLICATION {name} FOR ALL TABLES")
    again = subscriber(*arguments(publisher18_db, target_db, "--until-ready"))
    assert (again.status, again.errors.count("has no replica identity")) == (1, 5), again.errors
    publisher18_db.execute(f'DROP PUBLICATION {name}; DROP TABLE nullable, "unique"')
    assert target_db.value("SELECT to_regclass('keyless') IS NULL AND to_regnamespace('subscriber') IS NULL")
    publisher18_db.execute("DROP TABLE deferred, dropped; ALTER TABLE keyless ADD PRIMARY KEY (id); INSERT INTO keyless VALUES (1)")
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"), loud=True)
    assert done.status == 0, done.errors
    assert [line.split(": ")[1] for line in done.errors.splitlines() if line.endswith(" s") and line.split(": ")[1] in STEPS] == STEPS
    target_db.execute("INSERT INTO keyless VALUES (2)")
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"))
    assert done.status == 1
    assert 'rows differ in 1 of 1 tables: "public.keyless" (hint: ' in done.errors
    done = subscriber(*arguments(publisher18_db, target_db, "--publication", "other"))
    assert (done.status, "with other publications" in done.errors) == (1, True), done


def test_table_that_does_not_fit(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that the copy was retried without end
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'secret'); CREATE UNLOGGED TABLE u ()")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"), loud=True)
    assert done.status == 1
    assert 'target relation "public.t" is missing replicated column: "v"' in done.errors
    assert publisher18_db.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    target_db.execute("ALTER TABLE t ADD v int")
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"), loud=True)
    assert done.status == 1
    assert 'invalid text representation (SQLSTATE 22P02); while copying table "public.t" column "v"' in done.errors
    assert "nothing else can be done until this is corrected: then start the same command again" in done.errors
    assert "secret" not in done.errors
    target_db.execute("ALTER TABLE t ALTER v TYPE text")
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"), loud=True)
    assert done.status == 0, done.errors
    assert "not moved: rows of unlogged tables (cutover --unlogged): public.u" in done.errors
    assert "objects existed and were left as they are: `subscriber schema diff` compares them" in done.errors
    assert target_db.fetch("SELECT * FROM t") == [(1, "secret")]


def test_tables_of_extensions_are_left_out(publisher18_db: Database, target_db: Database) -> None:
    # as PostGIS does. The bug was that the copy found the rows that CREATE EXTENSION had inserted in the target
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE known (id int PRIMARY KEY); INSERT INTO known VALUES (1); ALTER EXTENSION plpgsql ADD TABLE known")
    publisher18_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p DEFAULT; INSERT INTO p VALUES (1); CREATE UNLOGGED TABLE u ()
    """)
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"), loud=True)
    assert done.status == 0, done.errors
    assert 'created, without the tables of extensions, such as "public.known"' in done.errors
    assert publisher18_db.fetch("SELECT tablename FROM pg_publication_tables ORDER BY 1") == [("p1",), ("t",)]
    assert target_db.fetch("SELECT count(*) FROM t, p, known") == [(1,)]


def test_tables_are_chosen(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that the step indexes failed for good
    publisher18_db.execute("""
        CREATE SCHEMA "Odd"; CREATE TABLE log_1 (id int PRIMARY KEY); CREATE TABLE "Log_2" (id int);
        CREATE TABLE "Odd"."a.b$" (id int PRIMARY KEY);
        CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (10);
        CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (10) TO (20); CREATE TABLE part_3 PARTITION OF part DEFAULT;
        CREATE TABLE t (id int PRIMARY KEY, log int CONSTRAINT to_log REFERENCES log_1, part int CONSTRAINT to_part REFERENCES part,
            other int CONSTRAINT to_other REFERENCES "Odd"."a.b$");
        INSERT INTO log_1 VALUES (1); INSERT INTO "Log_2" VALUES (1); INSERT INTO "Odd"."a.b$" VALUES (1);
        INSERT INTO part VALUES (1), (11), (21);
        INSERT INTO t VALUES (1, 1, 11, 1)
    """)
    left_out = ["--exclude-table", "public.log_*", "--exclude-table", '"L"og_?', "--exclude-table", "part_2"]
    command = arguments(publisher18_db, target_db, "--until-ready", "--table", "*.*", *left_out)
    for wrong in ("a.b.c", '"open', ""):
        done = subscriber(*arguments(publisher18_db, target_db, "--exclude-table", wrong))
        assert (done.status, "pattern of a name" in done.errors) == (1, True), done
    done = subscriber(*arguments(publisher18_db, target_db, "--table", "nothing*"))
    assert (done.status, "no table matches nothing*" in done.errors) == (1, True), done
    # as pg_dump --strict-names: a name that is misspelled would move what it should not
    done = subscriber(*command, "--exclude-table", "logs")
    assert (done.status, "no table matches logs (hint: correct --exclude-table)" in done.errors) == (1, True), done
    left_behind = "public.Log_2, public.log_1, public.part_2"
    plan = subscriber(*command, "--dry-run")
    assert f"not moved: rows of tables that are not published: {left_behind}" in plan.output.splitlines(), plan
    done = subscriber(*command, loud=True)
    assert done.status == 0, done.errors
    assert f"not moved: rows of tables that are not published: {left_behind}" in done.errors
    assert publisher18_db.fetch("SELECT tablename FROM pg_publication_tables ORDER BY 1") == [("a.b$",), ("part_1",), ("part_3",), ("t",)]
    assert target_db.fetch("SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM part), (SELECT count(*) FROM log_1)") == [(1, 2, 0)]
    for key, to in (("to_log", "public.log_1"), ("to_part", "public.part")):
        line = f'foreign key "{key}" of table "public.t" refers to "{to}", whose rows are not moved: it is created NOT VALID'
        assert line in done.errors
    query = (
        "SELECT conname, convalidated FROM pg_constraint WHERE contype = 'f' AND conrelid = 't'::regclass AND conparentid = 0 ORDER BY 1"
    )
    assert target_db.fetch(query) == [("to_log", False), ("to_other", True), ("to_part", False)]
    # a partition that is created later is chosen by the same rule; so is a table
    publisher18_db.execute("CREATE TABLE part_4 PARTITION OF part FOR VALUES FROM (30) TO (40); CREATE TABLE log_9 (id int)")
    done = subscriber(*command, loud=True)
    assert 'table "public.part_4" was added to publication' in done.errors
    assert 'table "public.log_9" was' not in done.errors
    # the cutover does not ask for what cannot be validated
    name = f"move_{publisher18_db.name}"
    with running("run", "--target", target_db.dsn, name, loud=True) as program:
        program.says("streaming from")
        plan = subscriber("cutover", name, "--target", target_db.dsn, "--dry-run")
        assert "not valid" not in plan.errors + plan.output
        left_behind = "public.Log_2, public.log_1, public.log_9, public.part_2"
        assert f"rows of tables that are not published are not moved: {left_behind}" in plan.output.splitlines(), plan
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    publisher18_db.execute(f"CREATE PUBLICATION {name}_2 FOR TABLE t")
    done = subscriber(*command, "--publication", f"{name}_2")
    assert (done.status, "its tables cannot be chosen by --table" in done.errors) == (1, True), done


def test_a_copy_is_limited_and_the_target_has_one_migration(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 9000) g"
    )
    command, name = arguments(publisher18_db, target_db, "--until-ready"), f"move_{publisher18_db.name}"
    done = subscriber(*command, "--max-rate", "fast")
    assert (done.status, 'invalid value for parameter "max-rate": "fast"' in done.errors) == (1, True), done
    # it would take a minute and a half
    window = closed_window()
    with running(*command, "--max-rate", "100kB/s", "-o", f"copy_window={window}", loud=True) as program:
        program.says(f"copies wait for copy_window ({window}), which opens at ")
        program.says(f"subscriber alter {name} --target URL -o copy_window=none")
        assert subscriber("alter", name, "--target", target_db.dsn, "-o", "copy_window=none").status == 0
        target_db.wait("SELECT count(*) > 0 FROM pg_stat_progress_copy WHERE relid = to_regclass('t') AND bytes_processed > 300000", True)
        query = "SELECT subgeneration, submaxcopyrate FROM subscriber.pg_subscription"
        ((generation, rate),) = target_db.fetch(query)
        assert rate == 100 * 1024
        second = subscriber(*command)
        assert (second.status, "is run by another process" in second.errors) == (1, True), second
        assert subscriber("alter", name, "--target", target_db.dsn, "-o", "max_copy_rate=0").status == 0
        # the bug was that they were missing
        publisher18_db.execute("CREATE SEQUENCE later_s; CREATE TYPE later_t AS ENUM ('a'); CREATE VIEW later_v AS SELECT id FROM t")
        program.says("ready for the cutover")
        assert program.ended().status == 0
        assert target_db.value("SELECT num_nonnulls(to_regclass('later_s'), to_regclass('later_v'), to_regtype('later_t'))") == 3
        # it was not restarted
        assert target_db.fetch(query) == [(generation, 0.0)]
    assert target_db.value("SELECT count(*) FROM t") == 9000


async def test_plan_and_what_the_target_must_have(
    publisher18_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE filled (id int PRIMARY KEY)")
    publisher18_db.execute("""
        CREATE EXTENSION citext; CREATE TABLE needs (id int PRIMARY KEY, v citext[]); CREATE TABLE keyless (id int);
        CREATE UNLOGGED TABLE u ();
        INSERT INTO big SELECT g, repeat('x', 100) FROM generate_series(1, 20000) AS g; ANALYZE big;
        CREATE TABLE secret (id int PRIMARY KEY); CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE p1 PARTITION OF p DEFAULT
    """)
    target_db.execute("INSERT INTO filled VALUES (1)")
    before = dumped(publisher18_db), dumped(target_db)
    command = arguments(publisher18_db, target_db)
    done = subscriber(*command, "--dry-run")
    assert (done.status, done.errors.count("has no replica identity")) == (1, 1), done
    lines = done.output.splitlines()
    assert lines[0].startswith("6 tables with about 20,000 rows: "), lines
    assert re.match(r"  public\.big: [\d.]+ MB, about 20,000 rows, [\d.]+ kB of indexes", lines[1])
    assert any(re.match(r"the copy takes about .* to .*: one session copied .*/s of a sample, and 2 run at once", line) for line in lines)
    assert any(re.match(r"target: needs about .* of disk, and has .*", line) for line in lines)
    assert "not moved: rows of unlogged tables (cutover --unlogged): public.u" in lines
    assert (dumped(publisher18_db), dumped(target_db)) == before
    # nothing is created before this is corrected
    publisher18_db.execute("DROP TABLE keyless")
    done = subscriber(*command, "--until-ready")
    assert (done.status, 'table "public.filled" of the target has rows already' in done.errors) == (1, True), done
    old = tmp_path / "bin"
    old.mkdir()
    for program in ("pg_dump", "pg_restore"):
        (old / program).write_text("#!/bin/sh\necho 'pg_dump (PostgreSQL) 12.1'\n")
        (old / program).chmod(0o755)
    for bindir, said in ((old, f"pg_dump 12 in {old} is older than the publisher"), (tmp_path, "pg_dump and pg_restore were not found")):
        done = subscriber(*command, "--bindir", str(bindir))
        assert (done.status, said in done.errors) == (1, True), done
    # a server without the extension, and with a small disk
    monkeypatch.setattr(preconditions, "_AVAILABLE", "SELECT 'plpgsql', ''")
    monkeypatch.setattr(preconditions, "_free", lambda _: 1000)
    name = f"move_{publisher18_db.name}"
    options = SchemaOptions(bindir=BINDIR)
    migration = Migration(name, connection=publisher18_db.conninfo(), target=target_db.dsn, publication=name, schema=options)
    with role(publisher18_db) as lacking:
        publisher18_db.execute(f"CREATE POLICY own ON big TO {lacking.name}; CREATE POLICY own ON secret TO {lacking.name}, CURRENT_USER")
        with pytest.raises(ConfigurationError) as caught:
            await migration.run(wait=False)
    said = caught.value.one_line()
    # the bug was that this was found when the rows were copied
    assert f'role "{lacking.name}" does not exist in the target; tables whose policies name it: public.big, public.secret' in said
    assert 'extension "citext" is not installed on the target\'s server; tables that need it: public.needs' in said
    assert "the disk of the target is too small: " in said
    # a role without privileges
    with role(publisher18_db, "LOGIN REPLICATION") as found:
        poor = Migration(name, connection=found.conninfo, target=target_db.dsn, publication=name, schema=options)
        # settings that would end it, or slow it down
        monkeypatch.setattr(migration_plan, "_SOURCE_SETTINGS", "SELECT '1GB', '5min', '1', '40'")
        monkeypatch.setattr(migration_plan, "_TARGET_SETTINGS", "SELECT '1000', '64'")
        notes = "\n".join((await poor.plan()).notes)
        for setting in ("max_slot_wal_keep_size is 1GB", "idle_replication_slot_timeout is 5min", "max_replication_slots leaves 1 free"):
            assert f"publisher: {setting}: " in notes or f"publisher: {setting}, " in notes, notes
        assert "target: max_wal_size is " in notes
        problems = [str(problem) for problem in (await poor.plan()).problems]
        assert 'the role may not read table "public.secret"' in problems
        monkeypatch.undo()
        target_db.execute("DELETE FROM filled; DROP TABLE big, filled")
        with pytest.raises(PublisherError) as refused:
            await poor.run(wait=False)
        assert "only a superuser may publish all tables: let one create the publication" in str(refused.value.hint)
    assert publisher18_db.fetch("SELECT FROM pg_publication") == []
    assert target_db.value("SELECT to_regnamespace('subscriber') IS NULL AND to_regclass('secret') IS NULL")


def test_errors_that_no_retry_corrects(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that the command never ended
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'secret')")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    command = arguments(publisher18_db, target_db, "--until-ready", "-o", "disable_on_error=true")
    for _ in range(2):
        done = subscriber(*command, loud=True)
        assert done.status == 1
        assert 'is disabled: invalid text representation (SQLSTATE 22P02); while copying table "public.t"' in done.errors
        assert "secret" not in done.errors
    target_db.execute("ALTER TABLE t ALTER v TYPE text")
    name = f"move_{publisher18_db.name}"
    assert subscriber("alter", name, "--target", target_db.dsn, "--enable").status == 0
    done = subscriber(*command, loud=True)
    assert done.status == 0, done.errors
    publisher18_db.execute(f"SELECT pg_drop_replication_slot('{name}')")
    done = subscriber(*arguments(publisher18_db, target_db), loud=True)
    assert done.status == 1
    assert "does not exist on the publisher any more: changes after" in done.errors.splitlines()[-1]


def test_change_that_cannot_be_applied_while_a_table_is_copied(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that the copy was given up, perhaps after hours
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE big (id int PRIMARY KEY); CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t VALUES (1); INSERT INTO big SELECT generate_series(1, 1000)")
    make_row_gate(target_db, "big", "NEW.id = 1000", 77)
    with closed_gates(target_db, 77) as release, running(*arguments(publisher18_db, target_db, "--until-ready"), loud=True) as program:
        target_db.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
        target_db.wait("SELECT srsubstate::text FROM subscriber.pg_subscription_rel WHERE srrelid = 't'::regclass", "r")
        target_db.execute("INSERT INTO t VALUES (2)")
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        program.says("next attempt in 5.0 s")
        program.says("next attempt in 5.0 s", 2)
        release(77)
        done = program.ended()
    assert done.status == 1
    assert "duplicate key value violates unique constraint" in done.errors.splitlines()[-1]
    assert target_db.value("SELECT count(*) FROM big") == 1000


def test_other_names(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(SCHEMA)
    more = ("-o", "map.public.*=app.*", "-o", "columns.public.a=(id, v)", "-o", "rename.public.a=v:value")
    refused = subscriber(*arguments(publisher18_db, target_db, "-o", "exclude_table=b", "--until-ready"))
    assert "exclude_table is not available for a migration" in refused.errors
    target_db.execute("CREATE SCHEMA app; CREATE TABLE app.b (id bigint PRIMARY KEY, a int); INSERT INTO app.b VALUES (1, 1)")
    filled = subscriber(*arguments(publisher18_db, target_db, *more, "--until-ready"))
    assert 'table "app.b" of the target has rows already' in filled.errors
    target_db.execute("DROP TABLE app.b")
    with running(*arguments(publisher18_db, target_db, *more), loud=True) as program:
        program.says("tables have other names: views, functions, triggers and policies")
        program.says("ready for the cutover")
        publisher18_db.execute("CREATE TABLE later (id serial PRIMARY KEY, a int REFERENCES a); INSERT INTO later (a) VALUES (1)")
        program.says('new tables of the publisher are added: "app.later"')
        program.says("ready for the cutover", 2)
        publisher18_db.execute("UPDATE a SET v = -1 WHERE id = 7")
        target_db.wait("SELECT value FROM app.a WHERE id = 7", -1)
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    assert target_db.fetch("SELECT count(*) FROM app.b UNION ALL SELECT count(*) FROM app.later") == [(2000,), (1,)]
    indexes = target_db.fetch("SELECT indexname FROM pg_indexes WHERE schemaname = 'app' ORDER BY 1")
    assert [name for (name,) in indexes] == ["a_pkey", "a_v", "b_a", "b_a_id_key", "b_pkey", "later_pkey"]
    assert target_db.value("SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND conrelid::regclass::text ~ 'app'") == 2


def test_tables_that_are_created_meanwhile(publisher18_db: Database, target_db: Database) -> None:
    # the bug was "ready for the cutover" without the rows of these tables. The publication has a list, because of the table of an extension
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE known (id int PRIMARY KEY); ALTER EXTENSION plpgsql ADD TABLE known")
    target_db.execute("CREATE TABLE big (id int PRIMARY KEY)")
    publisher18_db.execute("""
        CREATE TABLE big (id int PRIMARY KEY); INSERT INTO big SELECT generate_series(1, 1000);
        CREATE TABLE parts (id int PRIMARY KEY, v int NOT NULL) PARTITION BY RANGE (id); CREATE INDEX parts_v ON parts (v);
        CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (10); INSERT INTO parts VALUES (1, 1)
    """)
    make_row_gate(target_db, "big", "NEW.id = 1000", 77)
    command = arguments(publisher18_db, target_db)
    with closed_gates(target_db, 77) as release, running(*command, loud=True) as program:
        program.says("create: ")
        publisher18_db.execute("""
            CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20); INSERT INTO parts VALUES (11, 1); UPDATE parts SET v = 2;
            CREATE SCHEMA later; CREATE TABLE later.t (id int PRIMARY KEY, v int UNIQUE); INSERT INTO later.t VALUES (1, 1)
        """)
        release(77)
        program.says('new tables of the publisher are added: "later.t", "public.parts_2"')
        program.says("ready for the cutover")
        query = "SELECT array_agg(id ORDER BY id), min(v), max(v) FROM {}"
        for table in ("parts", "later.t"):
            assert target_db.fetch(query.format(table)) == publisher18_db.fetch(query.format(table))
        assert target_db.value("SELECT count(*) FROM pg_indexes WHERE indexname IN ('parts_2_v_idx', 't_v_key')") == 2
        # after that, too
        publisher18_db.execute("""
            CREATE TABLE parts_3 (LIKE parts INCLUDING ALL); INSERT INTO parts_3 VALUES (21, 1);
            ALTER TABLE parts ATTACH PARTITION parts_3 FOR VALUES FROM (20) TO (30); UPDATE parts SET v = v + 1
        """)
        program.says("ready for the cutover", 2)
        publisher18_db.execute("INSERT INTO parts VALUES (22, 5)")
        target_db.wait("SELECT array_agg((id, v)::text ORDER BY id)::text FROM parts", '{"(1,3)","(11,3)","(21,2)","(22,5)"}')
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    # the same call finds nothing new
    done = subscriber(*command, "--until-ready", loud=True)
    assert (done.status, "new tables" in done.errors) == (0, False), done.errors
    # the bug was that a table without a key ended the copy, and kept all other tables out
    publisher18_db.execute(
        "CREATE TABLE backup_x AS SELECT * FROM big; CREATE TABLE beside (id int PRIMARY KEY); INSERT INTO beside VALUES (1)"
    )
    # neither does one that is dropped before it can be published
    publisher18_db.execute("CREATE TABLE short (id int PRIMARY KEY)")
    with publisher18_db.connect() as session:
        session.execute("BEGIN; DROP TABLE short")
        with running(*command, "--until-ready", loud=True) as program:
            waiting = "SELECT count(*)::int FROM pg_stat_activity WHERE query LIKE 'ALTER PUBLICATION%' AND wait_event_type = 'Lock'"
            publisher18_db.wait(f"{waiting} AND datname = current_database()", 1)
            session.execute("COMMIT")
            done = program.ended()
    assert (done.status, "ready for the cutover" in done.errors) == (1, False), done.errors
    line = 'table "public.backup_x" was created meanwhile, and has no replica identity: it is not published, and not moved'
    table = '"public"."backup_x"'
    hint = f"(hint: ALTER TABLE {table} REPLICA IDENTITY FULL; or drop it, or leave it out: --exclude-table '{table}')"
    assert done.errors.count(f"{line} {hint}") == 2, done.errors
    assert target_db.fetch("SELECT id FROM beside") == [(1,)]
    done = subscriber(*command, "--until-ready", "--exclude-table", table, loud=True)
    assert done.status == 0, done.errors
