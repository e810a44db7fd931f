"""What errors recommend is enough, and nothing else is needed."""

from __future__ import annotations

import pytest

from tests.support.database import Database
from tests.support.program import running, subscriber

COPIED = "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'"
QUICK = ("-c", "wal_retrieve_retry_interval=200ms")


@pytest.fixture
def arguments(publisher18_db: Database) -> list[str]:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES")
    return [f"--connection={publisher18_db.dsn}", "--publication=pub", *QUICK]


def test_a_table_that_is_new_or_renamed(publisher18_db: Database, target_db: Database, arguments: list[str]) -> None:
    """The bug was that the hint for a new table ended with its creation, and its rows never came."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    arguments.append(f"--target={target_db.dsn}")
    with running("run", *arguments) as program:
        target_db.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
        target_db.wait(COPIED, 1)
        publisher18_db.execute("ALTER TABLE t RENAME TO t2; INSERT INTO t2 VALUES (2)")
        program.says('relation "public.t2" does not exist')
        program.says("if the table was renamed on the publisher, rename it in the target")
        target_db.execute("ALTER TABLE t RENAME TO t2")
        target_db.wait("SELECT count(*) FROM t2", 2)
        publisher18_db.execute("CREATE TABLE n (id int PRIMARY KEY); INSERT INTO n VALUES (1)")
        program.says('relation "public.n" does not exist')
        program.says("if it is new, create it in the target, then start the run again (or `subscriber alter NAME --refresh`)", 2)
        target_db.execute("CREATE TABLE n (id int PRIMARY KEY)")
        publisher18_db.execute("INSERT INTO n VALUES (2)")
        program.says('table "public.n" is published, but not part of the subscription')
        program.send(15)
        assert program.ended().status == 0
    assert subscriber("run", *arguments, "--until-caught-up").status == 0
    assert target_db.fetch("SELECT id FROM n ORDER BY 1") == [(1,), (2,)]


def test_several_findings_have_a_line_each(publisher18_db: Database, target_db: Database, arguments: list[str]) -> None:
    publisher18_db.execute("CREATE TABLE u (id int PRIMARY KEY)")
    done = subscriber("run", *arguments, f"--target={target_db.dsn}")
    hint = "(hint: create the table in the target with the publisher's columns)"
    assert done.errors.splitlines() == [
        f'subscriber: logical replication target relation "public.{table}" does not exist {hint}' for table in ("t", "u")
    ]
