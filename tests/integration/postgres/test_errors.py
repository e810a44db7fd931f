"""The PostgreSQL sink: what it says when the target refuses something, and that nothing stays of it."""

from __future__ import annotations

import logging
import traceback

import pytest

from subscriber.errors import ApplyError, RelationError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Message
from tests.support.database import Database
from tests.support.sink_postgres import START, Binary, Feed, Remote, opened, truncate

SECRET = "S3CRETVALUE"


def shown(error: BaseException) -> str:
    """Everything that a log with a traceback would show, source lines aside."""
    lines = traceback.format_exception(error)
    return "".join(line for line in lines if not line.startswith("  "))


async def refused(feed: Feed, *messages: Message) -> TargetError:
    with pytest.raises(TargetError) as caught:
        await feed.apply(*messages)
    assert not isinstance(caught.value, TargetUnavailable)
    assert SECRET not in shown(caught.value)
    assert SECRET not in caught.value.one_line()
    assert SECRET not in (caught.value.hint or "")
    return caught.value


TABLE = """
CREATE DOMAIN short AS text CHECK (length(value) < 5);
CREATE TYPE "Mood" AS ENUM ('happy');
CREATE DOMAIN needed AS text CONSTRAINT needed_not_null NOT NULL;
CREATE TABLE t (
    id int PRIMARY KEY, v text UNIQUE, n int, w varchar(5), d short, r int NOT NULL DEFAULT 0,
    c text CONSTRAINT no_secret CHECK (c NOT LIKE 'S3CRET%'), e text, q needed DEFAULT '', m "Mood", EXCLUDE USING btree (e WITH =)
)
"""
COLUMNS = ("*id", "v", "n", "w", "d", "r", "c", "e", "q", "m")
GOOD: dict[str, object] = {"id": 1, "v": "v", "n": 1, "w": "w", "d": "d", "r": 0, "c": "c", "e": "e", "q": "", "m": "happy"}


@pytest.mark.parametrize(
    ("wrong", "sqlstate", "message", "column"),
    [
        ({"id": 2, "v": SECRET, "e": "x"}, "23505", 'duplicate key value violates unique constraint "t_v_key"', None),
        ({"id": 2, "v": "x", "e": SECRET}, "23P01", 'conflicting key value violates exclusion constraint "t_e_excl"', None),
        ({"r": None}, "23502", 'null value in column "r" of relation "t" violates not-null constraint', "r"),
        ({"q": None}, "23502", 'domain "needed" does not allow null values', "q"),
        ({"d": SECRET}, "23514", 'value for domain "short" violates check constraint "short_check"', "d"),
        ({"c": SECRET}, "23514", 'new row for relation "t" violates check constraint "no_secret"', None),
        ({"n": SECRET}, "22P02", "invalid text representation (SQLSTATE 22P02)", "n"),
        pytest.param(
            *({"n": Binary(SECRET.encode())}, "22P03", "incorrect binary data format in logical replication column 3", "n"),
            marks=pytest.mark.matrix,
        ),
        ({"n": "99999999999"}, "22003", "numeric value out of range (SQLSTATE 22003)", "n"),
        ({"m": SECRET}, "22P02", 'invalid input value for enum public."Mood"', "m"),
        ({"w": SECRET}, "22001", "string data right truncation (SQLSTATE 22001)", None),
        ({"v": b"\xff" + SECRET.encode()}, "22021", "character not in repertoire (SQLSTATE 22021)", "v"),
    ],
)
async def test_refused_values(any_target_db: Database, wrong: dict[str, object], sqlstate: str, message: str, column: str | None) -> None:
    any_target_db.execute(TABLE)
    any_target_db.execute(f"ALTER DATABASE {any_target_db.name} SET log_parameter_max_length_on_error = -1")
    remote = Remote("t", *COLUMNS)
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, remote.insert(*(GOOD | {"id": 10, "v": SECRET, "e": SECRET}).values()))
        before = feed.position()
        bad = remote.insert(*(GOOD | wrong).values())
        error = await refused(feed, remote.insert(*(GOOD | {"id": 3, "v": "other", "e": "other"}).values()), bad)
        assert isinstance(error, ApplyError)
        if any_target_db.version < 14 and "r" not in wrong:
            # it does not tell which parameter it was
            column = None
            message = "invalid binary representation (SQLSTATE 22P03)" if sqlstate == "22P03" else message
        assert (str(error), error.sqlstate) == (message, sqlstate)
        assert ("ADD VALUE" in (error.hint or "")) == ("m" in wrong)
        where = f' column "{column}"' if column else ""
        expected = (
            f'processing remote data for replication origin "pg_{feed.oid}" during message type "INSERT" '
            f'for replication target relation "public.t"{where} in transaction {feed.xid}, finished at {Lsn(feed.lsn)}'
        )
        assert expected in error.one_line()
        assert any_target_db.fetch("SELECT id FROM t") == [(10,)]
        assert feed.position() == before
        # the session stays usable
        await feed.apply(remote.insert(*GOOD.values()))
        assert any_target_db.value("SELECT count(*) FROM t") == 2


async def test_conflicts_are_named_as_native_names_them(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1), (2)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, remote.insert(1))
        assert 'conflict detected on relation "public.t": conflict=insert_exists' in error.one_line()
        error = await refused(feed, remote.relation, remote.update(1, old=(2,)))
        assert 'conflict detected on relation "public.t": conflict=update_exists' in error.one_line()


async def test_truncate_of_a_referenced_table_names_the_other(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child (id int REFERENCES t)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, truncate(remote))
    assert str(error) == 'cannot truncate a table referenced in a foreign key constraint: Table "child" references "t".'
    assert error.hint == "publish both tables and truncate them in one statement, or drop the foreign key in the target"


@pytest.mark.parametrize("errcode", ["P0001", "22P02", "23505", "42P01", "22012"])
async def test_message_of_a_trigger_is_not_repeated(target_db: Database, errcode: str) -> None:
    target_db.execute(f"""
        CREATE TABLE t (v text);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE 'invalid input value for enum %: "', NEW.v USING ERRCODE = '{errcode}', DETAIL = NEW.v, HINT = NEW.v; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse(); ALTER TABLE t ENABLE ALWAYS TRIGGER refuse
    """)
    remote = Remote("t", "v", identity="n")
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, remote.insert(SECRET))
        assert error.sqlstate == errcode
        assert 'replication target relation "public.t"' in error.one_line()


async def test_no_partition(target_db: Database) -> None:
    target_db.execute("CREATE TABLE p (v text) PARTITION BY LIST (v)")
    remote = Remote("p", "v", identity="n")
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, remote.insert(SECRET))
        assert isinstance(error, ApplyError)
        assert str(error) == 'no partition of relation "p" found for row'


@pytest.mark.parametrize(
    ("ddl", "columns", "message"),
    [
        ("SELECT 1", ("a",), 'logical replication target relation "public.t" does not exist'),
        ("CREATE TABLE t (a int)", ("a", "b"), 'logical replication target relation "public.t" is missing replicated column: "b"'),
        (
            "CREATE TABLE t (a int)",
            ("b", "a", "c"),
            'logical replication target relation "public.t" is missing replicated columns: "b", "c"',
        ),
        (
            "CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a) STORED, c int GENERATED ALWAYS AS (a) STORED)",
            ("a", "b"),
            'logical replication target relation "public.t" has incompatible generated column: "b"',
        ),
        (
            "CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a) STORED, c int GENERATED ALWAYS AS (a) STORED)",
            ("b", "c"),
            'logical replication target relation "public.t" has incompatible generated columns: "b", "c"',
        ),
        ("CREATE TABLE u (a int); CREATE VIEW t AS TABLE u", ("a",), 'cannot use relation "public.t" as logical replication target'),
        ("CREATE SEQUENCE t", ("a",), 'cannot use relation "public.t" as logical replication target'),
    ],
)
async def test_relations_that_do_not_fit(target_db: Database, ddl: str, columns: tuple[str, ...], message: str) -> None:
    target_db.execute(ddl)
    remote = Remote("t", *columns, identity="n")
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, remote.insert(*(SECRET for _ in columns)))
        assert isinstance(error, RelationError)
        assert str(error) == message
        assert f'during message type "INSERT" for replication target relation "public.t" in transaction {feed.xid}' in error.one_line()
        assert error.hint
        assert feed.position() == START


async def test_earlier_error_of_the_server_wins_over_a_later_one_of_ours(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote, missing = Remote("t", "*id"), Remote("missing", "*id", relation_id=2)
    async with opened(target_db) as feed:
        error = await refused(feed, remote.relation, missing.relation, remote.insert(1), remote.insert(1), missing.insert(1))
        assert error.sqlstate == "23505"


async def test_failing_batch_is_applied_one_by_one(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE w (a int, b int, id int PRIMARY KEY)")
    remote, narrow, wide = Remote("t", "*id"), Remote("w", "*id", relation_id=2), Remote("w", "a", "b", "*id", relation_id=2)
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, narrow.relation, remote.insert(0))
        counted = feed.sink.statistics
        transactions = [
            # the relation changes within the batch: the second attempt starts from what was known before it
            feed.transaction(narrow.insert(1), remote.insert(1)),
            feed.transaction(wide.relation, wide.insert(1, 2, 3)),
            feed.transaction(remote.insert(2), remote.insert(0)),
            feed.transaction(remote.insert(3)),
        ]
        with pytest.raises(ApplyError) as caught:
            await feed.opened.apply(feed.batch(*transactions))
        assert f"in transaction {transactions[2].xid}, finished at {transactions[2].final_lsn}" in caught.value.one_line()
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(0,), (1,)]
        assert target_db.fetch("SELECT id, a, b FROM w ORDER BY id") == [(1, None, None), (3, 1, 2)]
        assert feed.position() == transactions[1].end_lsn
        assert feed.durable[-1] == transactions[1].end_lsn
        assert (counted.transactions, counted.inserts) == (3, 4)

        target_db.execute("DELETE FROM t WHERE id = 0")
        await feed.opened.apply(feed.batch(*transactions))
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(0,), (1,), (2,), (3,)]
        assert feed.position() == transactions[3].end_lsn


async def test_error_at_commit(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF NEW.v LIKE 'S3CRET%' THEN RAISE EXCEPTION 'no %', NEW.v; END IF; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
        ALTER TABLE t ENABLE ALWAYS TRIGGER late
    """)
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "fine"))
        before = feed.position()
        error = await refused(feed, remote.insert(2, SECRET))
        assert isinstance(error, ApplyError)
        assert error.sqlstate == "P0001"
        assert f"in transaction {feed.xid}" in error.one_line()
        assert target_db.fetch("SELECT id FROM t") == [(1,)]
        assert feed.position() == before


@pytest.mark.parametrize(
    "ddl",
    [
        "ALTER TABLE t ALTER v TYPE bigint",
        "ALTER TABLE t ALTER v TYPE text",
        "ALTER TABLE t DROP v; ALTER TABLE t ADD v numeric",
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t RENAME id TO other; "
        "ALTER TABLE t ADD id int PRIMARY KEY DEFAULT 0; ALTER TABLE t DROP other, ALTER v TYPE bigint",
    ],
)
async def test_table_altered_meanwhile(target_db: Database, ddl: str) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, 1), remote.update(1, 2), remote.delete(1, None))
        target_db.execute(ddl)
        await feed.apply(remote.insert(5, 1), remote.insert(6, 4_000_000_000), remote.update(5, 5_000_000_000))
        assert target_db.fetch("SELECT id, v::bigint FROM t ORDER BY id") == [(5, 5_000_000_000), (6, 4_000_000_000)]


async def test_row_level_security_that_appears_meanwhile(target_db: Database) -> None:
    target_db.execute("CREATE ROLE rls_owner LOGIN; CREATE TABLE t (id int PRIMARY KEY, v int); ALTER TABLE t OWNER TO rls_owner")
    try:
        remote = Remote("t", "*id", "v")
        async with opened(target_db) as feed:
            await feed.apply(remote.relation, remote.insert(1, 1), remote.update(1, 2))
            target_db.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
            await feed.apply(remote.update(1, 3))  # the owner is exempt
            target_db.execute("ALTER TABLE t FORCE ROW LEVEL SECURITY")
            error = await refused(feed, remote.update(1, 4))
            assert str(error) == 'user "rls_owner" cannot replicate into relation with row-level security enabled: "t"'
            assert target_db.fetch("SELECT * FROM t") == [(1, 3)]
    finally:
        target_db.execute("DROP TABLE t; DROP ROLE rls_owner")


async def test_changes_are_made_as_the_tables_owner(target_db: Database) -> None:
    target_db.execute("""
        CREATE ROLE owner_a; CREATE ROLE owner_b; GRANT CREATE ON SCHEMA public TO owner_a, owner_b;
        CREATE TABLE a (id int PRIMARY KEY, who text); CREATE TABLE b (id int PRIMARY KEY, who text);
        CREATE TABLE mine (id int PRIMARY KEY, who text);
        CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.who := current_user; RETURN NEW; END $$;
        CREATE TRIGGER who BEFORE INSERT ON a FOR EACH ROW EXECUTE FUNCTION who(); ALTER TABLE a ENABLE ALWAYS TRIGGER who;
        CREATE TRIGGER who BEFORE INSERT ON b FOR EACH ROW EXECUTE FUNCTION who(); ALTER TABLE b ENABLE ALWAYS TRIGGER who;
        CREATE TRIGGER who BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION who(); ALTER TABLE mine ENABLE ALWAYS TRIGGER who;
        ALTER TABLE a OWNER TO owner_a; ALTER TABLE b OWNER TO owner_b
    """)
    me = target_db.value("SELECT current_user::text")
    remotes = [Remote(name, "*id", "who", relation_id=number) for number, name in enumerate(("a", "b", "mine"), 1)]
    changes = [remote.relation for remote in remotes] + [remote.insert(number, None) for number in (1, 2) for remote in remotes]
    query = "SELECT DISTINCT who FROM a UNION SELECT who FROM b UNION SELECT who FROM mine ORDER BY who"
    try:
        async with opened(target_db) as feed:
            await feed.apply(*changes)
            assert target_db.fetch(query) == sorted([("owner_a",), ("owner_b",), (me,)])
            await feed.apply(truncate(remotes[0], remotes[1], remotes[2]))
            assert target_db.fetch(query) == []
        async with opened(target_db, run_as_owner=True) as feed:
            feed.lsn += 0x10000
            await feed.apply(*changes)
            assert target_db.fetch(query) == [(me,)]
    finally:
        target_db.execute("DROP OWNED BY owner_a, owner_b; DROP ROLE owner_a, owner_b")


async def test_role_without_rights(target_db: Database) -> None:
    target_db.execute(f"""
        CREATE ROLE plain LOGIN PASSWORD 'pw'; CREATE ROLE other_owner; GRANT CREATE ON DATABASE {target_db.name} TO plain;
        CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY); ALTER TABLE u OWNER TO other_owner
    """)
    remote, other = Remote("t", "*id"), Remote("u", "*id", relation_id=2)
    feed = Feed(target_db, run_as_owner=True)
    feed.sink = feed.new_sink(target_db.conninfo(user="plain", password="pw"))
    try:
        with pytest.raises(TargetError, match="session_replication_role") as caught:
            await feed.open()
        assert 'GRANT SET ON PARAMETER session_replication_role TO "plain"' in (caught.value.hint or "")
        target_db.execute("GRANT SET ON PARAMETER session_replication_role TO plain")
        await feed.open()
        error = await refused(feed, remote.relation, remote.insert(1))
        assert str(error) == "permission denied for table t"
        assert error.hint
        await feed.opened.close()

        feed = Feed(target_db)
        feed.sink = feed.new_sink(target_db.conninfo(user="plain", password="pw"))
        await feed.open()
        error = await refused(feed, other.relation, other.insert(1))
        assert "other_owner" in str(error)
        assert "run_as_owner" in (error.hint or "")
        target_db.execute("GRANT other_owner TO plain")
        await feed.apply(other.relation, other.insert(1))
        assert target_db.fetch("SELECT id FROM u") == [(1,)]
    finally:
        await feed.opened.close()
        target_db.execute(
            "REASSIGN OWNED BY plain, other_owner TO CURRENT_USER; DROP OWNED BY plain, other_owner; DROP ROLE plain, other_owner"
        )
        target_db.execute("DROP SCHEMA IF EXISTS subscriber CASCADE")


async def test_lost_session(target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1))
        target_db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'sub'")
        target_db.wait("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sub'", 0)
        with caplog.at_level(logging.DEBUG), pytest.raises(TargetUnavailable):
            await feed.apply(remote.insert(2))
        with pytest.raises(TargetUnavailable):
            await feed.apply(remote.insert(2))
        await feed.reopen()
        await feed.apply(remote.relation, remote.insert(2))
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
