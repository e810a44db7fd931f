"""Bad input on targets of SQLAlchemy's.

One line with relation, column and LSN; the transaction rolled back, the position unmoved; once fixed, it continues.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import PROGRAM, Ended, environment, running, slots, subscriber
from tests.support.sqlalchemy_targets import ALL, IN_BOTH_ALIKE, OtherTarget, Replica, write_locked

SECRET = "row-value-of-nobody-s-business"


def assert_one_error(done: Ended, *said: str) -> str:
    """The program ended with one line of error that matches, with a hint and without row values. Returns the line."""
    lines = [line for line in (done.output + done.errors).splitlines() if " WARNING " not in line]
    assert done.status == 1, done.errors
    assert len(lines) == 1, done.output + done.errors
    # what check finds is its output
    assert lines[0].startswith(("subscriber: ", "error: "))
    assert lines[0].startswith("error: ") is bool(done.output)
    for text in said:
        assert re.search(text, lines[0]), lines[0]
    assert "(hint: " in lines[0], lines[0]
    assert SECRET not in done.errors
    assert "Traceback" not in done.errors
    return lines[0]


# --- before anything is begun

ARGUMENTS = [
    ("sqlite://", "in memory"),
    ("sqlite:///:memory:", "in memory"),
    ("sqlite+pysqlite:///x.db", "not asynchronous"),
    ("mysql+pymysql://u:hush@127.0.0.1/x", "not asynchronous"),
    ("somedb://u:hush@127.0.0.1/x", 'no sink for targets of kind "somedb"'),
    ("sqlite:////no/such/directory/x.db", "does not exist|No such file or directory"),
    ("mariadb://u:hush@127.0.0.1:1/x", "127.0.0.1|connect|reached"),
    ("postgresql+asyncpg://u:hush@127.0.0.1:1/x", "leave the driver out of the URL"),
    ("mariadb://u:hush@127.0.0.1:notaport/x", "URL"),
]


@pytest.mark.parametrize(("target", "said"), ARGUMENTS)
def test_targets_that_cannot_be(publisher18_db: Database, target: str, said: str) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    pair = Replica(publisher18_db, OtherTarget("sqlite", target, lambda _: [], lambda _: None))
    assert "hush" not in assert_one_error(subscriber(*pair.arguments("--until-caught-up")), said)
    assert slots(publisher18_db) == []


def test_a_file_that_is_no_database(sqlite_replica: Replica) -> None:
    path = sqlite_replica.target.path
    assert path is not None
    path.write_bytes(b"this is somebody's text, and long enough to be read as the head of a database" * 10)
    before = path.read_bytes()
    assert_one_error(subscriber(*sqlite_replica.arguments("--until-caught-up")), "not an SQLite database")
    assert path.read_bytes() == before
    assert slots(sqlite_replica.publisher) == []
    path.unlink()
    sqlite_replica.catches_up()


def test_a_login_that_is_refused(publisher18_db: Database, mariadb_db: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    password = f"hush{secrets.token_hex(8)}"
    wrong = re.sub(r"//([^:]+):[^@]+@", rf"//\1:{password}@", mariadb_db.url)
    pair = Replica(publisher18_db, OtherTarget("mariadb", wrong, mariadb_db.fetch, mariadb_db.execute))
    assert password not in assert_one_error(subscriber(*pair.arguments("--until-caught-up")), "authentication failed")
    absent = f"{mariadb_db.url}_absent"
    assert_one_error(subscriber(*pair.arguments("--until-caught-up", target=absent)), "database does not exist")
    assert slots(publisher18_db) == []


# --- the target's state


def test_file_locked_by_another_program(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    path = pair.target.path
    assert path is not None
    with running(*pair.arguments()) as program:
        pair.target.follows()
        before = pair.target.position(pair.name)
        with write_locked(path):
            pair.publisher.execute(f"INSERT INTO t VALUES (2000, '{SECRET}')")
            # reported, and retried
            program.says("locked by another program")
            assert pair.target.fetch("SELECT count(*) FROM t") == [(1000,)]
        pair.target.wait(ALL, pair.publisher.fetch(ALL))
        program.send(signal.SIGTERM)
        done = program.ended()
    assert done.status == 0
    assert pair.target.position(pair.name) != before
    assert SECRET not in done.errors
    # it ends the first attempt, with the reason
    with write_locked(path):
        assert_one_error(subscriber(*pair.arguments("--until-caught-up")), "locked by another program")
    pair.catches_up()


def _as_others() -> None:
    """Root writes read-only files too, unless it has lost the right to."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) == 0


def test_a_full_disk(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    pair.catches_up()
    assert pair.target.path is not None
    limit = pair.target.path.stat().st_size + 200_000
    pair.publisher.execute(f"INSERT INTO t SELECT i, repeat('{SECRET}', 20) FROM generate_series(10000, 13000) AS i")
    lsn = pair.publisher.current_lsn()
    done = limited(limit, *pair.arguments("--until-caught-up"))
    # where the system says ENOSPC instead, it is "no room is left"
    assert_one_error(done, "cannot be read or written|no room is left")
    assert pair.behind(lsn)
    assert pair.target.fetch("SELECT count(*) FROM t WHERE id >= 10000") == [(0,)]
    pair.catches_up()


def limited(size: int, *arguments: str) -> Ended:
    """Run the program where no file may grow beyond ``size`` bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(
        [*PROGRAM, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        preexec_fn=limit,
    )
    return Ended(done.returncode, done.stdout, done.stderr, 0.0)


# --- values and shapes that the target refuses: by one row of two in one transaction, behind one that is fine


def refused(pair: Replica, insert: str, *said: str, mend: str) -> None:
    """A row that the target refuses: its transaction is not there, those before it are; after the remedy everything is."""
    pair.publisher.execute("INSERT INTO t VALUES (5000, 'before')")
    pair.publisher.execute(f"INSERT INTO t VALUES (5001, 'with it'); {insert}")
    done = subscriber(*pair.arguments("--until-caught-up"))
    line = assert_one_error(done, 'relation "public.t"', *said)
    assert re.search(r"finished at [0-9A-F]+/[0-9A-F]+", line), line
    assert pair.target.fetch("SELECT id FROM t WHERE id IN (5000, 5001)") == [(5000,)]
    pair.target.execute(mend)
    pair.catches_up()


@pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
def test_a_value_that_is_too_long(publisher18_db: Database, other_target: OtherTarget) -> None:
    if other_target.kind == "sqlite":
        other_target.execute("CREATE TABLE t (id int PRIMARY KEY, v text CONSTRAINT short CHECK (length(v) < 20))")
        mend = "ALTER TABLE t RENAME TO old; CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT * FROM old; DROP TABLE old"
        said = "short"
    else:
        other_target.execute("CREATE TABLE t (id int PRIMARY KEY, v varchar(20))")
        mend = "ALTER TABLE t MODIFY v text"
        said = "too long"
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    pair = Replica(publisher18_db, other_target)
    pair.catches_up()
    refused(pair, f"INSERT INTO t VALUES (5002, '{SECRET}')", said, mend=mend)


@pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)
def test_a_value_that_is_out_of_range(publisher18_db: Database, other_target: OtherTarget) -> None:
    other_target.execute("CREATE TABLE t (id int PRIMARY KEY, other bigint, v smallint)")
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, other int, v int); CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute("INSERT INTO t VALUES (1, 1, 1), (2, 2, 12345678)")
    pair = Replica(publisher18_db, other_target)
    # while it is copied
    line = assert_one_error(subscriber(*pair.arguments("--until-caught-up")), 'while copying table "public.t" column "v"', "(?i)range")
    assert "12345678" not in line
    publisher18_db.execute("DELETE FROM t WHERE id = 2")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    # and while it is followed
    publisher18_db.execute("INSERT INTO t VALUES (5000, 1, 5)")
    publisher18_db.execute("INSERT INTO t VALUES (5001, 1, 6), (5002, 1, 12345678)")
    line = assert_one_error(
        subscriber(*pair.arguments("--until-caught-up")), 'relation "public.t"', 'column "v"', "(?i)range", r"finished at [0-9A-F]+/"
    )
    assert "12345678" not in line
    assert other_target.fetch("SELECT id FROM t WHERE id >= 5000") == [(5000,)]
    other_target.execute(f"ALTER TABLE t {'MODIFY v int' if other_target.kind == 'mariadb' else 'ALTER v TYPE int'}")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    assert other_target.fetch("SELECT id, v FROM t ORDER BY id") == [(1, 1), (5000, 5), (5001, 6), (5002, 12345678)]


def test_a_value_that_the_encoding_has_not(publisher18_db: Database, mariadb_db: OtherTarget) -> None:
    mariadb_db.execute("CREATE TABLE t (id int PRIMARY KEY, v varchar(100) CHARACTER SET latin1)")
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'ä')")
    pair = Replica(publisher18_db, OtherTarget("mariadb", mariadb_db.url, mariadb_db.fetch, mariadb_db.execute))
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 0
    assert 'column "v" of table "public.t" has character set latin1' in done.errors
    refused(pair, f"INSERT INTO t VALUES (5002, '{SECRET} 漢')", 'column "v"', mend="ALTER TABLE t MODIFY v text CHARACTER SET utf8mb4")


@IN_BOTH_ALIKE
def test_a_row_that_is_there_already(other_replica: Replica) -> None:
    pair = other_replica
    pair.catches_up()
    pair.target.execute(f"INSERT INTO t VALUES (5002, '{SECRET}')")
    refused(pair, f"INSERT INTO t VALUES (5002, '{SECRET}')", "(?i)duplicate key|insert_exists", mend="DELETE FROM t WHERE id = 5002")


BIG_JOIN = """
CREATE TRIGGER big BEFORE INSERT ON t FOR EACH ROW
BEGIN
    SET SESSION max_join_size = 1, SESSION sql_big_selects = 0;
    SET @rows = (SELECT count(*) FROM t AS a JOIN t AS b);
END
"""


@pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)
def test_an_error_of_the_server_that_has_no_values(other_replica: Replica) -> None:
    """A trigger runs into a limit: the server's own sentence tells which."""
    pair = other_replica
    pair.catches_up()
    pair.target.execute(BIG_JOIN)
    pair.publisher.execute(f"INSERT INTO t VALUES (2000, '{SECRET}')")
    said = r"\(error 1104\): The SELECT would examine more than MAX_JOIN_SIZE rows; check your WHERE and use SET SQL_BIG_SELECTS=1"
    assert_one_error(subscriber(*pair.arguments("--until-caught-up")), said, 'relation "public.t"')
    pair.target.execute("DROP TRIGGER big")
    pair.catches_up()


def test_infinity_into_a_date(publisher18_db: Database, mariadb_db: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v date); CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute("INSERT INTO t VALUES (1, '2000-01-01')")
    pair = Replica(publisher18_db, OtherTarget("mariadb", mariadb_db.url, mariadb_db.fetch, mariadb_db.execute), ["--create-tables"])
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    publisher18_db.execute("INSERT INTO t VALUES (2, 'infinity')")
    lsn = publisher18_db.current_lsn()
    assert_one_error(
        subscriber(*pair.arguments("--until-caught-up")), 'relation "public.t"', 'column "v"', "text", r"finished at [0-9A-F]+/"
    )
    assert pair.behind(lsn)
    mariadb_db.execute("ALTER TABLE t MODIFY v varchar(40)")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    assert mariadb_db.fetch("SELECT v FROM t ORDER BY id") == [("2000-01-01",), ("infinity",)]


@IN_BOTH_ALIKE
def test_a_table_of_another_shape(other_replica: Replica) -> None:
    pair = other_replica
    pair.target.execute("CREATE TABLE t (id int PRIMARY KEY, other varchar(20))")
    done = subscriber(*pair.arguments(verb="check"))
    assert done.status == 1
    assert 'target relation "public.t" is missing replicated column: "v"' in done.output
    assert_one_error(subscriber(*pair.arguments("--until-caught-up")), 'target relation "public.t" is missing replicated column: "v"')
    assert slots(pair.publisher) == []
    pair.target.execute("DROP TABLE t")
    pair.catches_up()


def test_names_that_fall_together(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher18_db.execute("CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY, v text); CREATE TABLE s__t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE s.t, s__t")
    pair = Replica(publisher18_db, sqlite_file)
    done = subscriber(*pair.arguments(verb="check"))
    assert done.status == 1
    assert '"s.t"' in done.output
    assert '"public.s__t"' in done.output
    assert_one_error(subscriber(*pair.arguments("--until-caught-up")), 'would both be table "s__t"')
    # the other one is replicated
    assert sqlite_file.states() == {"s__t": "r"}
    publisher18_db.execute("ALTER PUBLICATION pub DROP TABLE s.t; INSERT INTO s__t VALUES (1, 'a')")
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert (done.status, done.errors) == (0, "")
    assert sqlite_file.fetch("SELECT * FROM s__t") == [(1, "a")]


@IN_BOTH_ALIKE
def test_a_table_of_the_name_of_one_of_ours(other_replica: Replica) -> None:
    """The bug was that one published later was copied into our own."""
    pair, publisher = other_replica, other_replica.publisher
    ours = pair.target.ours("position")
    publisher.execute(f"CREATE TABLE {ours} (id int PRIMARY KEY, v text); ALTER PUBLICATION pub ADD TABLE {ours}")
    said = f'table "public.{ours}" would be table "{ours}" in the target, a name that subscriber reserves for its own tables'
    assert said in subscriber(*pair.arguments(verb="check")).output
    assert "leave it out of the publication" in assert_one_error(subscriber(*pair.arguments("--until-caught-up")), said)
    assert list(pair.target.states()) == ["t"]
    publisher.execute(f"ALTER PUBLICATION pub DROP TABLE {ours}")
    pair.catches_up()
    position = pair.target.fetch(f"SELECT * FROM {ours}")
    publisher.execute(f"ALTER PUBLICATION pub ADD TABLE {ours}; INSERT INTO {ours} VALUES (1, 'a')")
    done = subscriber(*pair.arguments("--until-caught-up", "--allow-missing-tables"))
    assert (done.status, done.output) == (0, "")
    assert f"a table is published but not replicated: {said}" in done.errors
    assert len(pair.target.fetch(f"SELECT * FROM {ours}")) == len(position) == 1
    assert list(pair.target.states()) == ["t"]


def test_a_read_only_file(sqlite_replica: Replica, scratch: Path) -> None:
    pair = sqlite_replica
    pair.catches_up()
    assert pair.target.path is not None
    copy = scratch / "replica.db"
    copy.write_bytes(pair.target.path.read_bytes())
    copy.chmod(0o400)
    pair.publisher.execute(f"INSERT INTO t VALUES (2000, '{SECRET}')")
    lsn = pair.publisher.current_lsn()
    done = subprocess.run(
        [*PROGRAM, *pair.arguments("--until-caught-up", target=f"sqlite:///{copy}")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        preexec_fn=_as_others,
    )
    assert_one_error(Ended(done.returncode, done.stdout, done.stderr, 0.0), "(?i)read-?only|Permission denied|unable to open|cannot")
    assert pair.behind(lsn)
    pair.catches_up()


@IN_BOTH_ALIKE
def test_position_removed_from_the_target(other_replica: Replica) -> None:
    """The bug was that a new slot was made, and what had been committed in between was lost silently."""
    pair = other_replica
    pair.catches_up()
    pair.target.execute(f"DELETE FROM {pair.target.ours('position')}")
    pair.publisher.execute("INSERT INTO t VALUES (2000, 'b')")
    assert_one_error(
        subscriber(*pair.arguments("--until-caught-up")),
        f'"{pair.name}" has lost its position in the target, and table "public.t" was replicated before',
    )
    assert slots(pair.publisher) == [pair.name]
    assert pair.target.fetch("SELECT count(*) FROM t") == [(1000,)]
