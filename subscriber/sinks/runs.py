"""Runs: changes of one form. How every target reads changes, and in which order it may make them.

A *form* is what changes have in common that differ only in their values: the kind of message, the relation, the kind of each value, and
what the target does with them. The first change of a form is decoded. The changes after it are read by the form, without an object for
each (:func:`~subscriber.protocol.tuples.read_rows`), up to the first change of another form.

A *run* is changes of one form, in order. A target makes it as a whole: PostgreSQL by a statement with an array for each column, a database
of SQLAlchemy by ``executemany``, a lake as Arrow columns. Its values stay as they came until then.

**Order.** A batch is one transaction of the target, so its changes may be made in another order if the result is the same: the rows, the
counters, the errors. A lake keeps all changes, in order, and needs none of this. For the others, :class:`Runs` follows these rules:

1. *Between tables no order is kept.* Foreign keys are not checked for replicated changes. The tables of a partition tree count as one
   table, because they share rows.
2. *Within a table, runs keep their order, and changes of one row keep theirs.* A change joins an earlier run of its form only if every run
   after it has rows with other keys. Of some consecutive changes, all INSERTs may come first and all DELETEs last, if the changes of each
   row are in that order already (:func:`keeps_order`). So a form has a key (:attr:`Form.keys`) only if different keys are different rows,
   if nothing but the key makes rows of the table unique, and if a change touches only the row with this key.
3. *A change without a key keeps its place in its table.* It joins the latest run of the table, if that has its form. Such changes are an
   UPDATE of a key, and the changes of a table that has no key or a second unique index.
4. *Some changes keep their place among all changes.* The target makes everything before them first. Such are TRUNCATE, the changes of a
   table in which a trigger or a function could see the order (:attr:`Form.ordered`), and what follows a savepoint.
5. *After an error* the batch is rolled back. The target makes its changes one by one, in their order, so that the error names the right
   change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Generic, Self, TypeVar

from subscriber.errors import ProtocolError
from subscriber.protocol.messages import BINARY, NULL, TEXT, UNCHANGED, Delete, Insert, Tag, TupleData, Update
from subscriber.protocol.tuples import read_rows
from subscriber.sinks.apply_counters import ChangeContext

__all__ = ["CHANGES", "IGNORED", "Form", "LatestForms", "Part", "Row", "Run", "Runs", "is_plain", "keeps_order", "old_and_new", "parts_of"]

CHANGES: Final = frozenset({Tag.INSERT, Tag.UPDATE, Tag.DELETE})
"""Tags of the changes of rows."""
IGNORED: Final = frozenset({Tag.TYPE, Tag.MESSAGE, Tag.ORIGIN})
"""Tags of messages that change nothing in a target."""
_HEADER: Final = Struct(">IcH").pack
_HEADED: Final = 8
"""The bytes before the first value, without the xid: tag, relation, marker of the tuple, number of columns."""
_LOOK_BACK: Final = 8
"""How many runs of its table a change may be moved past."""
_NO_LIMIT: Final = 2**62

Row = tuple[bytes | None, ...]
Part = tuple[bytes, bytes]
"""A tuple of a message: the bytes before its first value, and the kind of each value, as :func:`read_rows` takes them."""
F = TypeVar("F", bound="Form")


def old_and_new(message: Insert | Update | Delete, width: int, table: object) -> tuple[TupleData | None, TupleData | None]:
    """The old row, or its key, and the new row of a change; None for one that it lacks.

    Args:
        message: the change.
        width: the number of the relation's columns.
        table: the name of the table, for errors.

    Raises:
        ProtocolError: a row has another number of columns, or a DELETE has no old row.
    """
    old = None if isinstance(message, Insert) else message.key or message.old
    new = None if isinstance(message, Delete) else message.new
    if old is None and new is None:
        raise ProtocolError("a Delete message without an old row")
    for row in (old, new):
        if row is not None and len(row.kinds) != width:
            raise ProtocolError(f'a row of relation "{table}" has {len(row.kinds)} columns where its Relation message has {width}')
    return old, new


def is_plain(message: Insert | Update | Delete, key: Sequence[int] | None) -> bool:
    """Whether changes of this kind are read as runs: an INSERT, and a change that finds its row by the key and does not change the key.

    Args:
        message: the change.
        key: the columns of the key that finds rows; None: there is none.
    """
    match message:
        case Insert():
            return True
        case Delete() | Update(key=None, old=None):
            return key is not None
        case Update(new=new, key=None, old=TupleData() as old) if key is not None:
            return UNCHANGED not in old.kinds and all(old.values[n] == new.values[n] and old.kinds[n] == new.kinds[n] for n in key)
    return False


def parts_of(message: Insert | Update | Delete) -> tuple[Part, ...]:
    """How to read a change, and those that differ from it only in their values."""
    tuples: list[tuple[bytes, TupleData | None]] = [] if isinstance(message, Insert) else [(b"K", message.key), (b"O", message.old)]
    tuples += [] if isinstance(message, Delete) else [(b"N", message.new)]
    parts: list[Part] = []
    for marker, row in tuples:
        if row is not None:
            header = _HEADER(message.relation_id, marker, len(row.kinds))
            # a NULL may replace a value of either format
            usual = BINARY if BINARY in row.kinds else TEXT
            parts.append((header[4:] if parts else header, row.kinds.replace(bytes([NULL]), bytes([usual]))))
    return tuple(parts)


@dataclass(slots=True, eq=False, kw_only=True)
class Form:
    """What the changes of a run have in common. Each kind of target has a subclass.

    Attributes:
        tag: the tag of the messages.
        parts: how to read them; empty: only one by one, from the decoded messages.
        same: after a whole old row, the columns whose values the new row must have too. Then only the new row is kept.
        most: the largest size of the messages that are read together, in bytes.
        large: the form of a larger message; None: the same.
        table: identifies the table: changes of different tables cannot touch the same row.
        keys: returns the key of each row; None: the changes keep their place in their table. See the module.
        key_space: only keys of forms with an equal ``key_space`` can be compared.
        ordered: the changes keep their place among all changes.
    """

    tag: int
    parts: tuple[Part, ...]
    same: Sequence[int] = ()
    most: int = _NO_LIMIT
    large: Self | None = None
    table: Hashable = None
    keys: Callable[[Sequence[Any]], Iterable[object]] | None = None
    key_space: object = None
    ordered: bool = False

    def read(self, records: Sequence[bytes], places: range, offset: int) -> tuple[Self, list[Any]]:
        """Read the records from the first one on that have this form.

        Args:
            records: messages.
            places: which of them to read.
            offset: where a record continues after tag and xid.

        Returns:
            The form of the rows, and their values: a :data:`Row` for each, unless a subclass reads them in another way.
        """
        if self.large is not None and len(records[places.start]) > self.most:
            return self.large.read(records, places, offset)
        rows = read_rows(records, places, tag=self.tag, offset=offset, parts=self.parts, size=self.most)
        if self.same and len(self.parts) > 1:
            return self, _new_rows(rows, len(self.parts[0][1]), self.same)
        return self, rows


def _new_rows(rows: list[Row], width: int, same: Sequence[int]) -> list[Row]:
    """The new rows of UPDATEs with whole old rows, up to the first in which one of these columns changes."""
    found: list[Row] = []
    for row in rows:
        for index in same:
            if row[index] != row[width + index]:
                return found
        found.append(row[width:])
    return found


class LatestForms(Generic[F]):
    """The form of the latest change of each relation and kind: most likely the next change has it too."""

    def __init__(self) -> None:
        self._forms: dict[bytes, F] = {}

    def read(self, records: Sequence[bytes], places: range, offset: int) -> tuple[F, list[Any]] | None:
        """Read the run that begins with a record; None: its form is not known here."""
        record = records[places.start]
        form = self._forms.get(record[:_HEADED] if offset == 1 else record[:1] + record[offset : offset + _HEADED - 1])
        if form is None:
            return None
        found = form.read(records, places, offset)
        return found if found[1] else None

    def add(self, form: F) -> None:
        """Use this form from now on."""
        self._forms[bytes([form.tag]) + form.parts[0][0]] = form

    def clear(self) -> None:
        """Forget all forms, because a relation was described again."""
        self._forms.clear()


class Run(Generic[F]):
    """Changes of one form, in order.

    Attributes:
        form: their form.
        rows: their values, as :meth:`Form.read` gives them.
        contexts: the transaction of each.
        size: of their messages, in bytes.
    """

    __slots__ = ("_keyed", "_keys", "contexts", "form", "rows", "size")

    def __init__(self, form: F) -> None:
        self.form = form
        self.rows: list[Any] = []
        self.contexts: list[ChangeContext] = []
        self.size = 0
        self._keys: set[object] = set()
        self._keyed = 0

    def keep(self, places: Collection[int]) -> None:
        """Remove the changes at all other places."""
        self.size = self.size * len(places) // len(self.rows)
        self.rows = [self.rows[place] for place in places]
        self.contexts = [self.contexts[place] for place in places]

    def add(self, rows: Sequence[Any], contexts: Sequence[ChangeContext], size: int, keys: Collection[object] | None) -> None:
        """Add changes. ``keys``: their keys, if they are known."""
        if keys is not None and self._keyed == len(self.rows):
            self._keys.update(keys)
            self._keyed += len(rows)
        self.rows += rows
        self.contexts += contexts
        self.size += size

    def is_independent_of(self, form: Form, keys: Collection[object]) -> bool:
        """Whether no change of the run is of a row with one of these keys of another form."""
        mine = self.form
        if mine.keys is None or mine.key_space != form.key_space:
            return False
        if self._keyed < len(self.rows):
            self._keys.update(mine.keys(self.rows[self._keyed :]))
            self._keyed = len(self.rows)
        return self._keys.isdisjoint(keys)


class Runs(Generic[F]):
    """The runs of a batch that are not made yet, by table.

    Attributes:
        count: number of their changes.
        size: of their messages, in bytes.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, list[Run[F]]] = {}
        self.count = self.size = 0

    def add(self, form: F, rows: Sequence[Any], contexts: Sequence[ChangeContext], size: int) -> Run[F]:
        """Add changes of one form; return the run that they joined or began.

        Args:
            form: their form.
            rows: their values.
            contexts: the transaction of each.
            size: of their messages, in bytes.
        """
        runs = self._tables.setdefault(form.table, [])
        run, keys = _joined(runs, form, rows)
        if run is None:
            run = Run(form)
            runs.append(run)
        run.add(rows, contexts, size, keys)
        self.count += len(rows)
        self.size += size
        return run

    def take(self) -> Iterable[list[Run[F]]]:
        """Remove all runs. Returns those of each table, in an order in which they may be made."""
        tables, self._tables = self._tables, {}
        self.count = self.size = 0
        return tables.values()

    def take_table(self, form: F) -> list[Run[F]]:
        """Remove the runs of a form's table."""
        runs = self._tables.pop(form.table, [])
        self.count -= sum(len(run.rows) for run in runs)
        self.size -= sum(run.size for run in runs)
        return runs


def keeps_order(parts: Sequence[tuple[Form, Sequence[Any], Sequence[int]]]) -> bool:
    """Whether the changes of each row keep their order if all changes of a part are made before those of the next one.

    Args:
        parts: changes of one table: their form, which has keys, their values, and their places in the original order, ascending.
    """
    latest: dict[object, int] = {}
    for form, rows, places in parts:
        if form.keys is None or form.key_space != parts[0][0].key_space:
            return False
        keys = list(form.keys(rows))
        first = dict(zip(reversed(keys), reversed(places), strict=True))
        if any(first[key] < latest[key] for key in latest.keys() & first.keys()):
            return False
        latest.update(zip(keys, places, strict=True))
    return True


def _joined(runs: Sequence[Run[F]], form: F, rows: Sequence[Any]) -> tuple[Run[F] | None, Collection[object] | None]:
    """The run that changes may join, and the keys of the changes if they were needed to find out."""
    if not runs or runs[-1].form is form:
        return (runs[-1] if runs else None), None
    if form.keys is None:
        return None, None
    for run in runs[-_LOOK_BACK:]:
        if run.form is form:
            break
    else:
        return None, None
    keys = set(form.keys(rows))
    for run in reversed(runs):
        if run.form is form:
            return run, keys
        if not run.is_independent_of(form, keys):
            break
    return None, keys
