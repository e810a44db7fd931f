"""Runs: changes of one relation and one kind that follow each other, and differ in nothing but their values. The hot path.

Most changes are such: an INSERT, an UPDATE that left the key as it was and sends every value, a DELETE that sends the key. They are read
many at a time, straight from the messages' bytes into vectors, with no object for any of them. The first that is anything else ends the
run: :class:`~subscriber.sinks.sqlalchemy.relation_plan.RelationPlan` reads it by itself, or says what is wrong with it. Either way the same
statement and the same vector come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from struct import Struct
from typing import Final

from subscriber.protocol.messages import Tag
from subscriber.protocol.tuples import read_alike
from subscriber.sinks.sqlalchemy.relation_plan import RelationPlan
from subscriber.sinks.sqlalchemy.statements import Statement

__all__ = ["Run", "RunReader"]

_MOST: Final = 500
"""Changes of a run: what was made of them is looked at in between, lest it grow too large."""
_HEADER: Final = Struct(">IcH").pack
_NEW: Final = b"N"
_KEY: Final = b"K"


@dataclass(slots=True)
class Run:
    """Changes that one statement makes, in order.

    Attributes:
        statement: it.
        vectors: their values.
        key: of a vector, what tells which row it touches, and the only one; None: that cannot be said.
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
            records: of a transaction.
            start: number of the first one.
            stop: number behind the last one.
            tag: of the first one: INSERT, UPDATE or DELETE.
            offset: behind tag and xid.

        Returns:
            None if that record is to be read by itself.

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
