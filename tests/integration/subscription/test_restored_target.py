"""A target whose catalog comes from elsewhere: by pg_dump and pg_restore, or as a copy of the database."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator

import pytest

from subscriber.testing.binaries import find_binaries, server_user
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.program import Ended, environment, subscriber

BINDIR = str(find_binaries(18))
STRANGER = 'subscription "{}" belongs to another target: schema subscriber was copied or restored, or the server was upgraded'


def run(publisher: Database, target: Database, *more: str) -> Ended:
    name = f"moved_{publisher.name}"
    arguments = (f"--connection={publisher.dsn}", f"--target={target.dsn}", f"--name={name}", "--publication=pub", *more)
    return subscriber("run", *arguments, "--until-caught-up")


def accept(publisher: Database, target: Database) -> Ended:
    return subscriber("alter", f"moved_{publisher.name}", f"--target={target.dsn}", "--accept-target")


def restore(old: Database, new: Database, *options: str) -> None:
    """Neither table keeps its oid. The dump holds rows of ``subscriber`` as any others."""
    dump = [f"{BINDIR}/pg_dump", "--format=custom", "-d", old.dsn]
    archive = subprocess.run(dump, env=environment(), capture_output=True, check=True).stdout
    into = [f"{BINDIR}/pg_restore", "--exit-on-error", *options, "-d", new.dsn]
    subprocess.run(into, env=environment(), input=archive, capture_output=True, check=True)


@pytest.fixture
def replicated(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    """Two tables were copied and are followed; ``b`` has no key. The publisher has further rows."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int)")
    publisher18_db.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1); CREATE PUBLICATION pub FOR TABLE a, b")
    done = run(publisher18_db, target_db)
    assert done.status == 0, done.errors
    target_db.execute("ALTER TABLE a RENAME TO c; ALTER TABLE c RENAME TO a")
    publisher18_db.execute("INSERT INTO a VALUES (2); INSERT INTO b VALUES (2)")
    return publisher18_db, target_db


def assert_same(publisher: Database, target: Database) -> None:
    for table in ("a", "b"):
        query = f"SELECT id FROM {table} ORDER BY id"
        assert target.fetch(query) == publisher.fetch(query)


@contextlib.contextmanager
def another(database: Database) -> Iterator[Database]:
    with fresh_database(database.server, "new") as made:
        yield made


def test_restored_by_pg_restore(replicated: tuple[Database, Database]) -> None:
    publisher, old = replicated
    with another(old) as new:
        # other oids than in the dumped database
        new.execute("CREATE TABLE first (id int); DROP TABLE first")
        restore(old, new)
        done = run(publisher, new)
        assert done.status == 1
        assert STRANGER.format(f"moved_{publisher.name}") in done.errors
        assert "--accept-target" in done.errors
        # no verb touches the publisher's slot, which the true target may still use
        done = subscriber("drop", f"moved_{publisher.name}", f"--target={new.dsn}", f"--connection={publisher.dsn}")
        assert (done.status, "belongs to another target" in done.errors) == (1, True)
        assert publisher.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1
        assert new.fetch("SELECT id FROM b") == [(1,)]
        assert accept(publisher, new).status == 0
        # to the rules of conflicts, the restored rows are the subscription's own
        older = "SELECT count(*)::int FROM subscriber.pg_subscription_rel, a WHERE srsyncxid > a.xmin::text::int8"
        assert new.value(older) == 2
        done = run(publisher, new)
        assert (done.status, done.errors) == (0, "")
        assert_same(publisher, new)
        # the old one has lost: the slot is ahead of it. So it is with a clone of the disk, which nothing else tells from the target
        before = old.fetch("SELECT id FROM b")
        done = run(publisher, old)
        assert (done.status, "was advanced to" in done.errors, "past position" in done.errors) == (1, True, True)
        assert old.fetch("SELECT id FROM b") == before


def test_restored_in_place(replicated: tuple[Database, Database]) -> None:
    publisher, target = replicated
    restore(target, target, "--clean")
    assert "belongs to another target" in run(publisher, target).errors
    assert accept(publisher, target).status == 0
    done = run(publisher, target)
    assert (done.status, done.errors) == (0, "")
    assert_same(publisher, target)


def test_tables_that_are_missing_or_were_being_copied(replicated: tuple[Database, Database]) -> None:
    publisher, target = replicated
    target.execute("""
        UPDATE subscriber.pg_subscription SET subtarget = '1/2/3';
        UPDATE subscriber.pg_subscription_rel SET srrelid = 1 + srrelid::int, srsubstate = CASE srrelname WHEN 'b' THEN 'd' ELSE 'r' END
    """)
    target.execute("ALTER TABLE a RENAME TO x")
    done = accept(publisher, target)
    assert (done.status, 'table "public.a" of the subscription is missing' in done.errors) == (1, True)
    target.execute("ALTER TABLE x RENAME TO a")
    done = accept(publisher, target)
    assert (done.status, 'table "public.b" holds rows of a copy that was not finished' in done.errors) == (1, True)
    target.execute("TRUNCATE b")
    assert accept(publisher, target).status == 0
    done = run(publisher, target)
    assert (done.status, done.errors) == (0, "")
    assert_same(publisher, target)


@pytest.mark.timeout(240)
def test_pg_upgrade(publisher18_db: Database, make_server: Callable[..., EmbeddedServer]) -> None:
    old, new = make_server(18), make_server(18)
    if not (old.bindir / "pg_upgrade").exists():
        pytest.skip("these binaries have no pg_upgrade")
    publisher18_db.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int); CREATE PUBLICATION pub FOR TABLE a, b")
    publisher18_db.execute("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)")
    with contextlib.closing(Database(ServerAddress(old.dsn(), 18), "postgres")) as target:
        target.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int)")
        done = run(publisher18_db, target)
        assert done.status == 0, done.errors
    for server in (old, new):
        server.stop()
    directories = ("--old-datadir", old.data_directory, "--new-datadir", new.data_directory)
    binaries = ("--old-bindir", old.bindir, "--new-bindir", new.bindir)
    upgraded = server_user().run(
        old.bindir / "pg_upgrade", *directories, *binaries, "--username", old.user, "--no-sync", cwd=new.socket_directory
    )
    assert upgraded.returncode == 0, upgraded.stdout + upgraded.stderr
    new.password = old.password
    new.start()
    publisher18_db.execute("INSERT INTO a VALUES (2); INSERT INTO b VALUES (2)")
    with contextlib.closing(Database(ServerAddress(new.dsn(), 18), "postgres")) as target:
        assert "the server was upgraded" in run(publisher18_db, target).errors
        assert accept(publisher18_db, target).status == 0
        ended = run(publisher18_db, target)
        assert (ended.status, ended.errors) == (0, "")
        assert_same(publisher18_db, target)


def test_restored_from_a_dump_of_yesterday(replicated: tuple[Database, Database]) -> None:
    """The slot is past the position of the dump: one command, and the next run makes all tables equal."""
    publisher, old = replicated
    name = f"moved_{publisher.name}"
    with another(old) as new:
        restore(old, new)
        publisher.execute("UPDATE a SET id = 7 WHERE id = 1; INSERT INTO a VALUES (3); INSERT INTO b VALUES (3)")
        assert run(publisher, old).status == 0
        given = (name, f"--target={new.dsn}", f"--connection={publisher.dsn}")
        refused = subscriber("recover", *given)
        assert (refused.status, "belongs to another target" in refused.errors) == (1, True)
        refused = subscriber("recover", *given, "--accept-target")
        assert (refused.status, "it may be the slot of another target" in refused.errors) == (1, True)
        planned = subscriber("recover", *given, "--accept-target", "--force", "--dry-run")
        assert (planned.status, "public.a: compared by its key" in planned.output) == (0, True), planned.errors
        # neither has accepted anything
        assert "belongs to another target" in subscriber("recover", *given).errors
        # both are reconciled: it does not matter how far an earlier one had come
        new.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'd', srmode = 'r' WHERE srrelname = 'b'")
        done = subscriber("recover", *given, "--accept-target", "--force")
        assert done.status == 0, done.errors
        assert "was advanced to" in done.output
        done = run(publisher, new)
        assert done.status == 0, done.errors
        assert_same(publisher, new)
