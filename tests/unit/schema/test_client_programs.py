"""What the errors of pg_dump mean: a server that is away is tried again, anything else is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.errors import PublisherError, PublisherUnavailable
from subscriber.schema.client_programs import run_program


@pytest.mark.parametrize(
    ("message", "unavailable"),
    [
        ('connection to server at "127.0.0.1", port 28688 failed: Connection refused', True),
        ('connection to server at "db1" failed: FATAL:  the database system is starting up', True),
        ("query failed: FATAL:  terminating connection due to administrator command", True),
        ("query failed: server closed the connection unexpectedly", True),
        ("query failed: ERROR:  permission denied for table t", False),
        ('query failed: ERROR:  unterminated quoted string at or near "x"', False),
    ],
)
async def test_an_unavailable_server_is_told_from_other_errors(tmp_path: Path, message: str, unavailable: bool) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\npg_dump: error: {message}\nEND\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(PublisherError, match="pg_dump failed: ") as found:
        await run_program(program, [])
    assert isinstance(found.value, PublisherUnavailable) is unavailable
