"""Reads runs: consecutive changes of one relation and one kind that differ only in their values. This is the hot path.

Most changes are in runs: INSERTs, UPDATEs that do not change the key and send every value, DELETEs that send the key. The bytes of a run's
messages are converted directly to vectors, without an object for each change. Any other change ends the run.
:class:`~subscriber.sinks.sqlalchemy.apply.relation_plan.RelationPlan` then reads that change alone, or raises its error. Both ways give the
same statement and the same vector for a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from typing import Final

from subscriber.protocol.messages import Tag
from subscriber.protocol.tuples import read_alike
from subscriber.sinks.sqlalchemy.apply.relation_plan import RelationPlan
from subscriber.sinks.sqlalchemy.apply.statements import Statement

__all__ = ["Run", "RunReader"]

_MOST: Final = 500
"""The largest number of changes in a run, so that the caller can check the size of its groups in between."""
_HEADER: Final = Struct(">IcH").pack
_NEW: Final = b"N"
_KEY: Final = b"K"


@dataclass(slots=True)
class Run:
    """Changes that one statement makes, in order.

    Attributes:
        statement: the statement.
        vectors: their values.
        key: returns the key of the only row that a vector's change touches; None: the key is not known.
    """

    statement: Statement
    vectors: list[tuple[object, ...]]
    key: Callable[[Sequence[object]], object] | None


class RunReader:
    """Reads the runs of one relation."""

    def __init__(self, plan: RelationPlan) -> None:
        self._plan = plan
        width = plan.width
        self._nothing: tuple[object, ...] = (None,) * width
        new, old = (_HEADER(plan.remote.relation_id, announced, width) for announced in (_NEW, _KEY))
        self._headers: dict[int, bytes] = {Tag.INSERT: new, Tag.UPDATE: new, Tag.DELETE: old}
        self._new_key = self._old_key = None
        if plan.key is not None:
            self._new_key = itemgetter(*plan.key)
            self._old_key = itemgetter(*(width + number for number in plan.key))

    def read(self, records: Sequence[bytes], start: int, stop: int, tag: int, offset: int) -> Run | None:
        """Read the run that begins with a record.

        Args:
            records: the records of a transaction.
            start: the number of the first record to read.
            stop: the number after the last one.
            tag: the tag of the first one: INSERT, UPDATE or DELETE.
            offset: where a record continues after its tag and xid.

        Returns:
            None if the first record must be read alone.

        Raises:
            RelationError: there is no statement for such changes.
        """
        plan = self._plan
        if tag != Tag.INSERT and not plan.by_key:
            return None
        header = self._headers[tag]
        kind, binds = plan.reading
        places = range(start, min(stop, start + _MOST))
        rows = read_alike(records, places, tag=tag, offset=offset, header=header, kind=kind, binds=binds)
        if not rows:
            return None
        if tag == Tag.INSERT:
            return Run(plan.insert_statement(), rows, self._new_key)
        if tag == Tag.UPDATE:
            return Run(plan.update_statement(), [row + row for row in rows], self._new_key)
        nothing = self._nothing
        return Run(plan.delete_statement(), [nothing + row for row in rows], self._old_key)
