"""Connecting as libpq can, the settings of our sessions, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber.errors import ConfigurationError, PublisherError, PublisherUnavailable
from subscriber.protocol import commands
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.session.target import Target
from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.session import Session, check_conninfo
from tests.support.cancellation import cancelled_at
from tests.support.database import Database
from tests.support.roles import role

MakeServer = Callable[..., EmbeddedServer]


async def connect(conninfo: str, name: str = "test") -> WalReceiverConnection:
    return await WalReceiverConnection.connect(conninfo, application_name=name)


async def fails(conninfo: str) -> PublisherError:
    with pytest.raises(PublisherError) as caught:
        await connect(conninfo)
    return caught.value


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.matrix
async def test_identify_system(publisher_db: Database) -> None:
    connection = await connect(publisher_db.dsn)
    try:
        identity = await connection.identify_system()
        assert identity.system_identifier == str(publisher_db.value("SELECT system_identifier FROM pg_control_system()"))
        assert identity.timeline == publisher_db.value("SELECT timeline_id FROM pg_control_checkpoint()")
        assert identity.dbname == publisher_db.name
        assert Lsn(1) < identity.xlogpos <= publisher_db.current_lsn()
        before = publisher_db.current_lsn()
        publisher_db.execute("CREATE TABLE t ()")
        now = await connection.current_wal_lsn()
        assert before <= now <= Lsn.parse(publisher_db.value("SELECT pg_current_wal_insert_lsn()::text"))
        assert connection.server_version // 10000 == publisher_db.version
        assert connection.capabilities.server_version == connection.server_version
        assert await connection.show("wal_level") == "logical"
    finally:
        await connection.close()


async def test_a_session_that_is_no_walsender_was_made_by_a_pooler(publisher18_db: Database) -> None:
    """A pooler that drops the parameter replication gives an ordinary session, which takes each command for SQL."""
    session = await Session.connect(publisher18_db.dsn, application_name="test")
    drop = commands.drop_replication_slot("s", wait=False)
    for command in (
        commands.identify_system(),
        commands.timeline_history(2),
        commands.create_replication_slot(session.capabilities, "s"),
        drop,
    ):
        with pytest.raises(PublisherError) as raised:
            await session.execute(command)
        assert "connection pooler" in (raised.value.hint or ""), command
    await session.close()


async def test_conninfo_and_url_are_the_same(publisher18_db: Database) -> None:
    for conninfo in (publisher18_db.dsn, publisher18_db.conninfo()):
        connection = await connect(conninfo)
        assert await connection.execute("SELECT current_database()") == [(publisher18_db.name,)]
        await connection.close()


@pytest.mark.parametrize("replication", [True, False])
@pytest.mark.matrix
async def test_session_settings(publisher_db: Database, replication: bool) -> None:
    options = "-c datestyle=German -c search_path=public -c extra_float_digits=0 -c statement_timeout=9s -c work_mem=1234kB"
    session = await Session.connect(publisher_db.conninfo(options=options), application_name="x", replication=replication)
    try:
        expected = {
            "datestyle": "ISO, YMD",
            "intervalstyle": "postgres",
            "extra_float_digits": "3",
            "search_path": "",
            "statement_timeout": "0",
            "idle_in_transaction_session_timeout": "0",
        }
        assert {name: (await session.execute(f"SHOW {name}"))[0][0] for name in expected} == expected
        assert await session.execute("SHOW work_mem") == [("1234kB",)]
        assert await session.execute("SHOW client_encoding") == [("UTF8",)]
        assert await session.execute("SELECT 'né'::text, NULL, 1.5::float8") == [("né", None, "1.5")]
    finally:
        await session.close()


async def test_application_name_has_a_default(publisher18_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async def shown(conninfo: str) -> str | None:
        connection = await connect(conninfo, "my subscription")
        ((name,),) = await connection.execute("SHOW application_name")
        await connection.close()
        return name

    assert await shown(publisher18_db.conninfo()) == "my subscription"
    assert await shown(publisher18_db.conninfo(application_name="theirs")) == "theirs"
    monkeypatch.setenv("PGAPPNAME", "from the environment")
    assert await shown(publisher18_db.conninfo()) == "from the environment"


async def test_service_file_and_passfile(publisher18_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = conninfo_to_dict(publisher18_db.conninfo())
    service_file, passfile = tmp_path / "services", tmp_path / "pass"
    service_file.write_text(f"[pub]\nhost={parts['host']}\nport={parts['port']}\nuser={parts['user']}\noptions=-c work_mem=2345kB\n")
    passfile.write_text(f"*:*:*:*:{parts['password']}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGSERVICEFILE", str(service_file))
    connection = await connect(f"service=pub dbname={publisher18_db.name} passfile={passfile}")
    assert await connection.execute("SHOW work_mem") == [("2345kB",)]
    await connection.close()
    with pytest.raises(PublisherError, match='"nowhere" not found'):
        await connect("service=nowhere")


async def test_several_hosts(publisher18_db: Database) -> None:
    parts = conninfo_to_dict(publisher18_db.conninfo())
    hosts = {"host": f"127.0.0.1,{parts['host']}", "port": f"{unused_port()},{parts['port']}"}
    connection = await connect(publisher18_db.conninfo(**hosts, target_session_attrs="read-write"))
    assert await connection.execute("SELECT inet_server_port()::text") == [(str(parts["port"]),)]
    await connection.close()


async def test_refused_connection_is_retried() -> None:
    error = await fails(f"host=127.0.0.1 port={unused_port()} dbname=x user=x")
    assert isinstance(error, PublisherUnavailable)
    assert "refused" in str(error)
    assert error.hint


async def test_unknown_host_is_retried() -> None:
    assert isinstance(await fails("host=no-such-host.invalid dbname=x"), PublisherUnavailable)


async def test_wrong_password_names_user_and_hides_the_password(publisher18_db: Database) -> None:
    error = await fails(publisher18_db.conninfo(password="hush-hush-hush"))
    assert not isinstance(error, PublisherUnavailable)
    assert error.sqlstate == "28P01"
    assert 'user "postgres"' in str(error)
    assert "hush" not in error.one_line() + repr(error.__cause__)


async def test_unknown_database(publisher18_db: Database) -> None:
    error = await fails(publisher18_db.server.dsn("no_such_database"))
    assert not isinstance(error, PublisherUnavailable)
    assert error.sqlstate == "3D000"
    assert 'database "no_such_database" does not exist' in str(error)


@pytest.mark.matrix
async def test_role_without_replication(publisher_db: Database) -> None:
    with role(publisher_db) as plain:
        error = await fails(plain.conninfo)
    assert not isinstance(error, PublisherUnavailable)
    assert error.sqlstate == "42501"
    assert "REPLICATION" in str(error.hint)


async def test_too_many_walsenders(make_server: MakeServer) -> None:
    server = make_server(18, max_wal_senders="1")
    first = await connect(server.dsn())
    error = await fails(server.dsn())
    assert isinstance(error, PublisherUnavailable)
    assert "max_wal_senders" in str(error.hint)
    await first.close()


@pytest.mark.parametrize(
    "conninfo",
    [
        "password=hush hush2",
        "host=x password='hush",
        "host=x password=hush hush=1",
        "postgresql://user:hu%shush@host/db",
        "postgresql://user:hush@hush@host/db",
        "postgresql://user:hush@host:hush/db",
        "postgresql://user:hush@[host/db",
    ],
)
async def test_unreadable_conninfo_never_shows_the_password(conninfo: str) -> None:
    with pytest.raises((ConfigurationError, PublisherError)) as caught:
        await connect(conninfo)
    shown = caught.value
    while shown is not None:
        text = shown.one_line() if isinstance(shown, ConfigurationError | PublisherError) else str(shown)
        assert "hush" not in text
        assert "\n" not in text
        shown = None if shown.__suppress_context__ and shown.__cause__ is None else (shown.__cause__ or shown.__context__)  # type: ignore[assignment]


@pytest.mark.parametrize("conninfo", ["host=db1..example.com", f"host={'a' * 64}", "host=db1 dbname=\udcff", "postgresql://u:%ff@db1/x"])
async def test_invalid_utf8_is_a_configuration_error(conninfo: str) -> None:
    """It was an exception of Python's, which ended the launcher with all subscriptions, and left status --json without JSON."""
    with pytest.raises(ConfigurationError, match=r"^invalid connection string: "):
        check_conninfo(conninfo)
    with pytest.raises(ConfigurationError, match=r"^invalid connection string: "):
        await connect(conninfo)
    with pytest.raises(ConfigurationError, match=r"^invalid connection string of the target: "):
        await Target(conninfo).connect("test")


async def test_host_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db1..example.com")
    with pytest.raises(ConfigurationError, match="a host name is not valid"):
        await connect("dbname=x")


async def test_unknown_connection_option_is_named() -> None:
    with pytest.raises(ConfigurationError, match='invalid connection option "hots"'):
        await connect("hots=db1 dbname=x")


async def test_sql_error_keeps_its_sqlstate_and_the_session(publisher18_db: Database) -> None:
    connection = await connect(publisher18_db.dsn)
    with pytest.raises(PublisherError, match="does not exist") as caught:
        await connection.execute("SELECT * FROM nothing_here")
    assert caught.value.sqlstate == "42P01"
    assert await connection.execute("SELECT 1") == [("1",)]
    await connection.close()


async def test_killed_backend_is_publisher_unavailable(publisher_db: Database) -> None:
    connection = await connect(publisher_db.dsn)
    ((pid,),) = await connection.execute("SELECT pg_backend_pid()")
    publisher_db.execute(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(PublisherUnavailable):
        await connection.execute("SELECT 1")
    await connection.close()


async def test_cancelled_query_is_cancelled_on_the_server(publisher18_db: Database) -> None:
    connection = await connect(publisher18_db.dsn, "to be cancelled")
    running = asyncio.create_task(connection.execute("SELECT pg_sleep(60)"))
    active = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'to be cancelled' AND wait_event = 'PgSleep'"
    await asyncio.to_thread(publisher18_db.wait, active, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(publisher18_db.wait, active, 0)
    await connection.close()


async def test_cancelled_attempt_leaves_no_session(publisher18_db: Database) -> None:
    """The bug was that it stayed open as long as the cancelled task was kept, whose traceback refers to it."""
    errors: list[asyncio.CancelledError] = []

    async def attempt() -> None:
        try:
            await (await connect(publisher18_db.conninfo())).close()
        except asyncio.CancelledError as error:
            errors.append(error)
            raise

    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    for step in itertools.count():
        cancelled = await cancelled_at(attempt(), step)
        await asyncio.to_thread(publisher18_db.wait, sessions, 0)
        if not cancelled:
            break
    assert errors


async def test_timeline_history_after_a_promotion(make_server: MakeServer) -> None:
    server = make_server(18)
    connection = await connect(server.dsn())
    assert await connection.timeline_history(1) == []
    await connection.close()
    server.stop()
    # a recovery that ends begins a new timeline
    signal_file = server.data_directory / "recovery.signal"
    signal_file.touch()
    server_user().own(signal_file)
    with (server.data_directory / "postgresql.conf").open("a") as configuration:
        configuration.write("restore_command = '/bin/false'\n")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as session:
        while session.execute("SELECT pg_is_in_recovery()").fetchone() != (False,):
            pass
    connection = await connect(server.dsn())
    identity = await connection.identify_system()
    assert identity.timeline == 2
    (entry,) = await connection.timeline_history(2)
    assert entry.timeline == 1
    assert Lsn(1) < entry.switchpoint <= identity.xlogpos
    await connection.close()


async def test_tls(tls_server: EmbeddedServer, tmp_path: Path) -> None:
    certificate = str(tls_server.data_directory / "server.crt")
    for sslmode in ("require", "verify-ca", "verify-full"):
        connection = await connect(tls_server.dsn(sslmode=sslmode, sslrootcert=certificate))
        assert connection.pgconn.ssl_in_use
        assert await connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [("t",)]
        await connection.close()
        if sslmode != "require":
            error = await fails(tls_server.dsn(sslmode=sslmode, sslrootcert=str(tmp_path / "none.crt")))
            assert not isinstance(error, PublisherUnavailable)


async def test_tls_without_server_support(publisher18_db: Database) -> None:
    if publisher18_db.value("SHOW ssl") == "on":
        pytest.skip("this publisher speaks TLS")
    error = await fails(publisher18_db.conninfo(sslmode="require"))
    assert not isinstance(error, PublisherUnavailable)
    assert "SSL" in str(error)
