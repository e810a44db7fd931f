"""Bad input: one line that names the fault and the remedy, status 1, nothing changed, nothing lost, within seconds.

Each case makes one fault, runs both verbs, repairs it, and then expects that everything is copied and followed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.support.program import slots, subscriber
from tests.support.replication_setup import ReplicationSetup

# many seconds, for a machine that is busy with other tests
SECONDS = 30.0

Repair = Callable[[], object]
Fault = Callable[[ReplicationSetup], Repair | None]

# the faults of a first start, and the message that both check and run give
CASES: dict[str, tuple[str, int, Fault]] = {}


def case(message: str, *, findings: int = 1) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        CASES[fault.__name__.strip("_").replace("_", " ")] = (message, findings, fault)
        return fault

    return register


def arguments(replication: ReplicationSetup, **changed: object) -> None:
    """Make the program's arguments wrong. Nothing has to be fixed then: the other cases show that the right ones work."""
    for name, value in changed.items():
        setattr(replication, name, value)


# --- the command line's own texts


@case('invalid connection string: .*"hots"')
def _unknown_word_in_connection(replication: ReplicationSetup) -> None:
    arguments(replication, connection="hots=db1 dbname=app")


@case("invalid connection string")
def _unreadable_connection(replication: ReplicationSetup) -> None:
    arguments(replication, connection=f"host=127.0.0.1 password='{replication.password}")


@case('invalid connection string of the target: unknown parameter "hots"')
def _unknown_word_in_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=f"postgresql://u:{replication.password}@127.0.0.1/x?hots=db1")


@case("the target is not a connection string or URL of PostgreSQL")
def _unreadable_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=f"somewhere:{replication.password}")


@case('no sink for targets of kind "somedb"')
def _unknown_kind_of_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=f"somedb://u:{replication.password}@127.0.0.1/shop")


@case('unrecognized subscription parameter: "copy_dat"')
def _unknown_parameter(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "copy_dat=true"])


@case("copy_data requires a Boolean value")
def _parameter_with_a_wrong_value(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "copy_data=perhaps"])


@case('unrecognized origin value: "some"')
def _parameter_with_an_unknown_word(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "origin=some"])


@case("connect = false is not allowed for run")
def _parameter_that_leaves_nothing_to_do(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "connect=false"])


@case('"streaming" is given twice')
def _parameter_given_twice(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "streaming=on", "-o", "streaming=off"])


@case('"binary"')
def _parameter_without_a_value(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "binary"])


@case('unrecognized configuration parameter "wal_receiver_timeot"')
def _unknown_setting(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-c", "wal_receiver_timeot=1s"])


@case('invalid value for parameter "wal_receiver_timeout": "1 fortnight"')
def _setting_with_a_wrong_unit(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-c", "wal_receiver_timeout=1 fortnight"])


@case('0 is outside the valid range for parameter "batch_rows"')
def _setting_out_of_range(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-c", "batch_rows=0"])


@case('replication slot name "Not A Name" contains an invalid character')
def _name_that_no_slot_can_have(replication: ReplicationSetup) -> None:
    arguments(replication, name="Not A Name")


@case('could not create spool directory ".*": Not a directory')
def _spool_directory_that_cannot_be_made(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-c", f"spool_directory={__file__}/spool"])


@case('spool directory ".*" is not private')
def _spool_directory_open_to_others(replication: ReplicationSetup) -> Repair:
    directory = Path(tempfile.mkdtemp())
    replication.resources.callback(shutil.rmtree, directory)
    directory.chmod(0o777)
    replication.more = ["-c", f"spool_directory={directory}"]
    return lambda: directory.chmod(0o700)


# --- who and where


@case(r"could not connect to the publisher: .*port 1 failed: Connection refused")
def _publisher_that_does_not_answer(replication: ReplicationSetup) -> None:
    arguments(replication, connection=replication.publisher.conninfo(port="1"))


@case(r"could not connect to the target: .*port 1 failed: Connection refused")
def _target_that_does_not_answer(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=replication.target.conninfo(port="1"))


@case('could not connect to the publisher: .*database "nowhere" does not exist')
def _wrong_database_of_the_publisher(replication: ReplicationSetup) -> None:
    arguments(replication, connection=replication.publisher.server.dsn("nowhere"))


@case('could not connect to the target: .*database "nowhere" does not exist')
def _wrong_database_of_the_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=replication.target.server.dsn("nowhere"))


@case('could not connect to the publisher: .*password authentication failed for user "postgres"')
def _wrong_password_of_the_publisher(replication: ReplicationSetup) -> None:
    arguments(replication, connection=replication.publisher.conninfo(password=replication.password))


@case('could not connect to the target: .*password authentication failed for user "postgres"')
def _wrong_password_of_the_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=replication.target.conninfo(password=replication.password))


@case('could not connect to the publisher: .*"nobody"')
def _wrong_role_of_the_publisher(replication: ReplicationSetup) -> None:
    arguments(replication, connection=replication.publisher.conninfo(user="nobody"))


@case('could not connect to the target: .*"nobody"')
def _wrong_role_of_the_target(replication: ReplicationSetup) -> None:
    arguments(replication, target_url=replication.target.conninfo(user="nobody"))


# --- the publisher


@case(r"permission denied to start WAL sender.*hint: .*REPLICATION")
def _role_without_replication(replication: ReplicationSetup) -> Repair:
    name, replication.connection = replication.role_on(replication.publisher, "NOREPLICATION")
    return lambda: replication.publisher.execute(f"ALTER ROLE {name} REPLICATION; GRANT SELECT ON t TO {name}")


@case(r"permission denied for table public\.t .*hint: GRANT SELECT")
def _role_that_may_not_read_a_table(replication: ReplicationSetup) -> Repair:
    name, replication.connection = replication.role_on(replication.publisher, "REPLICATION")
    return lambda: replication.publisher.execute(f"GRANT SELECT ON t TO {name}")


@case('wal_level is "replica" on the publisher .*hint: .*logical')
def _wal_level_too_low(replication: ReplicationSetup) -> Repair:
    server = replication.move_publisher(wal_level="replica")

    def repair() -> None:
        with replication.restarted(server, replication.publisher):
            replication.publisher.execute("ALTER SYSTEM SET wal_level = logical")

    return repair


@case("none of max_replication_slots = 2 is free")
def _no_slot_left(replication: ReplicationSetup) -> Repair:
    server = replication.move_publisher(max_replication_slots="2")
    replication.publisher.fetch("SELECT pg_create_physical_replication_slot(name) FROM unnest('{one,two}'::text[]) AS name")

    def repair() -> None:
        # one for the subscription, and two for tables that are copied
        with replication.restarted(server, replication.publisher):
            replication.publisher.execute("ALTER SYSTEM SET max_replication_slots = 5")

    return repair


@case("could not connect to the publisher: .*max_wal_senders")
def _no_walsender_left(replication: ReplicationSetup) -> Repair:
    server = replication.move_publisher(max_wal_senders="1")
    holder = psycopg.connect(replication.publisher.conninfo(replication="database"), autocommit=True)
    replication.resources.callback(holder.close)

    def repair() -> None:
        holder.close()
        with replication.restarted(server, replication.publisher):
            replication.publisher.execute("ALTER SYSTEM SET max_wal_senders = 10")

    return repair


@case('publication "later" does not exist on the publisher')
def _unknown_publication(replication: ReplicationSetup) -> Repair:
    replication.publications = ["pub", "later"]
    return lambda: replication.publisher.execute("CREATE PUBLICATION later FOR TABLE t")


@case(r'cannot use different column lists for table "public\.t" in different publications')
def _column_lists_that_differ(replication: ReplicationSetup) -> Repair:
    replication.publisher.execute("CREATE PUBLICATION narrow FOR TABLE t (id)")
    replication.publications = ["pub", "narrow"]
    return lambda: replication.publisher.execute("ALTER PUBLICATION narrow SET TABLE t")


@case('replication slot ".*" already exists on the publisher, but the target has no record of it')
def _slot_of_somebody_else(replication: ReplicationSetup) -> Repair:
    replication.publisher.fetch(f"SELECT pg_create_logical_replication_slot('{replication.name}', 'pgoutput')")
    return lambda: replication.publisher.fetch(f"SELECT pg_drop_replication_slot('{replication.name}')")


@case('replication slot "not_there" does not exist on the publisher')
def _slot_that_is_not_there(replication: ReplicationSetup) -> None:
    arguments(replication, more=["-o", "create_slot=false", "-o", "slot_name=not_there"])


@case('replication slot ".*" belongs to database "postgres"')
def _slot_of_another_database(replication: ReplicationSetup) -> None:
    server, name = replication.publisher.server, f"elsewhere_{replication.publisher.name}"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    replication.resources.callback(lambda: replication.publisher.fetch(f"SELECT pg_drop_replication_slot('{name}')"))
    arguments(replication, more=["-o", "create_slot=false", "-o", f"slot_name={name}"])


# --- the target


@case(r'logical replication target relation "public\.t" does not exist')
def _table_missing(replication: ReplicationSetup) -> Repair:
    replication.target.execute("DROP TABLE t")
    return lambda: replication.target.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")


@case(r'target relation "public\.t" is missing replicated column: "v"')
def _column_missing(replication: ReplicationSetup) -> Repair:
    replication.target.execute("ALTER TABLE t DROP COLUMN v")
    return lambda: replication.target.execute("ALTER TABLE t ADD COLUMN v text")


@case(r'target relation "public\.t" has incompatible generated column: "v"')
def _column_generated(replication: ReplicationSetup) -> Repair:
    replication.target.execute("ALTER TABLE t DROP COLUMN v, ADD COLUMN v text GENERATED ALWAYS AS ('x') STORED")
    return lambda: replication.target.execute("ALTER TABLE t ALTER COLUMN v DROP EXPRESSION")


@case('role "r_.*" may not set session_replication_role in the target', findings=3)
def _target_role_with_no_rights(replication: ReplicationSetup) -> Repair:
    name, replication.target_url = replication.role_on(replication.target, "")

    def repair() -> None:
        replication.target.execute(f"""
            GRANT SET ON PARAMETER session_replication_role TO {name}; GRANT CREATE ON DATABASE {replication.target.name} TO {name};
            ALTER TABLE t OWNER TO {name}
        """)
        replication.resources.callback(replication.target.execute, f"REVOKE SET ON PARAMETER session_replication_role FROM {name}")
        replication.resources.callback(replication.target.execute, "ALTER TABLE t OWNER TO postgres")

    return repair


@case('role "r_.*" may not create schema "subscriber" in the target')
def _target_role_that_may_not_make_the_catalog(replication: ReplicationSetup) -> Repair:
    name, replication.target_url = replication.role_on(replication.target, "SUPERUSER")
    replication.target.execute(f"ALTER ROLE {name} NOSUPERUSER; GRANT SET ON PARAMETER session_replication_role TO {name}")
    replication.resources.callback(replication.target.execute, f"REVOKE SET ON PARAMETER session_replication_role FROM {name}")
    replication.target.execute(f"ALTER TABLE t OWNER TO {name}")
    replication.resources.callback(replication.target.execute, "ALTER TABLE t OWNER TO postgres")
    return lambda: replication.target.execute(f"GRANT CREATE ON DATABASE {replication.target.name} TO {name}")


@pytest.mark.parametrize("name", CASES)
def test_first_start(replication: ReplicationSetup, name: str) -> None:
    message, findings, fault = CASES[name]
    repair = fault(replication)
    before = replication.state()
    done = replication.run()
    replication.assert_error(done, message, findings=findings)
    assert done.seconds < SECONDS
    assert replication.state() == before
    checked = replication.check()
    assert checked.status == 1
    replication.assert_no_secrets(checked)
    assert checked.seconds < SECONDS
    assert replication.state() == before
    if checked.errors:
        assert checked.output == ""
        assert checked.errors == done.errors
    else:
        errors = [line for line in checked.output.splitlines() if line.startswith("error: ")]
        assert all(line.removeprefix("error: ").split(" (hint: ")[0] in done.errors for line in errors)
        assert errors
    if repair is not None:
        repair()
        found = replication.check()
        assert (found.status, found.errors) == (0, "")
        replication.assert_replicates()


def test_check_warns_where_replication_can_work(replication: ReplicationSetup) -> None:
    replication.publisher.execute("CREATE TABLE bare (a int); ALTER PUBLICATION pub ADD TABLE bare")
    replication.target.execute("CREATE TABLE bare (a bigint)")
    done = replication.check()
    assert (done.status, done.errors) == (0, "")
    lines = done.output.splitlines()
    assert all(line.startswith("warning: ") and line.endswith(")") and "(hint: " in line for line in lines)
    for message in (
        "table public.bare has no replica identity",
        "UPDATE and DELETE will fail",
        'column "a" of table "public.bare" is of type integer on the publisher and of type bigint in the target',
    ):
        assert sum(message in line for line in lines) == 1
    done = replication.run("--until-caught-up")
    assert done.status == 0
    # the same warnings, at the first start; only `check` compares keys and indexes
    assert len(done.errors.splitlines()) == sum("the schema of the target differs" not in line for line in lines)
    assert all(" WARNING " in line for line in done.errors.splitlines())


@pytest.mark.parametrize("publish", ["insert", "insert, truncate"])
def test_no_word_of_updates_and_deletes_that_are_not_published(replication: ReplicationSetup, publish: str) -> None:
    for database in (replication.publisher, replication.target):
        database.execute("CREATE TABLE bare (a int)")
    replication.publisher.execute(f"ALTER PUBLICATION pub SET TABLE bare; ALTER PUBLICATION pub SET (publish = '{publish}')")
    done = replication.check()
    assert (done.status, done.output) == (0, "")


def test_two_phase_without_prepared_transactions_in_the_target(replication: ReplicationSetup) -> None:
    """As natively: it is accepted, by create as by alter. check and create warn."""
    replication.move_target(max_prepared_transactions="0")
    replication.more = ["-o", "two_phase=true"]
    done = replication.check()
    assert (done.status, done.errors) == (0, "")
    message = "prepared transactions are disabled in the target: the first one of the publisher stops the subscription"
    assert f"warning: {message} (hint: set max_prepared_transactions" in done.output
    where = ["--connection", replication.connection, "--publication", "pub", "--target", replication.target.dsn]
    done = subscriber("create", replication.name, *where, *replication.more)
    assert done.status == 0
    assert message in done.errors
    assert slots(replication.publisher) == [replication.name]


def test_check_finds_several_things_at_once(replication: ReplicationSetup) -> None:
    replication.target.execute("DROP TABLE t")
    replication.publications = ["pub", "nope"]
    done = replication.check()
    assert (done.status, done.errors) == (1, "")
    assert [line.split(" (hint")[0] for line in done.output.splitlines()] == [
        'error: publication "nope" does not exist on the publisher',
        'error: logical replication target relation "public.t" does not exist',
    ]
    done = replication.run()
    assert (done.status, done.output) == (1, "")
    first, second = done.errors.splitlines()
    assert first.startswith('subscriber: publication "nope" does not exist on the publisher (hint: CREATE PUBLICATION')
    assert second.startswith('subscriber: logical replication target relation "public.t" does not exist (hint: create the table')
