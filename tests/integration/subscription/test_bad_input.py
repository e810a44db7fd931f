"""Bad input: one line that names the thing and the remedy, status 1, nothing changed, nothing lost, within seconds.

Each case spoils one thing, tries both verbs, mends it, and sees that everything is copied and followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.testing.server import EmbeddedServer
from tests.support.bad_input import ALL, SECRET, Ground
from tests.support.database import Database, fresh_database
from tests.support.program import position, running, slots, subscriber
from tests.support.streams import streaming

# many seconds, for a machine that is busy with other tests
SECONDS = 30.0

Mend = Callable[[], object]
Spoil = Callable[[Ground], Mend | None]

# what spoils a first start, and what is said: by check as well as by run
CASES: dict[str, tuple[str, int, Spoil]] = {}


def case(said: str, *, findings: int = 1) -> Callable[[Spoil], Spoil]:
    def note(spoil: Spoil) -> Spoil:
        CASES[spoil.__name__.strip("_").replace("_", " ")] = (said, findings, spoil)
        return spoil

    return note


@pytest.fixture
def ground(publisher18_db: Database, target_db: Database, make_server: Callable[..., EmbeddedServer]) -> Iterator[Ground]:
    with contextlib.ExitStack() as resources:
        yield Ground(publisher18_db, target_db, make_server, resources)


def arguments(ground: Ground, **changed: object) -> None:
    """Spoil what the program is called with. Nothing is to be mended then: that the right ones work is what the other cases show."""
    for name, value in changed.items():
        setattr(ground, name, value)


# --- the command line's own texts


@case('invalid connection string: .*"hots"')
def _unknown_word_in_connection(ground: Ground) -> None:
    arguments(ground, connection="hots=db1 dbname=app")


@case("invalid connection string")
def _unreadable_connection(ground: Ground) -> None:
    arguments(ground, connection=f"host=127.0.0.1 password='{ground.password}")


@case('the target\'s connection string has an unknown parameter "hots"')
def _unknown_word_in_target(ground: Ground) -> None:
    arguments(ground, connect_to=f"postgresql://u:{ground.password}@127.0.0.1/x?hots=db1")


@case("the target is not a connection string or URL of PostgreSQL")
def _unreadable_target(ground: Ground) -> None:
    arguments(ground, connect_to=f"somewhere:{ground.password}")


@case('no sink for targets of kind "somedb"')
def _unknown_kind_of_target(ground: Ground) -> None:
    arguments(ground, connect_to=f"somedb://u:{ground.password}@127.0.0.1/shop")


@case('unrecognized subscription parameter: "copy_dat"')
def _unknown_parameter(ground: Ground) -> None:
    arguments(ground, more=["-o", "copy_dat=true"])


@case("copy_data requires a Boolean value")
def _parameter_with_a_wrong_value(ground: Ground) -> None:
    arguments(ground, more=["-o", "copy_data=perhaps"])


@case('unrecognized origin value: "some"')
def _parameter_with_an_unknown_word(ground: Ground) -> None:
    arguments(ground, more=["-o", "origin=some"])


@case("connect = false is not allowed for run")
def _parameter_that_leaves_nothing_to_do(ground: Ground) -> None:
    arguments(ground, more=["-o", "connect=false"])


@case('"streaming" is given twice')
def _parameter_given_twice(ground: Ground) -> None:
    arguments(ground, more=["-o", "streaming=on", "-o", "streaming=off"])


@case('"binary"')
def _parameter_without_a_value(ground: Ground) -> None:
    arguments(ground, more=["-o", "binary"])


@case('unrecognized configuration parameter "wal_receiver_timeot"')
def _unknown_setting(ground: Ground) -> None:
    arguments(ground, more=["-c", "wal_receiver_timeot=1s"])


@case('invalid value for parameter "wal_receiver_timeout": "1 fortnight"')
def _setting_with_a_wrong_unit(ground: Ground) -> None:
    arguments(ground, more=["-c", "wal_receiver_timeout=1 fortnight"])


@case('0 is outside the valid range for parameter "batch_rows"')
def _setting_out_of_range(ground: Ground) -> None:
    arguments(ground, more=["-c", "batch_rows=0"])


@case('replication slot name "Not A Name" contains an invalid character')
def _name_that_no_slot_can_have(ground: Ground) -> None:
    arguments(ground, name="Not A Name")


@case('could not create spool directory ".*": Not a directory')
def _spool_directory_that_cannot_be_made(ground: Ground) -> None:
    arguments(ground, more=["-c", f"spool_directory={__file__}/spool"])


@case('spool directory ".*" is not private')
def _spool_directory_open_to_others(ground: Ground) -> Mend:
    directory = Path(tempfile.mkdtemp())
    ground.resources.callback(shutil.rmtree, directory)
    directory.chmod(0o777)
    ground.more = ["-c", f"spool_directory={directory}"]
    return lambda: directory.chmod(0o700)


# --- who and where


@case(r"could not connect to the publisher: .*port 1 failed: Connection refused")
def _publisher_that_does_not_answer(ground: Ground) -> None:
    arguments(ground, connection=ground.publisher.conninfo(port="1"))


@case(r"target cannot be reached: .*port 1 failed: Connection refused")
def _target_that_does_not_answer(ground: Ground) -> None:
    arguments(ground, connect_to=ground.target.conninfo(port="1"))


@case('could not connect to the publisher: .*database "nowhere" does not exist')
def _wrong_database_of_the_publisher(ground: Ground) -> None:
    arguments(ground, connection=ground.publisher.server.dsn("nowhere"))


@case('target refuses the connection: .*database "nowhere" does not exist')
def _wrong_database_of_the_target(ground: Ground) -> None:
    arguments(ground, connect_to=ground.target.server.dsn("nowhere"))


@case('could not connect to the publisher: .*password authentication failed for user "postgres"')
def _wrong_password_of_the_publisher(ground: Ground) -> None:
    arguments(ground, connection=ground.publisher.conninfo(password=ground.password))


@case('target refuses the connection: .*password authentication failed for user "postgres"')
def _wrong_password_of_the_target(ground: Ground) -> None:
    arguments(ground, connect_to=ground.target.conninfo(password=ground.password))


@case('could not connect to the publisher: .*"nobody"')
def _wrong_role_of_the_publisher(ground: Ground) -> None:
    arguments(ground, connection=ground.publisher.conninfo(user="nobody"))


@case('target refuses the connection: .*"nobody"')
def _wrong_role_of_the_target(ground: Ground) -> None:
    arguments(ground, connect_to=ground.target.conninfo(user="nobody"))


# --- the publisher


@case(r"permission denied to start WAL sender.*hint: .*REPLICATION")
def _role_without_replication(ground: Ground) -> Mend:
    name, ground.connection = ground.role_on(ground.publisher, "NOREPLICATION")
    return lambda: ground.publisher.execute(f"ALTER ROLE {name} REPLICATION; GRANT SELECT ON t TO {name}")


@case(r"permission denied for table public\.t .*hint: GRANT SELECT")
def _role_that_may_not_read_a_table(ground: Ground) -> Mend:
    name, ground.connection = ground.role_on(ground.publisher, "REPLICATION")
    return lambda: ground.publisher.execute(f"GRANT SELECT ON t TO {name}")


@case('wal_level is "replica" on the publisher .*hint: .*logical')
def _wal_level_too_low(ground: Ground) -> Mend:
    server = ground.move_publisher(wal_level="replica")

    def mend() -> None:
        with ground.restarted(server, ground.publisher):
            ground.publisher.execute("ALTER SYSTEM SET wal_level = logical")

    return mend


@case("all 2 of max_replication_slots are in use")
def _no_slot_left(ground: Ground) -> Mend:
    server = ground.move_publisher(max_replication_slots="2")
    ground.publisher.fetch("SELECT pg_create_physical_replication_slot(name) FROM unnest('{one,two}'::text[]) AS name")

    def mend() -> None:
        # one for the subscription, and two for tables that are copied
        with ground.restarted(server, ground.publisher):
            ground.publisher.execute("ALTER SYSTEM SET max_replication_slots = 5")

    return mend


@case("could not connect to the publisher: .*max_wal_senders")
def _no_walsender_left(ground: Ground) -> Mend:
    server = ground.move_publisher(max_wal_senders="1")
    holder = psycopg.connect(ground.publisher.conninfo(replication="database"), autocommit=True)
    ground.resources.callback(holder.close)

    def mend() -> None:
        holder.close()
        with ground.restarted(server, ground.publisher):
            ground.publisher.execute("ALTER SYSTEM SET max_wal_senders = 10")

    return mend


@case('publication "later" does not exist on the publisher')
def _unknown_publication(ground: Ground) -> Mend:
    ground.publications = ["pub", "later"]
    return lambda: ground.publisher.execute("CREATE PUBLICATION later FOR TABLE t")


@case(r'cannot use different column lists for table "public\.t" in different publications')
def _column_lists_that_differ(ground: Ground) -> Mend:
    ground.publisher.execute("CREATE PUBLICATION narrow FOR TABLE t (id)")
    ground.publications = ["pub", "narrow"]
    return lambda: ground.publisher.execute("ALTER PUBLICATION narrow SET TABLE t")


@case('replication slot ".*" already exists on the publisher, but the target has no record of it')
def _slot_of_somebody_else(ground: Ground) -> Mend:
    ground.publisher.fetch(f"SELECT pg_create_logical_replication_slot('{ground.name}', 'pgoutput')")
    return lambda: ground.publisher.fetch(f"SELECT pg_drop_replication_slot('{ground.name}')")


@case('replication slot "not_there" does not exist on the publisher')
def _slot_that_is_not_there(ground: Ground) -> None:
    arguments(ground, more=["-o", "create_slot=false", "-o", "slot_name=not_there"])


@case('replication slot ".*" belongs to database "postgres"')
def _slot_of_another_database(ground: Ground) -> None:
    server, name = ground.publisher.server, f"elsewhere_{ground.publisher.name}"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    ground.resources.callback(lambda: ground.publisher.fetch(f"SELECT pg_drop_replication_slot('{name}')"))
    arguments(ground, more=["-o", "create_slot=false", "-o", f"slot_name={name}"])


# --- the target


@case(r'logical replication target relation "public\.t" does not exist')
def _table_missing(ground: Ground) -> Mend:
    ground.target.execute("DROP TABLE t")
    return lambda: ground.target.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")


@case(r'target relation "public\.t" is missing replicated column: "v"')
def _column_missing(ground: Ground) -> Mend:
    ground.target.execute("ALTER TABLE t DROP COLUMN v")
    return lambda: ground.target.execute("ALTER TABLE t ADD COLUMN v text")


@case(r'target relation "public\.t" has incompatible generated column: "v"')
def _column_generated(ground: Ground) -> Mend:
    ground.target.execute("ALTER TABLE t DROP COLUMN v, ADD COLUMN v text GENERATED ALWAYS AS ('x') STORED")
    return lambda: ground.target.execute("ALTER TABLE t ALTER COLUMN v DROP EXPRESSION")


@case('role "r_.*" may not set session_replication_role in the target', findings=3)
def _target_role_with_no_rights(ground: Ground) -> Mend:
    name, ground.connect_to = ground.role_on(ground.target, "")

    def mend() -> None:
        ground.target.execute(f"""
            GRANT SET ON PARAMETER session_replication_role TO {name}; GRANT CREATE ON DATABASE {ground.target.name} TO {name};
            ALTER TABLE t OWNER TO {name}
        """)
        ground.resources.callback(ground.target.execute, f"REVOKE SET ON PARAMETER session_replication_role FROM {name}")
        ground.resources.callback(ground.target.execute, "ALTER TABLE t OWNER TO postgres")

    return mend


@case('role "r_.*" may not create schema "subscriber" in the target')
def _target_role_that_may_not_make_the_catalog(ground: Ground) -> Mend:
    name, ground.connect_to = ground.role_on(ground.target, "SUPERUSER")
    ground.target.execute(f"ALTER ROLE {name} NOSUPERUSER; GRANT SET ON PARAMETER session_replication_role TO {name}")
    ground.resources.callback(ground.target.execute, f"REVOKE SET ON PARAMETER session_replication_role FROM {name}")
    ground.target.execute(f"ALTER TABLE t OWNER TO {name}")
    ground.resources.callback(ground.target.execute, "ALTER TABLE t OWNER TO postgres")
    return lambda: ground.target.execute(f"GRANT CREATE ON DATABASE {ground.target.name} TO {name}")


@case("the target's sessions are read-only")
def _read_only_target(ground: Ground) -> Mend:
    ground.target.execute(f"ALTER DATABASE {ground.target.name} SET default_transaction_read_only = on")
    return lambda: ground.target.execute(f"SET default_transaction_read_only = off; ALTER DATABASE {ground.target.name} RESET ALL")


@pytest.mark.parametrize("name", CASES)
def test_first_start(ground: Ground, name: str) -> None:
    said, findings, spoil = CASES[name]
    mend = spoil(ground)
    before = ground.state()
    done = ground.run()
    ground.told(done, said, findings=findings)
    assert done.seconds < SECONDS
    assert ground.state() == before
    foretold = ground.check()
    assert foretold.status == 1
    ground.keeps_quiet(foretold)
    assert foretold.seconds < SECONDS
    assert ground.state() == before
    if foretold.errors:
        assert foretold.output == ""
        assert foretold.errors == done.errors
    else:
        errors = [line for line in foretold.output.splitlines() if line.startswith("error: ")]
        assert all(line.removeprefix("error: ").split(" (hint: ")[0] in done.errors for line in errors)
        assert errors
    if mend is not None:
        mend()
        found = ground.check()
        assert (found.status, found.errors) == (0, "")
        ground.goes_on()


def test_check_warns_where_it_can_go_on(ground: Ground) -> None:
    ground.publisher.execute("CREATE TABLE bare (a int); ALTER PUBLICATION pub ADD TABLE bare")
    ground.target.execute("CREATE TABLE bare (a bigint)")
    done = ground.check()
    assert (done.status, done.errors) == (0, "")
    lines = done.output.splitlines()
    assert all(line.startswith("warning: ") and line.endswith(")") and "(hint: " in line for line in lines)
    for said in (
        "table public.bare has no replica identity",
        "UPDATE and DELETE will fail",
        'column "a" of table "public.bare" is of type integer on the publisher and of type bigint in the target',
    ):
        assert sum(said in line for line in lines) == 1
    done = ground.run("--until-caught-up")
    assert done.status == 0
    # the same warnings, at the first start
    assert len(done.errors.splitlines()) == len(lines)
    assert all(" WARNING " in line for line in done.errors.splitlines())


@pytest.mark.parametrize("publish", ["insert", "insert, truncate"])
def test_no_word_of_updates_and_deletes_that_are_not_published(ground: Ground, publish: str) -> None:
    for database in (ground.publisher, ground.target):
        database.execute("CREATE TABLE bare (a int)")
    ground.publisher.execute(f"ALTER PUBLICATION pub SET TABLE bare; ALTER PUBLICATION pub SET (publish = '{publish}')")
    done = ground.check()
    assert (done.status, done.output) == (0, "")


def test_two_phase_without_prepared_transactions_in_the_target(ground: Ground) -> None:
    """As natively: it is accepted, by create as by alter. check and create warn."""
    ground.move_target(max_prepared_transactions="0")
    ground.more = ["-o", "two_phase=true"]
    done = ground.check()
    assert (done.status, done.errors) == (0, "")
    said = "prepared transactions are disabled in the target: the first one of the publisher stops the subscription"
    assert f"warning: {said} (hint: set max_prepared_transactions" in done.output
    where = ["--connection", ground.connection, "--publication", "pub", "--target", ground.target.dsn]
    done = subscriber("create", ground.name, *where, *ground.more)
    assert done.status == 0
    assert said in done.errors
    assert slots(ground.publisher) == [ground.name]


def test_check_finds_several_things_at_once(ground: Ground) -> None:
    ground.target.execute("DROP TABLE t")
    ground.publications = ["pub", "nope"]
    done = ground.check()
    assert (done.status, done.errors) == (1, "")
    assert [line.split(" (hint")[0] for line in done.output.splitlines()] == [
        'error: publication "nope" does not exist on the publisher',
        'error: logical replication target relation "public.t" does not exist',
    ]
    done = ground.run()
    assert (done.status, done.output) == (1, "")
    first, second = done.errors.splitlines()
    assert first.startswith('subscriber: publication "nope" does not exist on the publisher (hint: CREATE PUBLICATION')
    assert second.startswith('subscriber: logical replication target relation "public.t" does not exist (hint: create the table')


# --- a subscription that is there already


async def test_slot_in_use(ground: Ground) -> None:
    ground.goes_on()
    # a walsender that is told nothing, so that the slot stays where it is
    async with streaming(ground.publisher, ground.name, "pub"):
        before = ground.state()
        done = await asyncio.to_thread(ground.run)
    # it waits for ten seconds: the walsender of a process that was killed takes a moment to notice
    assert 9 < done.seconds < SECONDS
    *earlier, last = done.errors.splitlines()
    assert (done.status, done.output) == (1, "")
    assert last.startswith(f'subscriber: replication slot "{ground.name}" is active for PID ')
    assert "(hint: " in last
    assert any("is active for PID" in line and "this has lasted for" in line for line in earlier)
    ground.keeps_quiet(done)
    assert ground.state() == before
    ground.goes_on()


def test_slot_lost(ground: Ground) -> None:
    ground.goes_on()
    ground.publisher.fetch(f"SELECT pg_drop_replication_slot('{ground.name}')")
    before = ground.state()
    done = ground.run()
    ground.told(done, f'replication slot "{ground.name}" does not exist on the publisher any more: changes after .* are lost')
    assert done.seconds < SECONDS
    assert ground.state() == before
    # the remedy that it names
    ground.target.execute("TRUNCATE t")
    ground.name += "_2"
    ground.goes_on()


def test_slot_ahead_of_us(ground: Ground) -> None:
    ground.goes_on()
    ground.publisher.execute("DELETE FROM t WHERE id = 1")
    ground.publisher.fetch(f"SELECT pg_replication_slot_advance('{ground.name}', pg_current_wal_flush_lsn())")
    before = ground.state()
    done = ground.run()
    ground.told(done, f'replication slot "{ground.name}" was advanced to .*, past our position .* are lost')
    assert done.seconds < SECONDS
    assert ground.state() == before
    ground.target.execute("TRUNCATE t")
    ground.name += "_2"
    ground.goes_on()


def test_slot_invalidated(ground: Ground) -> None:
    ground.move_publisher(max_slot_wal_keep_size="1MB")
    ground.goes_on()
    while ground.publisher.value(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{ground.name}'") != "lost":
        ground.publisher.execute("SELECT pg_switch_wal()")
        ground.publisher.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)); CHECKPOINT")
    before = ground.state()
    ground.told(ground.run(), f'replication slot "{ground.name}" was invalidated .*: changes after .* are lost')
    assert ground.state() == before
    found = ground.check()
    assert (found.status, found.errors) == (1, "")
    assert f'error: replication slot "{ground.name}" was invalidated' in found.output
    ground.target.execute("TRUNCATE t")
    ground.name += "_2"
    ground.goes_on()


def test_another_publisher(ground: Ground) -> None:
    ground.goes_on()
    other = ground.resources.enter_context(fresh_database(ground.target.server, "other"))
    other.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    before = ground.state()
    ground.connection = other.dsn
    done = ground.run()
    ground.told(done, r"the publisher's system identifier is \d+, but the target was filled from \d+")
    assert done.seconds < SECONDS
    assert ground.state() == before
    assert slots(other) == []
    ground.mend_arguments()
    ground.goes_on()


def test_another_slot_name(ground: Ground) -> None:
    ground.goes_on()
    before = ground.state()
    ground.more = ["-o", "slot_name=another"]
    ground.told(ground.run(), f'uses replication slot "{ground.name}", not "another"')
    assert ground.state() == before
    ground.mend_arguments()
    ground.goes_on()


def test_values_that_the_target_s_type_refuses_when_copied(ground: Ground) -> None:
    ground.target.execute("ALTER TABLE t ALTER v TYPE int USING 0")
    done = ground.run("--until-caught-up")
    line = ground.told(done, r"public\.t")
    assert '"v"' in line
    assert "invalid text representation" in line
    assert done.seconds < SECONDS
    assert ground.target.value("SELECT count(*) FROM t") == 0
    assert any('"v"' in text and "integer" in text for text in done.errors.splitlines() if " WARNING " in text)
    ground.target.execute("ALTER TABLE t ALTER v TYPE text")
    ground.goes_on()
    assert slots(ground.publisher) == [ground.name]


@pytest.mark.parametrize(
    ("spoil", "said", "mend"),
    [
        ("ALTER TABLE t ALTER v TYPE int USING 0", 'column "v"', "ALTER TABLE t ALTER v TYPE text"),
        ("ALTER TABLE t DROP v", 'is missing replicated column: "v"', "ALTER TABLE t ADD v text"),
        (
            "ALTER TABLE t ADD CHECK (id < 0) NOT VALID",
            'violates check constraint "t_id_check"',
            "ALTER TABLE t DROP CONSTRAINT t_id_check",
        ),
        (
            "INSERT INTO t VALUES (102, 'stray')",
            'duplicate key value violates unique constraint "t_pkey"',
            "DELETE FROM t WHERE v = 'stray'",
        ),
    ],
)
def test_changes_that_the_target_refuses(ground: Ground, spoil: str, said: str, mend: str) -> None:
    ground.goes_on()
    ground.target.execute(spoil)
    ground.publisher.execute(f"INSERT INTO t VALUES (102, '{SECRET}')")
    before, end = ground.state(), ground.publisher.current_lsn()
    states = "SELECT srrelid, srsubstate::text FROM subscriber.pg_subscription_rel"
    start, tables = Lsn.parse(position(ground.target, ground.name)), ground.target.fetch(states)
    done = ground.run("--until-caught-up")
    line = ground.told(done, said)
    assert "public.t" in line
    assert done.seconds < SECONDS
    # as idle does, the position may move between BEGIN and COMMIT of what failed, and a table become ready
    idle = {'"position"', "pg_subscription_rel"}
    assert {name: rows for name, rows in ground.state().items() if name not in idle} == {
        name: rows for name, rows in before.items() if name not in idle
    }
    assert start <= Lsn.parse(position(ground.target, ground.name)) < end
    assert ground.target.fetch(states) in (tables, [(*table[:-1], "r") for table in tables])
    # one that is to go on says so, and goes on once it is mended
    ground.more = ["-c", "wal_retrieve_retry_interval=200ms"]
    with running("run", *ground.arguments()) as program:
        program.says("next attempt in", 2)
        ground.target.execute(mend)
        if "DROP v" in spoil or "TYPE int" in spoil:
            ground.target.execute(f"UPDATE t SET v = '{SECRET}'")
        ground.target.wait(ALL, ground.publisher.fetch(ALL))
        program.send(signal.SIGTERM)
        ended = program.ended()
    assert ended.status == 0
    ground.keeps_quiet(ended)
    assert all(" ERROR " in text for text in ended.errors.splitlines())
    ground.goes_on()


# --- wrong usage


VERBS = {
    "run": ("--connection", "--publication", "--target", "--name", "-o", "-c", "--until-caught-up", "--until-lsn"),
    "check": ("--connection", "--publication", "--target", "--name", "-o", "-c"),
    "tail": ("--connection", "--publication", "--slot", "--format", "--messages", "--until-caught-up", "--until-lsn", "-o", "-c"),
    "decode": ("FILE", "--input"),
    "demo": ("--target", "--rows", "--seconds"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str) -> None:
    done = subscriber(verb, "--help")
    assert (done.status, done.errors) == (0, "")
    assert all(word in done.output for word in (*VERBS[verb], "--verbose"))
    assert verb in subscriber("--help").output


def test_version() -> None:
    from subscriber import __version__

    done = subscriber("--version")
    assert (done.status, done.output, done.errors) == (0, f"subscriber {__version__}\n", "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "the following arguments are required: verb"),
        (("walk",), "invalid choice: 'walk'"),
        (("run",), "the following arguments are required: --target"),
        (("run", "--connection=x", "--target=postgresql:///x"), "--connection and --publication belong together"),
        (("check", "--connection=x", "--publication=p"), "the following arguments are required: --target"),
        (("run", "--connection=x", "--publication=p", "--target=x", "--until-lsn=12"), 'invalid input syntax for type pg_lsn: "12"'),
        (("run", "--connection=x", "--publication=p", "--target=x", "--until-lsn=0/1", "--until-caught-up"), "not allowed with argument"),
        (("run", "--connection=x", "--publication=p", "--target=x", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("tail", "--connection=x", "--publication=p", "--format=xml"), "invalid choice: 'xml'"),
        (("decode",), "the following arguments are required"),
        (("demo", "--rows=1"), "--rows"),
    ],
)
def test_wrong_usage(given: tuple[str, ...], said: str) -> None:
    done = subscriber(*given)
    assert (done.status, done.output) == (2, "")
    assert done.errors.startswith("usage: subscriber")
    assert said in done.errors
    assert "Traceback" not in done.errors
