"""Send runs of changes: a long run becomes a few statements, each for a set of rows.

Runs wait until they are large enough, or until the order requires that they are sent (:mod:`subscriber.sinks.runs`). A run may extend over
several transactions of the publisher, because they are one transaction of the target. The rows, the counters and the errors are the same as
if each change was made in order.

*An UPDATE need not be made* if a later change of its run or of a later run overwrites or deletes its row, and the target would certainly
accept it (:meth:`Form.accepts`). It is counted. It is made if the later change finds no row, because then the batch is applied again.

A short run is sent one statement per change. So are very large rows, changes that no set can make, and the changes of tables that are
``without_sets``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from subscriber.interfaces import TableName
from subscriber.sinks.apply_counters import ChangeContext, Counted
from subscriber.sinks.postgres.apply.error_reports import SetContext
from subscriber.sinks.postgres.apply.forms import MOST_BYTES, Form
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.runs import Run, Runs

__all__ = ["MOST_ROWS", "SetSender"]

MOST_ROWS: Final = 1000
_MOST_WAITING: Final = 4000
"""The number of changes of all tables that may wait."""
_LEAST: Final = 8
"""The shortest run for which one statement is cheaper (``make bench SINK=sets``)."""
_LEAST_FOUND: Final = 16
"""The same if the statement finds its rows: it is planned each time."""


class SetSender:
    """Collects runs, and sends them. It never waits: the caller does, if the pipeline is full.

    Args:
        pipeline: the pipeline to send through.
        settings: the settings of the transaction.
        without_sets: tables whose changes are sent one by one; None: those of all tables, in order.
        counted: counts the bytes of the changes.
    """

    def __init__(self, pipeline: Pipeline, settings: LocalSettings, without_sets: Collection[TableName] | None, counted: Counted) -> None:
        self._counted = counted
        self._pipeline = pipeline
        self._settings = settings
        self._without_sets = without_sets
        self._runs: Runs[Form] = Runs()

    @property
    def keeps_order(self) -> bool:
        """Whether changes are sent in the order in which they are added, one by one."""
        return self._without_sets is None

    def add(self, form: Form, rows: Sequence[Any], contexts: Sequence[ChangeContext], size: int) -> None:
        """Add changes. The arguments are those of :meth:`Runs.add`."""
        in_order = self._without_sets is None or form.ordered
        if in_order:
            self.flush()
        run = self._runs.add(form, rows, contexts, size)
        if in_order or self._runs.size >= MOST_BYTES or self._runs.count >= _MOST_WAITING:
            self.flush()
        elif len(run.rows) >= MOST_ROWS:
            self._send_runs(self._runs.take_table(form))

    def flush(self) -> None:
        """Send all runs."""
        if self._runs.count:
            for runs in self._runs.take():
                self._send_runs(runs)

    def _send_runs(self, runs: Sequence[Run[Form]]) -> None:
        """Send the runs of a table, or of the tables of a partition tree."""
        for run in runs:
            self._counted.sent(run.form.single.table, run.size)
        some = sum(len(run.rows) for run in runs) >= _LEAST and any(run.form.not_null is not None for run in runs)
        omitted = _omit_overwritten(runs, self._in_sets) if some else {}
        for run in runs:
            if not run.rows:
                continue
            if self._in_sets(run.form):
                self._send_sets(run, omitted.get(run, 0))
            else:
                self._send_each(run.form, run.rows, run.contexts, run.size // len(run.rows))

    def _in_sets(self, form: Form) -> bool:
        """Whether changes are sent in sets."""
        return self._without_sets is not None and form.together is not None and form.mapping.table.name not in self._without_sets

    def _send_sets(self, run: Run[Form], omitted: int) -> None:
        """Send a run in sets. ``omitted``: number of UPDATEs, of this run or of earlier ones, that its changes overwrite."""
        form, statement = run.form, run.form.together
        assert statement is not None
        size = run.size // len(run.rows)
        least = 0 if omitted else _LEAST_FOUND if statement.finds else _LEAST
        for places in _sets(form, run.rows):
            rows, contexts = run.rows, run.contexts
            if len(places) < len(run.rows):
                rows, contexts = [run.rows[place] for place in places], [run.contexts[place] for place in places]
            if len(rows) < least:
                self._send_each(form, rows, contexts, size)
                continue
            values, formats = form.set_of(rows)
            each = contexts if statement.resolves is not None else ()
            if statement.resolves is not None and statement.resolves.timed:
                # a batch is one transaction then
                values.append(_commit_time(contexts[0]))
                formats.append(0)
            if statement.finds:
                self._settings.find_set(form.mapping.table)
            else:
                self._settings.change(form.mapping.table)
            self._pipeline.send(statement, SetContext(contexts[0], contexts[-1], omitted, each), values, formats, size * len(rows))
            omitted = 0

    def _send_each(self, form: Form, rows: Sequence[Any], contexts: Sequence[ChangeContext], size: int) -> None:
        self._settings.change(form.mapping.table)
        send, statement, formats = self._pipeline.send, form.single, form.formats
        parameters = form.parameters(rows)
        if statement.resolves is not None and statement.resolves.timed:
            formats = None if formats is None else (*formats, 0)
            for values, context in zip(parameters, contexts, strict=True):
                send(statement, context, [*values, _commit_time(context)], formats, size)
            return
        for values, context in zip(parameters, contexts, strict=True):
            send(statement, context, values, formats, size)


def _commit_time(context: ChangeContext) -> bytes | None:
    return None if context.commit_time is None else b"%d" % context.commit_time


def _omit_overwritten(runs: Sequence[Run[Form]], in_sets: Callable[[Form], bool]) -> dict[Run[Form], int]:
    """Remove the UPDATEs that need not be made. Returns how many each later run overwrites.

    Only a set fails if it does not find a row, so both changes are in sets.
    """
    omitted: dict[Run[Form], int] = {}
    later: dict[object, Run[Form]] = {}
    key_space: object = None
    for run in reversed(runs):
        form = run.form
        if form.keys is None or not in_sets(form) or key_space != form.key_space:
            # equal keys may differ in their bytes
            later.clear()
            key_space = form.key_space
        if form.keys is None or not in_sets(form):
            continue
        keys = list(form.keys(run.rows))
        if form.not_null is None or (len(set(keys)) == len(keys) and later.keys().isdisjoint(keys)):
            later.update(dict.fromkeys(keys, run))
            continue
        kept = []
        for place in reversed(range(len(keys))):
            after = later.get(keys[place])
            if after is not None and after.form.overwrites(form) and form.accepts(run.rows[place]):
                omitted[after] = omitted.get(after, 0) + 1
            else:
                later[keys[place]] = run
                kept.append(place)
        if len(kept) < len(keys):
            run.keep(kept[::-1])
    return omitted


def _sets(form: Form, rows: list[Any]) -> Iterable[Sequence[int]]:
    """Divide a run into sets, so that no key comes twice in one. Returns the places of their rows."""
    if form.find is None:
        return [range(len(rows))]
    keys = form.find(rows)
    if len(set(keys)) == len(keys):
        return [range(len(rows))]
    return _by_turn(keys) if form.keys is not None else _by_place(keys)


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
