"""An attempt to connect that failed: what libpq says (of PostgreSQL 13 to 18), and what is to be done about it."""

from __future__ import annotations

import psycopg
import pytest

from subscriber.apply.retry import Policy, is_coming_up, policy
from subscriber.errors import PublisherUnavailable, SubscriberError, TargetError, TargetUnavailable
from subscriber.sinks.postgres.session.target import Target
from subscriber.walreceiver.publisher_errors import connect_error

SERVER = 'connection to server at "127.0.0.1", port 5432 failed: '

COMING_UP = [
    "FATAL:  the database system is starting up",
    "FATAL:  the database system is shutting down",
    "FATAL:  the database system is in recovery mode",
    "FATAL:  the database system is not yet accepting connections\nDETAIL:  Consistent recovery state has not been yet reached.",
    "FATAL:  the database system is not accepting connections\nDETAIL:  Hot standby mode is disabled.",
]
AWAY = [
    "Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?",
    "server closed the connection unexpectedly\n\tThis probably means the server terminated abnormally",
    "SSL SYSCALL error: EOF detected",
    "SSL error: unexpected eof while reading",
    "SSL connection has been closed unexpectedly",
]
FULL = [
    "FATAL:  sorry, too many clients already",
    "FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
    'FATAL:  too many connections for role "few"',
]
REFUSED = [
    'FATAL:  database "recovery" does not exist',
    'FATAL:  database "too many" does not exist',
    'FATAL:  role "starting up" does not exist',
    'FATAL:  password authentication failed for user "u"',
    'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "u", database "d", no encryption',
    'FATAL:  database "d" is not currently accepting connections',
    "server does not support SSL, but SSL was required",
    "SSL error: certificate verify failed",
    "SSL error: tlsv1 alert unknown ca",
]


async def refused(monkeypatch: pytest.MonkeyPatch, text: str) -> SubscriberError:
    """What Target.connect makes of it."""

    async def connect(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(f"{SERVER}{text}")

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect)
    with pytest.raises(SubscriberError) as caught:
        await Target("postgresql://u@h/d").connect("name")
    assert "\n" not in caught.value.one_line()
    return caught.value


@pytest.mark.parametrize("text", COMING_UP)
async def test_a_server_that_comes_up_is_waited_for(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for error in (await refused(monkeypatch, text), connect_error(psycopg.OperationalError(f"{SERVER}{text}"))):
        assert type(error) in {TargetUnavailable, PublisherUnavailable}
        assert policy(error) is Policy.SOON
        assert is_coming_up(error)
        assert error.hint == "wait until it accepts connections"


@pytest.mark.parametrize("text", [*AWAY, *FULL])
async def test_a_server_that_is_away_or_full_is_tried_again(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    error = await refused(monkeypatch, text)
    assert type(error) is TargetUnavailable
    assert not is_coming_up(error)
    full = error.hint == "end other sessions, or increase max_connections"
    assert full == (text in FULL)


@pytest.mark.parametrize("text", REFUSED)
async def test_errors_that_need_a_correction(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    error = await refused(monkeypatch, text)
    assert type(error) is TargetError
    assert error.hint == "check user, password and database in the target's connection string, and the server's pg_hba.conf"
    assert not is_coming_up(error)
