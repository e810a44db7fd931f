"""New clusters of PostgreSQL without ``initdb``, which takes half a second of a processor: a pytest plugin.

Each process of pytest keeps one cluster of each version as ``initdb`` has made it, and copies it for the next server of that version. The
copy has the template's superuser password, but a system identifier of its own, because that is how a server is told from another one.
Clusters with arguments for ``initdb`` are made by ``initdb``.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from subscriber.testing.binaries import ServerUser, server_user
from subscriber.testing.server import EmbeddedServer

_POLYNOMIAL: Final = 0x82F63B78
_LEAST: Final = 200
"""Bytes of pg_control that every version has before its checksum."""
_IDENTIFIER_IN_WAL: Final = 24
"""Where XLogLongPageHeaderData has it."""
_templates: dict[tuple[int, Path], tuple[Path, str]] = {}
"""Directory and superuser password, by version and directory of the programs."""
_initdb: Final = EmbeddedServer._initdb


def _add(checksum: int, byte: int) -> int:
    """The CRC-32C of what came before and of one more byte, neither begun nor ended by an inversion."""
    checksum ^= byte
    for _ in range(8):
        checksum = (checksum >> 1) ^ (_POLYNOMIAL & -(checksum & 1))
    return checksum


def _checksum(data: bytes | bytearray) -> int:
    found = 0xFFFFFFFF
    for byte in data:
        found = _add(found, byte)
    return found ^ 0xFFFFFFFF


def _length(data: bytes | bytearray) -> int:
    """Where pg_control's structure ends, with its checksum: that depends on the version."""
    found = 0xFFFFFFFF
    for place, byte in enumerate(data):
        if place >= _LEAST and found ^ 0xFFFFFFFF == int.from_bytes(data[place : place + 4], "little"):
            return place
        found = _add(found, byte)
    raise AssertionError("pg_control has no checksum")


def _run(run_as: ServerUser, *command: str | Path) -> None:
    done = run_as.run(*command)
    assert done.returncode == 0, done.stderr


def _copied(self: EmbeddedServer, initdb_args: Sequence[str]) -> None:
    if initdb_args:
        _initdb(self, initdb_args)
        return
    run_as = server_user()
    key = self.version, self.bindir
    if key not in _templates:
        _initdb(self, ())
        directory = Path(tempfile.mkdtemp(prefix="cluster-"))
        run_as.own(directory)
        _run(run_as, "cp", "--archive", self.data_directory, directory)
        _templates[key] = directory, self.password
        return
    directory, self.password = _templates[key]
    _run(run_as, "cp", "--archive", directory / "data", self.data_directory)
    _identify(self.data_directory)


def _identify(cluster: Path) -> None:
    """Replace the system identifier, which pg_control begins with, and which is in the header of the only segment of WAL."""
    control = cluster / "global" / "pg_control"
    data = bytearray(control.read_bytes())
    end = _length(data)
    before = bytes(data[:8])
    data[:8] = (int.from_bytes(before, "little") ^ (1 + secrets.randbits(30))).to_bytes(8, "little")
    data[end : end + 4] = _checksum(data[:end]).to_bytes(4, "little")
    control.write_bytes(data)
    (segment,) = (cluster / "pg_wal").glob("0*")
    with segment.open("r+b") as file:
        file.seek(_IDENTIFIER_IN_WAL)
        assert file.read(8) == before
        file.seek(_IDENTIFIER_IN_WAL)
        file.write(data[:8])


def pytest_configure() -> None:
    EmbeddedServer._initdb = _copied  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    EmbeddedServer._initdb = _initdb  # type: ignore[method-assign]
    for directory, _ in _templates.values():
        shutil.rmtree(directory, ignore_errors=True)
