"""Errors of the driver in words for people."""

from __future__ import annotations

import asyncpg
import pytest

from subscriber.errors import TargetUnavailable
from subscriber.sinks.postgres.session.postgres_errors import translated


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        asyncpg.InterfaceError("cannot call Transaction.__aexit__(): the underlying connection is closed"),
    ],
)
def test_closed_session_is_told_in_our_words(error: Exception) -> None:
    with pytest.raises(TargetUnavailable) as caught, translated():
        raise error
    assert str(caught.value) == "connection to the target failed: the session was closed while it was in use"
    assert caught.value.__cause__ is error


def test_text_of_the_system_is_kept() -> None:
    with pytest.raises(TargetUnavailable, match=r"connection to the target failed: .*Connection refused"), translated():
        raise ConnectionRefusedError(111, "Connection refused")


def test_text_about_the_configuration_is_kept() -> None:
    with pytest.raises(TargetUnavailable, match="connection to the target failed: no such certificate"), translated():
        raise asyncpg.exceptions.ClientConfigurationError("no such certificate")
