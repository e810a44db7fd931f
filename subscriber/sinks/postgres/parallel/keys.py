"""Which rows a group of transactions changes, to find groups that can be applied at the same time. Pure: no IO.

A row is known by its *keys*: the values of the columns of each unique index of the target. :class:`KeyReader` reads the keys of a group
from its raw messages: those of the new rows, and those of the old rows as far as the publisher sends them. That is always so for the key
that finds the row. Two groups *meet* in a table if they have a key in common, or if one of them changes the table in a way that its keys do
not describe. Then the changes with these keys are made in the order of the groups, and so are the changes of the later group that have
another key in common with one of them (:meth:`GroupKeys.late`).

A table is changed *as a whole*, and meets every other change of it, in these cases:

* A unique index has an expression, a column that the publisher does not send, a type whose equal values may differ in their bytes, or a
  nondeterministic collation. Or it is an exclusion constraint.
* UPDATE or DELETE may find several rows: the target has no key, or one that is unique only in each partition.
* INSERT leaves a column to its default, whose value may depend on the order: a sequence, the time.
* A large value in a unique index was not sent, because it did not change, but another column of the index was.
* The group has too many keys of the table (:data:`MOST_KEYS`).

INSERTs into a table without a unique index meet only such changes.

What is *not* in the keys: the value that an UPDATE or a DELETE removes from a unique index that is not the replica identity, since the
publisher does not send it. A later group that inserts this value may therefore be applied too early. Then the target rejects it, or lets it
wait (:mod:`subscriber.sinks.postgres.parallel.groups` says why that is enough).

Some groups have no keys at all: those with TRUNCATE, with a new description of a relation, or with changes of a table that
:class:`KeyReader` is not told to follow. Such a group is applied alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import BINARY, UNCHANGED, Delete, Insert, Relation, Tag, Update
from subscriber.protocol.tuples import places_by_header
from subscriber.sinks import runs
from subscriber.sinks.runs import IGNORED, LatestForms, Row, old_and_new, parts_of

__all__ = ["MOST_KEYS", "FollowedTable", "GroupKeys", "KeyReader", "Meeting", "UniqueKey"]

MOST_KEYS: Final = 50_000
"""The number of keys of one table that a group keeps."""
_MOST_STEPS: Final = 8
"""From a change to others that have a key in common with it, before all changes of the table wait."""
_NULL: Final = ()
"""The key NULL of one column, if NULLs are equal."""
_MOST_READ: Final = 1024**2
"""The size of the changes whose values are in memory once more, in bytes, to read their keys. Of a larger change, all of it."""


_Names = tuple[str, ...]
_Common = Mapping[_Names, set[object]]
Meeting = Mapping[int, _Common | None]
"""See :meth:`GroupKeys.meets`."""


@dataclass(frozen=True, slots=True)
class UniqueKey:
    """The key of a unique index.

    Attributes:
        names: its columns in the target: keys of the same columns are compared, also those of two partitions.
        columns: their places in the rows of the relation.
        numeric: which of them are numeric: 1.0 and 1.00 are equal.
        nulls_differ: rows with a NULL in the key are never equal.
    """

    names: tuple[str, ...]
    columns: tuple[int, ...]
    numeric: tuple[bool, ...]
    nulls_differ: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class FollowedTable:
    """A relation and its table in the target.

    Attributes:
        relation: the publisher's relation.
        tree: identifies the table. The tables of a tree of partitions count as one, because they share rows.
        keys: its unique indexes; None: each change is one of the whole table.
        finds_one: UPDATE and DELETE find the row by one of the keys, and no other row has this key.
        inserts_alone: INSERT leaves a column to a default that may depend on the order.
    """

    relation: Relation
    tree: int
    keys: tuple[UniqueKey, ...] | None
    finds_one: bool = True
    inserts_alone: bool = False


class _Changed:
    """The changes of one table: their keys by index, or the whole table.

    Attributes:
        places: of the changes in the group.
        whole: they are changes of the whole table.
        keys: of all changes, by the columns of the index.
    """

    __slots__ = ("_count", "_runs", "keys", "places", "whole")

    def __init__(self) -> None:
        self.places: list[int] = []
        self.whole = False
        self.keys: dict[_Names, set[object]] = {}
        self._count = 0
        # changes of one form: their places, and for each index their keys, in the same order
        self._runs: list[tuple[Sequence[int], list[tuple[_Names, list[object]]]]] = []

    def add(self, places: Sequence[int], columns: list[tuple[_Names, list[object]]]) -> None:
        self._runs.append((places, columns))
        for names, values in columns:
            found = self.keys.setdefault(names, set())
            before = len(found)
            found.update(values)
            found.discard(None)
            self._count += len(found) - before
        if self._count > MOST_KEYS:
            self.take_whole()

    def take_whole(self) -> None:
        self.whole = True
        self.keys.clear()
        self._runs.clear()

    def common(self, other: _Changed) -> _Common | None:
        """The keys in common; None: as a whole table."""
        if self.whole or other.whole:
            return None
        found = {names: keys & other.keys[names] for names, keys in self.keys.items() if names in other.keys}
        return {names: keys for names, keys in found.items() if keys}

    def with_keys(self, wanted: dict[_Names, set[object]]) -> Collection[int]:
        """The places of the changes with one of these keys, and of those that have a key in common with such a change, and so on.

        Returns all places if that goes further than :data:`_MOST_STEPS`.
        """
        found: set[int] = set()
        for _ in range(_MOST_STEPS):
            before = len(found)
            for places, columns in self._runs:
                for names, values in columns:
                    if keys := wanted.get(names):
                        found.update([place for place, value in zip(places, values, strict=True) if value in keys])
            if len(found) == before or all(len(columns) == 1 for _, columns in self._runs):
                return found
            for places, columns in self._runs:
                for names, values in columns:
                    more = {value for place, value in zip(places, values, strict=True) if place in found}
                    wanted.setdefault(names, set()).update(more - {None})
        return self.places


class GroupKeys:
    """The keys of a group."""

    def __init__(self) -> None:
        self._tables: dict[int, _Changed] = {}

    @property
    def tables(self) -> Mapping[int, int]:
        """The number of changes of each tree of tables."""
        return {tree: len(changed.places) for tree, changed in self._tables.items()}

    def add(self, form: _KeyForm, rows: Sequence[Row], places: Sequence[int]) -> None:
        """Add changes of one form. ``places``: theirs in the group."""
        changed = self._tables.get(form.tree)
        if changed is None:
            changed = self._tables[form.tree] = _Changed()
        changed.places += places
        if form.read_keys is None:
            changed.take_whole()
        elif not changed.whole:
            changed.add(places, [(key.names, read(rows)) for key, read in form.read_keys])

    def meets(self, other: GroupKeys) -> Meeting:
        """The trees of tables in which the groups meet, and the keys that they have in common there; None: they meet in a whole table."""
        mine, others = self._tables, other._tables
        found = {tree: mine[tree].common(others[tree]) for tree in mine.keys() & others.keys()}
        return {tree: common for tree, common in found.items() if common is None or common}

    def late(self, meetings: Iterable[Meeting]) -> set[int]:
        """The places of the changes that must wait for earlier groups, from :meth:`meets` with each of these.

        These are the changes with a key in common, and those of this group that have a key in common with such a change.
        """
        places: set[int] = set()
        wanted: dict[int, dict[_Names, set[object]]] = {}
        for meeting in meetings:
            for tree, common in meeting.items():
                if common is None:
                    places.update(self._tables[tree].places)
                    continue
                for names, keys in common.items():
                    wanted.setdefault(tree, {}).setdefault(names, set()).update(keys)
        for tree, keys_by_index in wanted.items():
            places.update(self._tables[tree].with_keys(keys_by_index))
        return places


@dataclass(slots=True, eq=False, kw_only=True)
class _KeyForm(runs.Form):
    """Changes that differ only in their values. ``read_keys``: None: they are changes of the whole table."""

    tree: int
    read_keys: Sequence[tuple[UniqueKey, Callable[[Sequence[Row]], list[object]]]] | None


class KeyReader:
    """Reads the keys of groups. It is valid until another Relation message comes.

    Args:
        tables: the followed tables by relation id.
    """

    def __init__(self, tables: Mapping[int, FollowedTable]) -> None:
        self._tables = tables
        self._forms: dict[object, _KeyForm] = {}
        self._latest: LatestForms[_KeyForm] = LatestForms()

    def read(self, records: Sequence[bytes]) -> GroupKeys | None:
        """The keys of the changes in these messages, which have no xid; None: the group must be applied alone.

        Raises:
            ProtocolError: an invalid message.
        """
        found = GroupKeys()
        place, count = 0, len(records)
        while place < count:
            groups, stop = places_by_header(records, place, count, 1, _MOST_READ)
            for places in groups.values():
                if not self._read_alike([records[each] for each in places], places, found):
                    return None
            if not groups:
                if not self._changes_nothing(records[place]):
                    return None
                stop += 1
            place = stop
        return found

    def _changes_nothing(self, record: bytes) -> bool:
        if record[:1] and record[0] in IGNORED:
            return True
        if record[:1] and record[0] == Tag.RELATION:
            message = decode(record, in_stream=False)
            known = self._tables.get(message.relation_id) if isinstance(message, Relation) else None
            return known is not None and known.relation == message
        return False

    def _read_alike(self, records: Sequence[bytes], places: Sequence[int], found: GroupKeys) -> bool:
        """Read changes that begin alike, with their places in the group. Return whether their table is followed."""
        place, count = 0, len(records)
        while place < count:
            read = self._latest.read(records, range(place, count), 1)
            if read is None:
                form = self._form(records[place])
                if form is None:
                    return False
                self._latest.add(form)
                read = form.read(records, range(place, count), 1)
            form, rows = read
            found.add(form, rows, places[place : place + len(rows)])
            place += len(rows)
            if not rows:
                return False
        return True

    def _form(self, record: bytes) -> _KeyForm | None:
        message = decode(record, in_stream=False)
        if not isinstance(message, Insert | Update | Delete):
            return None
        table = self._tables.get(message.relation_id)
        if table is None:
            return None
        old_and_new(message, len(table.relation.columns), table.relation.name)
        parts = parts_of(message)
        form = self._forms.get((message.relation_id, record[0], parts))
        if form is None:
            form = _KeyForm(tag=record[0], parts=parts, tree=table.tree, read_keys=_read_keys(message, table))
            self._forms[message.relation_id, record[0], parts] = form
        return form


def _read_keys(
    message: Insert | Update | Delete, table: FollowedTable
) -> Sequence[tuple[UniqueKey, Callable[[Sequence[Row]], list[object]]]] | None:
    """How to read the keys of changes with this form."""
    inserts = isinstance(message, Insert)
    if table.keys is None or (table.inserts_alone if inserts else not table.finds_one):
        return None
    width = len(table.relation.columns)
    old = None if isinstance(message, Insert) else message.key or message.old
    new = None if isinstance(message, Delete) else message.new
    whole_row = not isinstance(message, Insert) and message.key is None
    found = []
    for key in table.keys:
        if old is not None and (whole_row or all(table.relation.columns[column].key for column in key.columns)):
            if not _is_exact(key, old.kinds):
                return None
            found.append((key, _reading(key, 0)))
        if new is not None and any(new.kinds[column] != UNCHANGED for column in key.columns):
            if not _is_exact(key, new.kinds):
                return None
            found.append((key, _reading(key, 0 if old is None else width)))
    return found


def _is_exact(key: UniqueKey, kinds: bytes) -> bool:
    return all(
        kinds[column] != UNCHANGED and not (numeric and kinds[column] == BINARY)
        for column, numeric in zip(key.columns, key.numeric, strict=True)
    )


def _reading(key: UniqueKey, offset: int) -> Callable[[Sequence[Row]], list[object]]:
    """A function that reads the key of each row; None: no other row can have it. Keys of one column are values, others tuples."""
    columns = [offset + column for column in key.columns]
    get: Callable[[Row], Any] = itemgetter(*columns)
    alone = len(columns) == 1

    def normalized(row: Row) -> object:
        values = [_plain_number(row[column]) if numeric else row[column] for column, numeric in zip(columns, key.numeric, strict=True)]
        return values[0] if alone else tuple(values)

    read = normalized if any(key.numeric) else get
    if alone and key.nulls_differ:
        return lambda rows: [*map(read, rows)]
    if alone:
        return lambda rows: [_NULL if value is None else value for value in map(read, rows)]
    if key.nulls_differ:
        return lambda rows: [None if None in values else values for values in map(read, rows)]
    return lambda rows: [*map(read, rows)]


def _plain_number(value: bytes | None) -> bytes | None:
    """A numeric without the zeros at its end."""
    return value if value is None or b"." not in value else value.rstrip(b"0").rstrip(b".")
