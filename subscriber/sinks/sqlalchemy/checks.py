"""Finds problems of a target before they do harm. Changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from subscriber.catalog.subscriptions import find_subscription
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import TargetError
from subscriber.interfaces import Finding, PublishedTable
from subscriber.sinks.sqlalchemy.catalog.creation import catalog_version
from subscriber.sinks.sqlalchemy.catalog.rows import SqlAlchemyRows
from subscriber.sinks.sqlalchemy.conflict_log import ConflictLog
from subscriber.sinks.sqlalchemy.schema.table_creation import check
from subscriber.sinks.sqlalchemy.schema.triggers import first_firing
from subscriber.sinks.sqlalchemy.session.database import Database

__all__ = ["check_target", "renames_columns", "subscription_exists"]

_MYSQL: Final = frozenset({"mysql", "mariadb"})
_PACKET: Final = 16 * 1024**2
"""MariaDB's default."""


async def subscription_exists(database: Database, name: str) -> bool:
    """Whether the target has the subscription. A missing SQLite file has none.

    Raises:
        TargetUnavailable, TargetError
    """
    if database.path is not None and not database.path.exists():
        return False
    async with database.reading() as connection:
        if await catalog_version(connection) is None:
            return False
        return await find_subscription(SqlAlchemyRows(connection), name) is not None


async def check_target(
    database: Database,
    tables: Sequence[PublishedTable],
    options: SubscriptionOptions,
    settings: Settings,
    *,
    creating: bool,
    log: ConflictLog | None,
) -> list[Finding]:
    """Return all problems that these tables would meet in the target.

    Raises:
        TargetUnavailable, TargetError
    """
    if database.path is not None and not database.path.exists():
        if not database.path.parent.is_dir():
            return [Finding("error", f'directory "{database.path.parent}" does not exist', "create it, or use another file")]
        if not creating:
            return [Finding("error", f'file "{database.path}" does not exist', "run with --create-tables")]
        return [*_file(database.path), *await _new_file(tables, options)]
    unwritable = [] if database.path is None else _file(database.path)
    if unwritable:
        # reading may fail too: in WAL mode, SQLite writes files beside the database for a reader
        return unwritable
    async with database.reading() as connection:
        findings = await _server(connection, database.dialect_name, follows=settings.schema_change == "follow")
        if log is not None and (refused := await log.refused(connection)) is not None:
            findings.append(Finding("error", str(refused), refused.hint or ""))
        if options.on_error == "park" and len(tables) > 1:
            trigger = await first_firing(connection, [table.name for table in tables])
            findings += [] if trigger is None else [Finding.of(trigger.reads_parked)]
        findings += await check(connection, tables, creating=creating, adding=settings.schema_change != "error", binary=options.binary)
    return findings


def _file(path: Path) -> list[Finding]:
    """Check that this process may write the SQLite file, and the journal and lock files beside it."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return [
            Finding(
                "error",
                f'no file can be created in directory "{path.parent}"',
                "grant write permission on it: SQLite keeps a journal and locks beside the file",
            )
        ]
    if path.exists() and not os.access(path, os.W_OK):
        return [Finding("error", f'the SQLite file "{path}" is read-only', "grant write permission on it, or use another file")]
    return []


async def _new_file(tables: Sequence[PublishedTable], options: SubscriptionOptions) -> list[Finding]:
    # an empty database in memory represents the new file
    engine = create_async_engine("sqlite+aiosqlite://")
    try:
        async with engine.connect() as connection:
            return await check(connection, tables, creating=True, adding=True, binary=options.binary)
    finally:
        await engine.dispose()


async def _server(connection: AsyncConnection, dialect_name: str, *, follows: bool) -> list[Finding]:
    if dialect_name in _MYSQL:
        return await _mysql(connection, follows=follows)
    return []


def renames_columns(version: str) -> bool:
    """Whether MariaDB or MySQL has RENAME COLUMN. ``version``: what the server says."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return numbers >= ((10, 5, 2) if "mariadb" in version.lower() else (8, 0))


async def _mysql(connection: AsyncConnection, *, follows: bool) -> list[Finding]:
    async def variable(name: str) -> Any:
        return (await connection.execute(text(f"SELECT @@GLOBAL.{name}"))).scalar()

    findings = []
    if int(await variable("read_only")):
        findings.append(Finding("error", "the target is read-only", "connect to the primary, or set read_only = 0"))
    version = str(await variable("version"))
    if follows and not renames_columns(version):
        message = f"schema_change = follow needs MariaDB 10.5.2 or MySQL 8.0, and the target is {version}: it cannot rename columns"
        findings.append(Finding("error", message, "use schema_change = add"))
    packet = int(await variable("max_allowed_packet"))
    if packet < _PACKET:
        findings.append(
            Finding(
                "warning",
                f"max_allowed_packet = {packet} of the target: larger rows are rejected",
                f"SET GLOBAL max_allowed_packet = {4 * _PACKET}, and set it in the server's configuration",
            )
        )
    try:
        flushed = int(await variable("innodb_flush_log_at_trx_commit"))
    except TargetError:
        return findings
    if flushed != 1:
        findings.append(
            Finding(
                "warning",
                f"innodb_flush_log_at_trx_commit = {flushed} of the target: a commit may be lost after a power failure",
                "set it to 1: the publisher does not send acknowledged changes again",
            )
        )
    return findings
