"""Send runs: consecutive changes of one form. A long run becomes a few statements, each for a set of rows.

A run keeps its place among the other statements. It may extend over several transactions of the publisher, because they are one transaction
of the target. It ends at the first change of another form, at a TRUNCATE, or when it is large enough.

A short run is sent one statement per change. So are very large rows, and the runs of tables for which that is necessary
(``TargetTable.watched``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from subscriber.abc import TableName
from subscriber.sinks.apply_counters import ChangeContext
from subscriber.sinks.postgres.apply.error_reports import SetContext
from subscriber.sinks.postgres.apply.forms import MOST_BYTES, Form, Row
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.session.pipeline import Pipeline

__all__ = ["MOST_ROWS", "Runs"]

MOST_ROWS: Final = 1000
_LEAST: Final = 8
"""The shortest run for which one statement is cheaper."""


class Runs:
    """Collects a run, and sends it when it ends.

    Args:
        pipeline: the pipeline to send through.
        settings: the settings of the transaction.
        apart: tables whose changes are sent one by one; None: those of all tables.
    """

    def __init__(self, pipeline: Pipeline, settings: LocalSettings, apart: Collection[TableName] | None) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._apart = apart
        self._form: Form | None = None
        self._rows: list[Row] = []
        self._contexts: list[ChangeContext] = []
        self._size = 0

    async def add(self, form: Form, rows: list[Row], context: ChangeContext, sizes: Sequence[int]) -> None:
        """Add changes of one transaction. ``sizes``: of their messages, in bytes.

        Raises:
            StatementFailed: the server rejected an earlier statement.
            TargetUnavailable
        """
        if form is not self._form:
            await self.flush()
            self._form = form
        if sizes[-1] > MOST_BYTES:
            # no copy of it in an array; Form.read() ends after such a row
            self._append(rows[:-1], context, sum(sizes[:-1]))
            await self.flush()
            await self._send_each(form, rows[-1:], [context], sizes[-1])
            return
        self._append(rows, context, sum(sizes))
        if len(self._rows) >= MOST_ROWS or self._size >= MOST_BYTES:
            await self.flush()

    def _append(self, rows: list[Row], context: ChangeContext, size: int) -> None:
        self._rows += rows
        self._contexts += [context] * len(rows)
        self._size += size

    async def flush(self) -> None:
        """Send the run.

        Raises:
            StatementFailed, TargetUnavailable
        """
        form, rows, contexts, size = self._form, self._rows, self._contexts, self._size
        if form is None or not rows:
            return
        self._rows, self._contexts, self._size = [], [], 0
        table = form.mapping.table
        size //= len(rows)
        together = form.together is not None and self._apart is not None and table.name not in self._apart
        start = 0
        for stop in _ends(form, rows) if together else (len(rows),):
            if form.together is not None and together and stop - start >= _LEAST:
                values, formats = form.set_of(rows[start:stop])
                if form.together.finds:
                    self._settings.find_set(table)
                else:
                    self._settings.change(table)
                self._pipeline.send(form.together, SetContext.of(contexts[start:stop]), values, formats, size * (stop - start))
                await self._pipeline.throttle()
            else:
                await self._send_each(form, rows[start:stop], contexts[start:stop], size)
            start = stop

    async def _send_each(self, form: Form, rows: Sequence[Row], contexts: Sequence[ChangeContext], size: int) -> None:
        self._settings.change(form.mapping.table)
        for row, context in zip(rows, contexts, strict=True):
            self._pipeline.send(form.single, context, form.values(row), form.formats, size)
            if self._pipeline.full:
                await self._pipeline.throttle()


def _ends(form: Form, rows: Sequence[Row]) -> list[int]:
    """Divide a run into sets, so that no key comes twice in one. Returns the end of each."""
    ends: list[int] = []
    if form.key is not None:
        keys = list(map(form.key, rows))
        if len(set(keys)) < len(keys):
            seen: set[object] = set()
            for place, key in enumerate(keys):
                if key in seen:
                    ends.append(place)
                    seen.clear()
                seen.add(key)
    return [*ends, len(rows)]
