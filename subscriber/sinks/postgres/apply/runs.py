"""Send runs: changes of one form. A long run becomes a few statements, each for a set of rows.

A run may extend over several transactions of the publisher, because they are one transaction of the target. Runs wait until they are large
enough, or until the order requires that they are sent. The result is the same as if each change was made in order:

*Between tables no order is kept,* and :class:`TransactionSender` adds changes table by table. Foreign keys are not checked. Exceptions are
tables in which a trigger or a function could see the order (:attr:`Form.ordered`): everything before such a change is sent first. The
tables of a partition tree count as one table, because they share rows.

*Within a table, runs keep their order, and changes of the same row keep theirs.* A change joins an earlier run of its form only if all
changes since then are of rows with other keys. This requires that different bytes are different keys, and that the table has no other
unique index (:attr:`Form.row_key`). Otherwise a change joins only the table's latest run.

*An UPDATE need not be made* if a later change of its run or of a later run overwrites or deletes its row, and the target would certainly
accept it (:meth:`Form.accepts`). It is counted. It is made if the later change finds no row, because then the batch is applied again.

*After an error* the whole batch is rolled back, and its changes are made one by one and in order (``apart`` is None).

A short run is sent one statement per change. So are very large rows, and the runs of tables for which that is necessary
(``TargetTable.watched``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from subscriber.abc import TableName
from subscriber.sinks.apply_counters import ChangeContext
from subscriber.sinks.postgres.apply.error_reports import SetContext
from subscriber.sinks.postgres.apply.forms import MOST_BYTES, Form, Row
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping

__all__ = ["MOST_ROWS", "Runs"]

MOST_ROWS: Final = 1000
_MOST_WAITING: Final = 4000
"""The number of changes of all tables that may wait."""
_LEAST: Final = 8
"""The shortest run for which one statement is cheaper."""
_LOOK_BACK: Final = 8
"""The number of runs of its table that a change may be moved past."""


class _Run:
    """Changes of one form, in order.

    Attributes:
        omitted: number of UPDATEs, of this run or of earlier ones, that need not be made because of changes of this run.
    """

    __slots__ = ("_keyed", "_keys", "contexts", "form", "omitted", "rows", "size")

    def __init__(self, form: Form) -> None:
        self.form = form
        self.rows: list[Row] = []
        self.contexts: list[ChangeContext] = []
        self.size = 0
        self.omitted = 0
        self._keys: set[object] = set()
        self._keyed = 0

    def append(self, rows: Sequence[Row], contexts: Sequence[ChangeContext], size: int) -> None:
        self.rows += rows
        self.contexts += contexts
        self.size += size

    def keep(self, places: Collection[int]) -> None:
        """Omit the changes at all other places."""
        self.size = self.size * len(places) // len(self.rows)
        self.rows = [self.rows[place] for place in places]
        self.contexts = [self.contexts[place] for place in places]

    def is_apart_from(self, form: Form, keys: Collection[object]) -> bool:
        """Whether no change of the run is of a row with one of these keys of another form."""
        mine = self.form
        if mine.row_key is None or mine.mapping is not form.mapping or mine.key_kinds != form.key_kinds:
            return False
        if self._keyed < len(self.rows):
            self._keys.update(map(mine.row_key, self.rows[self._keyed :]))
            self._keyed = len(self.rows)
        return self._keys.isdisjoint(keys)


class Runs:
    """Collects runs, and sends them. It never waits: the caller does, if the pipeline is full.

    Args:
        pipeline: the pipeline to send through.
        settings: the settings of the transaction.
        apart: tables whose changes are sent one by one; None: those of all tables, in order.
    """

    def __init__(self, pipeline: Pipeline, settings: LocalSettings, apart: Collection[TableName] | None) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._apart = apart
        self._tables: dict[int, list[_Run]] = {}
        self._count = self._size = 0

    @property
    def has_sets(self) -> bool:
        """Whether changes may be sent in another order than they are added, in sets."""
        return self._apart is not None

    def add(self, form: Form, rows: list[Row], contexts: Sequence[ChangeContext], size: int, last: int) -> None:
        """Add changes.

        Args:
            form: their form.
            rows: their values, as :meth:`Form.read` returns them.
            contexts: the transaction of each.
            size: of their messages, in bytes.
            last: of the last one of these.
        """
        if self._apart is None or form.ordered:
            self.flush()
            self._send_each(form, rows, contexts, last)
            return
        if last > MOST_BYTES:
            self.flush_table(form.mapping)
            self._send_each(form, rows, contexts, last)
            return
        runs = self._tables.setdefault(form.mapping.table.tree, [])
        run = _joined(runs, form, rows)
        if run is None:
            run = _Run(form)
            runs.append(run)
        run.append(rows, contexts, size)
        self._size += size
        self._count += len(rows)
        if self._size >= MOST_BYTES or self._count >= _MOST_WAITING:
            self.flush()
        elif len(run.rows) >= MOST_ROWS:
            self.flush_table(form.mapping)

    def flush(self) -> None:
        """Send all runs."""
        if self._count:
            tables, self._tables = self._tables, {}
            self._count = self._size = 0
            for runs in tables.values():
                self._send_runs(runs)

    def flush_table(self, mapping: RelationMapping) -> None:
        """Send the runs of a table."""
        runs = self._tables.pop(mapping.table.tree, [])
        self._count -= sum(len(run.rows) for run in runs)
        self._size -= sum(run.size for run in runs)
        self._send_runs(runs)

    def _send_runs(self, runs: Sequence[_Run]) -> None:
        """Send the runs of a table."""
        if sum(len(run.rows) for run in runs) >= _LEAST and runs[0].form.mapping.table.name not in (self._apart or ()):
            _omit_overwritten(runs)
        for run in runs:
            if run.rows:
                self._send(run)

    def _send(self, run: _Run) -> None:
        form, rows, contexts = run.form, run.rows, run.contexts
        table = form.mapping.table
        size = run.size // len(rows)
        omitted = run.omitted
        if form.together is None or self._apart is None or table.name in self._apart:
            self._send_each(form, rows, contexts, size)
            return
        for places in _sets(form, rows):
            chosen = [rows[place] for place in places]
            from_transactions = [contexts[place] for place in places]
            if len(chosen) < _LEAST and not run.omitted:
                self._send_each(form, chosen, from_transactions, size)
                continue
            values, formats = form.set_of(chosen)
            if form.together.finds:
                self._settings.find_set(table)
            else:
                self._settings.change(table)
            context = SetContext(from_transactions[0], from_transactions[-1], omitted)
            omitted = 0
            self._pipeline.send(form.together, context, values, formats, size * len(chosen))

    def _send_each(self, form: Form, rows: Sequence[Row], contexts: Sequence[ChangeContext], size: int) -> None:
        self._settings.change(form.mapping.table)
        send, statement, formats, values = self._pipeline.send, form.single, form.formats, form.values
        large = size > MOST_BYTES
        for row, context in zip(rows, contexts, strict=True):
            send(statement, context, values(row, large=large), formats, size)


def _joined(runs: Sequence[_Run], form: Form, rows: Sequence[Row]) -> _Run | None:
    """The run that changes may join."""
    if not runs or runs[-1].form is form:
        return runs[-1] if runs else None
    if form.row_key is None or all(run.form is not form for run in runs[-_LOOK_BACK:]):
        return None
    keys = set(map(form.row_key, rows))
    for run in reversed(runs):
        if run.form is form:
            return run
        if not run.is_apart_from(form, keys):
            return None
    return None


def _omit_overwritten(runs: Sequence[_Run]) -> None:
    """Omit the UPDATEs of a table's runs that need not be made."""
    later: dict[object, _Run] = {}
    known: tuple[RelationMapping, bytes] | None = None
    for run in reversed(runs):
        form = run.form
        if form.row_key is None or form.together is None or known != (form.mapping, form.key_kinds):
            # equal keys may differ in their bytes
            later.clear()
            known = form.mapping, form.key_kinds
        if form.row_key is None or form.together is None:
            continue
        keys = list(map(form.row_key, run.rows))
        if form.not_null is None or (len(set(keys)) == len(keys) and later.keys().isdisjoint(keys)):
            later.update(dict.fromkeys(keys, run))
            continue
        kept = []
        for place in reversed(range(len(keys))):
            after = later.get(keys[place])
            if after is not None and after.form.overwrites(form) and form.accepts(run.rows[place]):
                after.omitted += 1
            else:
                later[keys[place]] = run
                kept.append(place)
        if len(kept) < len(keys):
            run.keep(kept[::-1])


def _sets(form: Form, rows: Sequence[Row]) -> Iterable[Sequence[int]]:
    """Divide a run into sets, so that no key comes twice in one. Returns the places of their rows."""
    if form.key is None:
        return [range(len(rows))]
    keys = list(map(form.key, rows))
    if len(set(keys)) == len(keys):
        return [range(len(rows))]
    return _by_turn(keys) if form.row_key is not None else _by_place(keys)


def _by_place(keys: Sequence[object]) -> list[range]:
    """Sets of consecutive changes."""
    starts = [0]
    seen: set[object] = set()
    for place, key in enumerate(keys):
        if key in seen:
            starts.append(place)
            seen.clear()
        seen.add(key)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)]


def _by_turn(keys: Sequence[object]) -> list[list[int]]:
    """The first changes of all rows, then their second changes, and so on."""
    sets: list[list[int]] = []
    turns: dict[object, int] = {}
    for place, key in enumerate(keys):
        turn = turns.get(key, 0)
        turns[key] = turn + 1
        if turn == len(sets):
            sets.append([])
        sets[turn].append(place)
    return sets
