"""libpq's pipeline mode with asyncio: send many prepared statements without waiting for answers, in bounded memory.

The server executes statements while later ones are still being sent. Two problems must be avoided: a deadlock in which both sides block
on full sockets because neither side reads, and an unlimited number of unread answers. So the sender stops when too many statements (or
bytes) are unanswered, requests the answers with a Flush message, and reads while it waits to write.

After an error the server skips everything up to the next Sync message. There is one Sync, at the end of the pipeline. So a COMMIT that
was sent after a failing statement is never executed.

Each statement is prepared once per session, in the pipeline itself. Beyond a limit, the least recently used ones are deallocated.

Source: PostgreSQL manual, 32.5 (Pipeline Mode) and 54.2.4 (Pipelining).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from subscriber.errors import TargetUnavailable
from subscriber.sinks.postgres.session.postgres_errors import Diagnostics
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.waits import moved

__all__ = ["Completed", "Pipeline", "PreparedStatements", "StatementFailed"]

_MAX_COMMANDS: Final = 1024
_MAX_BYTES: Final = 2 * 1024**2
_MAX_PREPARED: Final = 500

_OK: Final = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})

Completed = Callable[[Statement, object, PGresult], None]
"""Called for each statement that succeeded, with its context and its result."""


_Values = tuple[Sequence[bytes | None], Sequence[int] | None]


class StatementFailed(Exception):
    """The server rejected a statement. The caller turns this into an error of the package, and adds the change.

    Attributes:
        values, formats: the parameters of the statement. They hold a row's values: use them to query the server, never in a message.
    """

    def __init__(self, diagnostics: Diagnostics, statement: Statement, context: object, values: _Values) -> None:
        super().__init__("a statement was refused")
        self.values, self.formats = values
        self.diagnostics = diagnostics
        self.statement = statement
        self.context = context


class _Question:
    """The context of a query whose result is waited for."""

    result: PGresult | None = None


class PreparedStatements:
    """The prepared statements of the session, the least recently used first."""

    def __init__(self) -> None:
        self._names: OrderedDict[Statement, bytes] = OrderedDict()
        self._count = 0

    def name(self, statement: Statement) -> bytes | None:
        """The statement's name if it is prepared, else None."""
        name = self._names.get(statement)
        if name is not None:
            self._names.move_to_end(statement)
        return name

    def add(self, statement: Statement) -> tuple[bytes, bytes | None]:
        """Add a statement. Returns its name, and the name of one to deallocate, or None."""
        self._count += 1
        self._names[statement] = name = b"subscriber_%d" % self._count
        evicted = self._names.popitem(last=False)[1] if len(self._names) > _MAX_PREPARED else None
        return name, evicted

    def clear(self) -> None:
        self._names.clear()


_Pending = tuple[Statement, object, int, _Values]
_NO_VALUES: Final[_Values] = ((), None)


class Pipeline:
    """One pipeline on a connection. The connection must not be used otherwise until the pipeline ends."""

    def __init__(self, pgconn: PGconn, prepared: PreparedStatements, completed: Completed) -> None:
        self._pgconn = pgconn
        self._prepared = prepared
        self._completed = completed
        self._pending: deque[_Pending] = deque()
        self._bytes = 0
        self._failure: StatementFailed | None = None
        self._answered = False
        self._synced = False

    @property
    def failed(self) -> bool:
        """Whether the server rejected a statement."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error of the first rejected statement, if there is one."""
        if self._failure is not None:
            raise self._failure

    def enter(self) -> None:
        """Switch the connection to pipeline mode."""
        self._pgconn.nonblocking = 1
        self._pgconn.enter_pipeline_mode()

    def leave(self) -> None:
        """Leave pipeline mode. All answers must have been read."""
        self._pgconn.exit_pipeline_mode()
        self._pgconn.nonblocking = 0

    def send(
        self,
        statement: Statement,
        context: object,
        values: Sequence[bytes | None] = (),
        formats: Sequence[int] | None = None,
        size: int = 0,
    ) -> None:
        """Send a statement with raw parameters; prepare it first if needed. ``size``: approximate size of the values in bytes."""
        if not statement.reused:
            self._pgconn.send_query_params(statement.sql, values, param_types=statement.parameter_types or None, param_formats=formats)
        else:
            name = self._prepared.name(statement)
            if name is None:
                name = self._prepare(statement, context)
            self._pgconn.send_query_prepared(name, values, formats)
        self._pending.append((statement, context, size, (values, formats)))
        self._bytes += size

    def _prepare(self, statement: Statement, context: object) -> bytes:
        name, evicted = self._prepared.add(statement)
        if evicted is not None:
            self._pgconn.send_query_params(b"DEALLOCATE " + evicted, None)
            self._pending.append((_DEALLOCATE, None, 0, _NO_VALUES))
        self._pgconn.send_prepare(name, statement.sql, statement.parameter_types)
        # only a failure of PREPARE matters: it is reported as a failure of the statement
        self._pending.append(
            (Statement(b"", columns=statement.columns, message_type=statement.message_type, table=statement.table), context, 0, _NO_VALUES)
        )
        return name

    def start(self) -> None:
        """Let the server begin with what was sent, while more is prepared."""
        # what does not fit into the socket's buffer is sent later
        self._pgconn.flush()

    @property
    def full(self) -> bool:
        """Whether too many statements or bytes are unanswered."""
        return len(self._pending) >= _MAX_COMMANDS or self._bytes >= _MAX_BYTES

    async def throttle(self) -> None:
        """Wait while too many statements or bytes are unanswered. Call it between statements.

        Raises:
            StatementFailed: a statement was rejected; leave the pipeline.
            TargetUnavailable: the connection was lost.
        """
        if self.full:
            self._pgconn.send_flush_request()
            await self._pump(_MAX_COMMANDS // 2, _MAX_BYTES // 2)
            self.raise_failure()

    async def ask(self, statement: Statement, values: Sequence[bytes | None], formats: Sequence[int] | None) -> PGresult:
        """Send a query, and wait for its result and for those of all earlier statements.

        Raises:
            StatementFailed: a statement was rejected; leave the pipeline.
            TargetUnavailable: the connection was lost.
        """
        question = _Question()
        self.send(statement, question, values, formats)
        await self.answered()
        assert question.result is not None
        return question.result

    async def answered(self) -> None:
        """Wait until all statements are answered.

        Raises:
            StatementFailed, TargetUnavailable: as :meth:`throttle`.
        """
        self._pgconn.send_flush_request()
        await self._pump(0, 0)
        self.raise_failure()

    async def drain(self) -> None:
        """Send Sync and read all answers.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        self._pgconn.pipeline_sync()
        while True:
            unsent = self._pgconn.flush() == 1
            self._take()
            if self._synced:
                return
            await self._wait(writable=unsent)
            self._pgconn.consume_input()

    async def _pump(self, commands: int, size: int) -> None:
        """Send buffered data and read answers until at most ``commands`` statements and ``size`` bytes are unanswered."""
        while True:
            unsent = self._pgconn.flush() == 1
            self._take()
            if len(self._pending) <= commands and self._bytes <= size:
                return
            await self._wait(writable=unsent)
            self._pgconn.consume_input()

    async def _wait(self, *, writable: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        socket = self._pgconn.socket
        loop.add_reader(socket, wake)
        if writable:
            loop.add_writer(socket, wake)
        try:
            await ready
            # a large row on a slow network takes its time
            moved()
        finally:
            loop.remove_reader(socket)
            if writable:
                loop.remove_writer(socket)

    def _take(self) -> None:
        """Process received answers. libpq returns the results of a statement, then None, then the results of the next one."""
        pgconn = self._pgconn
        ends = 0
        while not pgconn.is_busy() and not self._synced:
            result = pgconn.get_result()
            if result is None:
                if not self._answered:
                    ends += 1
                    if ends > 1:
                        return
                    continue
                self._answered = False
                self._bytes -= self._pending.popleft()[2]
            elif result.status == pq.ExecStatus.PIPELINE_SYNC:
                self._synced = True
            else:
                self._answered = True
                self._answer(result)
            ends = 0

    def _answer(self, result: PGresult) -> None:
        statement, context, _, values = self._pending[0]
        if result.status in _OK:
            if isinstance(context, _Question):
                context.result = result
            elif statement.sql:  # empty for a PREPARE
                self._completed(statement, context, result)
        elif result.status != pq.ExecStatus.PIPELINE_ABORTED and self._failure is None:
            diagnostics = Diagnostics.of_result(result)
            if diagnostics.sqlstate is None or self._pgconn.status == pq.ConnStatus.BAD:
                raise TargetUnavailable(f"connection to the target was lost: {' '.join(diagnostics.message.split())}")
            self._failure = StatementFailed(diagnostics, statement, context, values)


_DEALLOCATE: Final = Statement(b"DEALLOCATE")
