"""The support bundle of ``doctor``: what is collected, and how it is written.

Every text passes :func:`subscriber.redaction.redacted`, with the passwords that are known. No query reads a table of the user: the catalogs
of both sides, settings and statistics hold names, numbers and positions.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import time
import zipfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import subscriber
from subscriber._implementation import implementation
from subscriber.catalog import Definition
from subscriber.config import STORED
from subscriber.errors import SubscriberError
from subscriber.protocol.quoting import quote_literal
from subscriber.redaction import redacted, secrets_in
from subscriber.subscription.management.status import subscription_status
from subscriber.subscription.management.status_json import status_as_json
from subscriber.walreceiver.session import Session

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = ["Bundle", "Sides", "collect"]

_LINES: Final = 5000
_PACKAGES: Final = (
    "pg-subscriber",
    "psycopg",
    "psycopg-binary",
    "asyncpg",
    "sqlalchemy",
    "aiosqlite",
    "asyncmy",
    "pyarrow",
    "deltalake",
    "pyspark",
    "prometheus-client",
    "cython",
)
_README: Final = """\
A support bundle of subscriber, made by `subscriber doctor`. Passwords are replaced by ********. No rows were read.

versions.json    the program, Python, the system, packages
status.json      as `subscriber status --json`
definition.json  the subscription as the target's catalog has it
settings.json    values of the configuration file and their sources
publisher.json   version, settings, slot, publications
log.txt          the last lines of the log
timings.json     how long each part took, in seconds, and why a part is missing
"""
_PUBLISHER: Final = {
    "version": "SELECT version()",
    "settings": "SELECT name, setting, unit, source FROM pg_catalog.pg_settings WHERE name IN ('wal_level', 'max_wal_senders',"
    " 'max_replication_slots', 'wal_sender_timeout', 'max_slot_wal_keep_size', 'logical_decoding_work_mem', 'wal_keep_size',"
    " 'synchronous_standby_names', 'idle_replication_slot_timeout', 'server_encoding', 'TimeZone') ORDER BY name",
    "slot": "SELECT to_jsonb(s) || jsonb_build_object('wal_end', pg_current_wal_lsn()) FROM pg_catalog.pg_replication_slots AS s"
    " WHERE slot_name = {slot}",
    "wal_senders": "SELECT to_jsonb(r) - 'client_addr' - 'client_hostname' FROM pg_catalog.pg_stat_replication AS r"
    " WHERE application_name LIKE {name} || '%'",
    "publications": "SELECT to_jsonb(p) || jsonb_build_object('tables', (SELECT count(*) FROM pg_catalog.pg_publication_tables AS t"
    " WHERE t.pubname = p.pubname)) FROM pg_catalog.pg_publication AS p ORDER BY pubname",
}


@dataclass(frozen=True, slots=True)
class Sides:
    """A subscription: its name, its target, and its publisher if that is known."""

    name: str
    target: str = field(repr=False)
    connection: str | None = field(repr=False)


class Bundle:
    """Files, by name, without secrets.

    Args:
        secrets: values that must not appear.

    Attributes:
        failed: the parts that could not be read.
    """

    def __init__(self, secrets: set[str]) -> None:
        self._secrets = {each for each in secrets if len(each) > 2}
        self._files: dict[str, Any] = {}
        self._timings: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []

    def hide(self, text: str) -> None:
        """Replace the passwords of this connection string wherever they are."""
        self._secrets |= secrets_in(text)

    async def part(self, name: str, read: Callable[[], Awaitable[Any]]) -> Any:
        """Add a part: text, or what becomes JSON. If it cannot be read, note why."""
        began, result = time.monotonic(), None
        reason: str | None = None
        try:
            result = await read()
        except SubscriberError as error:
            reason = error.one_line()
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {getattr(error, 'strerror', None) or 'not readable'}"
        if reason is not None:
            self.failed.append(name)
        elif result is not None:
            self._files[name] = result
        self._timings[name] = {"seconds": round(time.monotonic() - began, 3), "error": reason}
        return result

    def write(self, file: str) -> None:
        """Write the files as one zip file, which only its owner can read.

        Raises:
            OSError: it exists, or cannot be written.
        """
        found = {"README.txt": _README, **self._files, "timings.json": self._timings}
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in found.items():
                hidden = self._hidden(part)
                text = hidden if isinstance(hidden, str) else json.dumps(hidden, indent=2)
                archive.writestr(name, text.encode("utf-8", "backslashreplace"))

    def _hidden(self, value: Any) -> Any:
        """Text without secrets, and what contains text: JSON stays JSON."""
        match value:
            case Mapping():
                return {str(key): self._hidden(each) for key, each in value.items()}
            case list() | tuple():
                return [self._hidden(each) for each in value]
            case bool() | int() | float() | None:
                return value
        return redacted(str(value), *self._secrets)


async def collect(bundle: Bundle, sides: Sides, configuration: Configuration | None, log: str | None) -> None:
    """Add all parts."""
    bundle.hide(sides.target)
    bundle.hide(sides.connection or "")
    await bundle.part("versions.json", _versions)
    definition: Definition | None = None

    async def status() -> Any:
        nonlocal definition
        (found,) = await subscription_status(sides.target, [sides.name])
        definition = found.observation.definition
        bundle.hide(definition.conninfo or "")
        return status_as_json(found)

    await bundle.part("status.json", status)
    found = definition
    connection = sides.connection or (found.conninfo if found is not None else None)
    slot = (found.slot_name if found is not None else None) or sides.name
    if found is not None:
        await bundle.part("definition.json", lambda: _definition(found, sides))
    if connection is not None:
        await bundle.part("publisher.json", lambda: _publisher(connection, sides.name, slot))
    if configuration is not None:
        await bundle.part("settings.json", lambda: _settings(configuration))
    if log is not None:
        await bundle.part("log.txt", lambda: _last_lines(log))


async def _versions() -> Any:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "subscriber": subscriber.__version__,
        "core": implementation(),
        "python": sys.version,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": packages,
    }


async def _definition(found: Definition, sides: Sides) -> Any:
    return {
        "target": redacted(sides.target),
        "connection": None if found.conninfo is None else redacted(found.conninfo),
        "publications": found.publications,
        "slot_name": found.slot_name,
        "enabled": found.enabled,
        "generation": found.generation,
        "options": {name: each.type.show(getattr(found.options, name)) for name, each in STORED.items()},
    }


async def _publisher(connection: str, name: str, slot: str) -> Any:
    began = time.monotonic()
    session = await Session.connect(connection, application_name=f"{name} doctor")
    try:
        answers: dict[str, Any] = {"connected_seconds": round(time.monotonic() - began, 3)}
        for part, query in _PUBLISHER.items():
            began = time.monotonic()
            rows = await session.execute(query.format(slot=quote_literal(slot), name=quote_literal(name)))
            answers[part] = [json.loads(row[0]) if row[0] and row[0].startswith("{") else row for row in rows]
            answers[f"{part}_seconds"] = round(time.monotonic() - began, 3)
        return answers
    finally:
        await session.close()


async def _settings(configuration: Configuration) -> Any:
    from subscriber.cli.service.effective import effective  # noqa: PLC0415 -- only with a file

    return {row.key: {"value": row.value, "source": row.source} for row in effective(configuration, {}, {}, {})}


async def _last_lines(file: str) -> str:
    def read() -> str:
        with open(file, encoding="utf-8", errors="backslashreplace") as stream:
            return "".join(deque(stream, _LINES))

    return await asyncio.to_thread(read)
