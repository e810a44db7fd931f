"""Copies one part of a table: reads it with ADBC under the exported snapshot, and writes it as base files. Runs on any executor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from subscriber.errors import ConfigurationError, PublisherError, PublisherUnavailable
from subscriber.protocol.conninfo import confined
from subscriber.protocol.quoting import quote_literal
from subscriber.protocol.session_settings import READING, pin_in_transaction
from subscriber.sinks.spark.copy.order import CopyOrder, base_file_name
from subscriber.sinks.spark.copy.select_list import current_rows
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import write_rows
from subscriber.sinks.spark.merge.work_unit import Unit
from subscriber.sinks.spark.tables.data_file import DataFile

if TYPE_CHECKING:
    from adbc_driver_postgresql.dbapi import Connection

__all__ = ["OrderOutdated", "Sessions", "copy_part"]

_BYTES: Final = 192 * 1024**2
"""Size of the rows in memory at which they are written. It is about the size of a part, so that most parts are one file."""
_GONE: Final = frozenset({"42704", "22023", "55000"})
"""SQLSTATEs of SET TRANSACTION SNAPSHOT: no such file (since PostgreSQL 16, and before), or its process is not running any more."""


_ALTERED: Final = frozenset({"42703", "42883", "42P01", "42804", "3F000"})
"""SQLSTATEs of a part's query: no such column, no such operator for its type, no such table, another type, no such schema."""
_CHECK_CLIENT: Final = """SELECT pg_catalog.set_config('client_connection_check_interval', '1s', false)
  WHERE pg_catalog.current_setting('client_connection_check_interval', true) IS NOT NULL"""
"""Without this, the backend of a killed task would continue to wait for a lock (since PostgreSQL 14; not on every platform)."""


class OrderOutdated(PublisherUnavailable):
    """The session that exported the snapshot has ended, or the table was altered. The table must be copied again."""


class Sessions:
    """The open sessions of this process with the publisher, so that another thread can cancel their statements."""

    def __init__(self) -> None:
        self._open: dict[Connection, threading.Lock] = {}

    @contextlib.contextmanager
    def known(self, connection: Connection) -> Iterator[None]:
        """Register a session inside the block. The block's end waits for a cancel in progress, which must not use a closed session."""
        lock = self._open[connection] = threading.Lock()
        try:
            yield
        finally:
            with lock:
                del self._open[connection]

    def cancel(self) -> None:
        """Cancel their statements. A session between two statements ignores this, so call it repeatedly. Never blocks."""
        for connection, lock in list(self._open.items()):
            # a cancel opens a connection, which a dead peer can block
            threading.Thread(target=self._cancel, args=[connection, lock], name="cancel", daemon=True).start()

    def _cancel(self, connection: Connection, lock: threading.Lock) -> None:
        from adbc_driver_manager import Error  # noqa: PLC0415 -- an extra

        if not lock.acquire(blocking=False):
            return
        try:
            if connection in self._open:
                with contextlib.suppress(Error):
                    connection.adbc_cancel()
        finally:
            lock.release()


def copy_part(storage: Storage, order: CopyOrder, number: int, target_rows: int, *, stop: threading.Event, sessions: Sessions) -> None:
    """Store a part and mark it as stored. Does nothing if it is already stored. Gives up between batches of rows once ``stop`` is set.

    Raises:
        OrderOutdated: the snapshot is gone, or the table was altered.
        PublisherUnavailable, PublisherError: the publisher cannot be reached, or refuses.
        ConfigurationError: the ADBC driver is not installed.
        ApplyError: a text is not UTF-8.
        TargetError: files cannot be written.
    """
    if number in order.numbers_done(storage):
        return
    schema = order.schema
    unit = Unit(directory=order.base, schema=schema, base=(), stretches=(), after=0, target_rows=target_rows)
    files: list[DataFile] = []
    gathered: list[pa.RecordBatch] = []

    def write() -> None:
        rows = pa.Table.from_batches(gathered, schema.current)
        gathered.clear()
        files.extend(write_rows(storage, unit, rows, lambda: base_file_name(order.table_id, order.generation)))

    for batch in _batches(order, number, sessions):
        if stop.is_set():
            raise PublisherUnavailable("the applier is being stopped")
        gathered.append(current_rows(schema, batch.columns))
        if sum(rows.nbytes for rows in gathered) >= _BYTES:
            write()
    write()
    order.mark(storage, number, files)


def _batches(order: CopyOrder, number: int, sessions: Sessions) -> Iterator[pa.RecordBatch]:
    try:
        from adbc_driver_manager import Error  # noqa: PLC0415 -- an extra
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a copy by executors needs {error.name}, which is not installed there", hint="pip install 'pg-subscriber[spark-snapshot]'"
        ) from None
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(dbapi.connect(f"{confined(order.connection)} client_encoding=UTF8", autocommit=True))
            stack.enter_context(sessions.known(connection))
            cursor = stack.enter_context(connection.cursor())
        except Error as error:
            raise PublisherUnavailable(
                f"an executor could not connect to the publisher: {_first(error)}",
                hint="executors need its address and a password of their own: a passfile; or use copy=subscriber",
            ) from None
        with contextlib.suppress(Error):
            cursor.execute(_CHECK_CLIENT)
        try:
            cursor.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            # before any query
            cursor.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(order.snapshot_name)}")
        except Error as error:
            if error.sqlstate in _GONE:
                raise OrderOutdated("the session that exported the snapshot was lost") from None
            raise _refused(error) from None
        try:
            for statement in pin_in_transaction(READING):
                cursor.execute(statement)
            _check(cursor, order.parts[number].check_query(), read=False)
            cursor.execute(order.query(number))
            yield from cursor.fetch_record_batch()
            _check(cursor, order.parts[number].check_query(), read=True)
        except (Error, pa.ArrowException, OSError) as error:
            if getattr(error, "sqlstate", None) in _ALTERED:
                raise OrderOutdated("the table was altered while it was copied") from None
            raise _refused(error) from None


def _check(cursor: Any, query: str, *, read: bool) -> None:
    """Check that the part belongs to the table that was described.

    Args:
        cursor: of the transaction that reads the part.
        query: the check.
        read: whether the part was already read.

    Raises:
        OrderOutdated: another table has this name now, or the table was rewritten.
    """
    cursor.execute(query)
    same, locked = cursor.fetchone()
    if not same or (read and not locked):
        raise OrderOutdated("the table was renamed, replaced or rewritten while it was copied")


def _refused(error: BaseException) -> PublisherError:
    """Make an error without the server's text, which may contain a value. The server's log has it."""
    state: Any = getattr(error, "sqlstate", None)
    if not state or state[:2] in {"08", "57", "53"}:
        return PublisherUnavailable(f"the publisher ended the session of an executor{f' (SQLSTATE {state})' if state else ''}")
    return PublisherError(f"the publisher rejected the query of an executor (SQLSTATE {state})", hint="see the publisher's log")


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
