"""``subscriber migrate``: everything up to the cutover."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from subscriber.testing.binaries import find_binaries
from subscriber.testing.server import EmbeddedServer
from tests.integration.subscription.test_schema_copy import dumped
from tests.support.database import Database, ServerAddress
from tests.support.program import running, subscriber
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
        for step in STEPS[:-1]:
            with running(*arguments(publisher_db, target_db), loud=True) as program:
                program.says(f"{step}: ")
                program.send(signal.SIGKILL)
                assert program.ended().status == -signal.SIGKILL
        with running(*arguments(publisher_db, target_db), loud=True) as program:
            program.says("ready for the cutover")
            assert target_db.value("SELECT count(*) FROM subscriber.cutover WHERE ended_at IS NOT NULL") == len(STEPS)
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
    with running(*arguments(source, target, "--no-verify"), loud=True) as program:
        program.says("create: ")
        for server in servers:
            server.restart("immediate")
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
        CREATE UNIQUE INDEX i ON dropped (id); ALTER TABLE dropped REPLICA IDENTITY USING INDEX i; DROP INDEX i
    """)
    done = subscriber(*arguments(publisher18_db, target_db, "--until-ready"))
    assert done.status == 1
    shown = '"public.deferred", "public.dropped", "public.keyless"'
    assert f"without a replica identity, the publisher would reject UPDATE and DELETE of published tables: {shown}" in done.errors
    assert publisher18_db.fetch("SELECT FROM pg_publication") == []
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
    assert 'unlogged tables are not replicated, and their rows not moved: "public.u"' in done.errors
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
