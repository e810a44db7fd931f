"""``subscriber run`` into targets that are no PostgreSQL."""

from __future__ import annotations

import signal

import pytest

from tests.support.program import running, slots, subscriber
from tests.support.sqlalchemy_targets import ALL, IN_BOTH_ALIKE, Replica

# twelve seconds for a target that takes nothing, which is said then, and a second or more for a process to end on a busy machine
SOON = 15.0


def test_copies_follows_and_ends_cleanly(other_replica: Replica) -> None:
    pair = other_replica
    with running(*pair.arguments()) as program:
        pair.target.follows()
        pair.publisher.execute("UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id > 990")
        pair.publisher.execute("INSERT INTO t VALUES (2000, 'new'), (2001, NULL); UPDATE t SET id = 3000 WHERE id = 500")
        pair.target.wait(ALL, pair.publisher.fetch(ALL))
        program.send(signal.SIGTERM)
        done = program.ended()
    assert (done.status, done.output, done.errors) == (0, "", "")
    assert done.seconds < SOON
    pair.acknowledged()
    # it resumes where it was, and copies nothing again
    pair.target.execute("DELETE FROM t WHERE id = 1")
    pair.publisher.execute("DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (4000, 'while away')")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 0
    pair.same()
    assert 'conflict detected on relation "public.t": conflict=delete_missing' in done.errors
    assert "copied" not in done.errors


@IN_BOTH_ALIKE
def test_prepared_transactions_wait_for_their_commit(other_replica: Replica) -> None:
    pair = other_replica
    pair.more += ["-o", "two_phase=true"]
    pair.catches_up()
    pair.catches_up()  # now all tables are ready, and two_phase is enabled
    pair.publisher.execute("BEGIN; INSERT INTO t VALUES (2000, 'kept'); PREPARE TRANSACTION 'keep'")
    pair.publisher.execute("BEGIN; UPDATE t SET v = 'never'; PREPARE TRANSACTION 'drop'")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    pair.same()
    waiting = f"SELECT gid FROM {pair.target.ours('prepared_transaction')} ORDER BY gid"
    assert pair.target.fetch(waiting) == [("drop",), ("keep",)]
    # another process ends them
    pair.publisher.execute("COMMIT PREPARED 'keep'")
    pair.publisher.execute("ROLLBACK PREPARED 'drop'")
    pair.catches_up()
    assert pair.target.fetch("SELECT v FROM t WHERE id = 2000") == [("kept",)]
    assert pair.target.fetch(waiting) == []


@pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
def test_without_create_tables_a_missing_table_is_named(other_replica: Replica) -> None:
    pair = other_replica
    pair.more = ["-c", "create_tables=off"]
    if pair.target.kind == "sqlite":
        done = subscriber(*pair.arguments(verb="check"))
        assert done.output.startswith(f'error: file "{pair.target.path}" does not exist (hint: ')
        pair.target.execute("CREATE TABLE mine (id int)")
    for verb in ("check", "run"):
        done = subscriber(*pair.arguments(verb=verb))
        assert done.status == 1
        said = done.output + done.errors
        assert '"public.t"' in said
        assert "--create-tables" in said
    assert slots(pair.publisher) == []
    # a table of the user's own, with a column more
    pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, note varchar(20) DEFAULT 'mine', v varchar(50))")
    done = subscriber(*pair.arguments(verb="check"))
    assert (done.status, done.output) == (0, "")
    pair.catches_up()
    assert pair.target.fetch("SELECT count(*), min(note) FROM t") == [(1000, "mine")]


@pytest.mark.parametrize(("other_target", "how"), [("sqlite", "ignore"), ("sqlite", "add"), ("mariadb", "add")], indirect=["other_target"])
def test_a_new_column(other_replica: Replica, how: str) -> None:
    pair = other_replica
    pair.more += ["-c", f"schema_change={how}"]
    pair.catches_up()
    pair.publisher.execute("ALTER TABLE t ADD n integer DEFAULT 7; INSERT INTO t VALUES (2000, 'x', 8)")
    pair.catches_up()
    if how == "add":
        assert pair.target.fetch("SELECT n FROM t WHERE id = 2000") == [(8,)]
        # what the publisher's rows got, which are not sent
        assert pair.target.fetch("SELECT DISTINCT n FROM t WHERE id < 2000") == [(7,)]
        pair.publisher.execute("ALTER TABLE t ADD w text DEFAULT 'it''s {}', ADD z int; INSERT INTO t VALUES (2001, 'x', 8)")
        pair.catches_up()
        assert pair.target.fetch("SELECT DISTINCT n, w, z FROM t WHERE id < 2000") == [(7, "it's {}", None)]
        # only the rows of the publisher know
        pair.publisher.execute("ALTER TABLE t ADD r float8 DEFAULT random(); INSERT INTO t VALUES (2002, 'x', 8)")
        done = subscriber(*pair.arguments("--until-caught-up"))
        assert "what its rows have there is not known: the publisher has rewritten the table" in done.errors
    else:
        row = pair.target.fetch("SELECT * FROM t WHERE id = 2000")
        assert row == [(2000, "x")]


@pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
def test_a_new_column_that_differs_by_case_only_is_refused_by_name(other_replica: Replica) -> None:
    """The bug was that the database's own error was retried for ever, without the name."""
    pair = other_replica
    pair.catches_up()
    pair.publisher.execute("ALTER TABLE t ADD \"V\" text; INSERT INTO t VALUES (2000, 'x', 'capital')")
    for how in ("add", "error"):
        done = subscriber(*pair.arguments("--until-caught-up", "-c", f"schema_change={how}"))
        assert done.status == 1
        said = 'columns "V" and "v" of table "public.t" have the same name in the target'
        assert said in done.errors
        assert "finished at" in done.errors
        # it loses values, and says so
        assert "schema_change = ignore meanwhile (its values until then are not applied)" in done.errors
    assert subscriber(*pair.arguments("--until-caught-up", "-c", "schema_change=ignore")).status == 0
    assert pair.target.fetch("SELECT * FROM t WHERE id = 2000") == [(2000, "x")]


def test_a_new_column_is_an_error_by_default(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    pair.catches_up()
    pair.publisher.execute("ALTER TABLE t ADD n integer; INSERT INTO t VALUES (2000, 'x', 8)")
    lsn = pair.publisher.current_lsn()
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 1
    assert '"public.t" is missing replicated column: "n"' in done.errors
    assert done.errors.count("\n") == 1
    assert pair.behind(lsn)
    pair.target.execute("ALTER TABLE t ADD n integer")
    pair.catches_up()
    assert pair.target.fetch("SELECT n FROM t WHERE id = 2000") == [(8,)]


def test_a_second_one_is_refused(other_replica: Replica) -> None:
    pair = other_replica
    with running(*pair.arguments()) as program:
        pair.target.follows()
        done = subscriber(*pair.arguments("--until-caught-up"))
        assert done.status == 1
        *_, waited, refused = done.errors.splitlines()
        assert " WARNING " in waited
        assert f"waiting for PID {refused.split(' for PID ')[1].split()[0]}, which holds its lock" in waited
        assert "is active" in refused
        assert "(hint: " in refused
        program.send(signal.SIGKILL)
        program.ended()
    # what a killed one held is free
    pair.publisher.execute("INSERT INTO t VALUES (2000, 'after')")
    pair.catches_up()


def test_truncate_and_a_rule_for_inserts(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    pair.catches_up()
    pair.target.execute("INSERT INTO t VALUES (5000, 'of somebody else')")
    pair.publisher.execute("INSERT INTO t VALUES (5000, 'ours')")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 1
    assert 'conflict detected on relation "public.t": conflict=insert_exists' in done.errors
    done = subscriber(*pair.arguments("--until-caught-up", "-o", "conflict.insert_exists=apply_remote"))
    assert done.status == 0, done.errors
    assert "conflict=insert_exists, resolution=apply_remote" in done.errors
    assert pair.target.fetch("SELECT v FROM t WHERE id = 5000") == [("ours",)]
    pair.publisher.execute("TRUNCATE t; INSERT INTO t VALUES (1, 'again')")
    pair.catches_up()
