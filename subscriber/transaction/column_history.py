"""Which columns a Relation message describes: known columns, the publisher's catalog and the message are compared. Pure.

A message names the columns of a table at one transaction, in the order of their numbers (``pg_attribute.attnum``), but without the
numbers. A number is never used twice. So a known number with another name is a renamed column, and only numbers tell a rename from DROP
and ADD. The numbers of the message are found from two states with numbers: what is known, which is the same age or older, and the
catalog, which is the same age or later:

* A column that both have was there all the time, so the message has it.
* A column that only the first one has was dropped before or after the message.
* A column that only the catalog has (its number is higher than all known ones) was added before or after it. Numbers grow: if one that
  still exists was added after the message, then so were all later ones.
* ``version`` is ``pg_attribute.xmin``. If it did not change since a time before the message, then neither did the column.
* Changes wait for ALTER TABLE, and ALTER TABLE waits for them. So a transaction that was committed after the catalog was read has at least
  what was read.

If exactly one choice of numbers fits, it is certain. Otherwise nothing is guessed: :class:`Uncertain`. DROP and ADD of the last column
between two messages is such a case, because the column may as well have been renamed first, and dropped after the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["Attribute", "Attributes", "ColumnChanges", "KnownColumn", "KnownColumns", "Uncertain", "changed_columns", "known_of"]

Described = Sequence[tuple[str, str]]
"""The columns of a Relation message: name and type."""


class Uncertain(Exception):
    """The columns of a message cannot be told with certainty. The text says why."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One column in the publisher's catalog.

    Attributes:
        number: ``attnum``.
        name: its name.
        type: its type, as ``format_type`` writes it.
        version: ``xmin`` of its row.
        dropped: whether it was dropped.
        published: whether changes have it.
    """

    number: int
    name: str
    type: str
    version: int
    dropped: bool = False
    published: bool = True


@dataclass(frozen=True, slots=True)
class Attributes:
    """The columns of one table in the publisher's catalog.

    Attributes:
        relation_id: the table's oid.
        lsn: what was committed there when they were read was committed before this.
        all: by number, in its order, with those that were dropped.
        files: the files of the table and its partitions. Others if it was rewritten.
    """

    relation_id: int
    lsn: Lsn
    all: tuple[Attribute, ...]
    files: str = ""

    @property
    def published(self) -> Described:
        """Those that changes have."""
        return [(each.name, each.type) for each in self.all if each.published and not each.dropped]


@dataclass(frozen=True, slots=True)
class KnownColumn:
    """A column of the last known state.

    Attributes:
        number, name, type, version: as in :class:`Attribute`.
        lsn: the column has this version since then, or longer.
    """

    number: int
    name: str
    type: str
    version: int
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class KnownColumns:
    """The last known state of a table's columns.

    Attributes:
        relation_id: the table's oid.
        since: it holds for transactions that are committed after this.
        highest: the highest number that any column had.
        columns: in the order of their numbers.
        read: when the catalog was read last.
        live, gone: the numbers of the published columns, and of the dropped ones, that were found then.
        files: the files of the table at a time when it had none of the columns that are still to be added.
        target: number and name of the target's columns that belong to these, and of those that must not be taken for a new one: the target
            has kept them, or had them when the columns were learned.
    """

    relation_id: int
    since: Lsn
    highest: int
    columns: tuple[KnownColumn, ...]
    read: Lsn
    live: tuple[int, ...]
    gone: tuple[int, ...]
    files: str = ""
    target: tuple[tuple[int, str], ...] = ()

    def text(self) -> str:
        """The state as text, for :meth:`parse`."""
        columns = [[each.number, each.name, each.type, each.version, str(each.lsn)] for each in self.columns]
        return json.dumps(
            {
                "relation": self.relation_id,
                "since": str(self.since),
                "highest": self.highest,
                "columns": columns,
                "read": str(self.read),
                "live": self.live,
                "gone": self.gone,
                "files": self.files,
                "target": self.target,
            },
            ensure_ascii=True,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a state.

        Raises:
            ValueError, LookupError, TypeError: it is none.
        """
        found = json.loads(text)
        columns = tuple(
            KnownColumn(number, name, type_name, version, Lsn.parse(lsn)) for number, name, type_name, version, lsn in found["columns"]
        )
        return cls(
            found["relation"],
            Lsn.parse(found["since"]),
            found["highest"],
            columns,
            Lsn.parse(found["read"]),
            tuple(found["live"]),
            tuple(found["gone"]),
            found["files"],
            tuple((number, name) for number, name in found["target"]),
        )


@dataclass(frozen=True, slots=True)
class ColumnChanges:
    """What changed between the known columns and those of a message. Names are the publisher's.

    Attributes:
        known: the new state.
        dropped: names of dropped columns.
        renamed: the new name by the old one.
        retyped: old and new type by the new name.
        added: number and name of each new column.
    """

    known: KnownColumns
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None
    retyped: Mapping[str, tuple[str, str]] | None = None
    added: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.renamed or self.retyped or self.added)


def known_of(catalog: Attributes) -> KnownColumns:
    """The state that the catalog has. It holds for transactions that are committed after it was read."""
    found = [each for each in catalog.all if each.published and not each.dropped]
    columns = tuple(KnownColumn(each.number, each.name, each.type, each.version, catalog.lsn) for each in found)
    highest = max((each.number for each in catalog.all), default=0)
    gone = tuple(each.number for each in catalog.all if each.dropped)
    return KnownColumns(
        catalog.relation_id, catalog.lsn, highest, columns, catalog.lsn, tuple(each.number for each in found), gone, catalog.files
    )


def changed_columns(known: KnownColumns, catalog: Attributes, described: Described, final_lsn: Lsn) -> ColumnChanges:
    """Compare.

    Args:
        known: the last known state.
        catalog: read after the transaction was committed.
        described: the columns of the message.
        final_lsn: final LSN of the message's transaction.

    Raises:
        Uncertain: no choice of numbers fits, or more than one.
    """
    numbers = _numbers(known, catalog, described, final_lsn)
    now = {each.number: each for each in catalog.all}
    before = {each.number: each for each in known.columns}
    columns = []
    for number, (name, type_name) in zip(numbers, described, strict=True):
        old, attribute = before.get(number), now[number]
        lsn = old.lsn if old is not None and old.version == attribute.version else catalog.lsn
        columns.append(KnownColumn(number, name, type_name, attribute.version, lsn))
    dropped = tuple(each.name for each in known.columns if each.number not in numbers)
    renamed = {before[each.number].name: each.name for each in columns if each.number in before and before[each.number].name != each.name}
    retyped = {
        each.name: (before[each.number].type, each.type)
        for each in columns
        if each.number in before and before[each.number].type != each.type
    }
    added = tuple((each.number, each.name) for each in columns if each.number not in before)
    latest = known_of(catalog)
    highest = max([known.highest, *numbers])
    is_complete = all(each.dropped or each.number <= highest for each in catalog.all)
    state = replace(
        known,
        highest=highest,
        columns=tuple(columns),
        read=latest.read,
        live=latest.live,
        gone=latest.gone,
        files=latest.files if is_complete else known.files,
    )
    return ColumnChanges(state, dropped, renamed, retyped, added)


def _numbers(known: KnownColumns, catalog: Attributes, described: Described, final_lsn: Lsn) -> list[int]:
    """The number of each described column."""
    now = {each.number: each for each in catalog.all}
    before = {each.number: each for each in known.columns}
    if catalog.relation_id != known.relation_id or before.keys() - now.keys():
        raise Uncertain("it is another table than before")
    choice: list[tuple[Attribute, bool, bool]] = []  # the attribute, whether it must be there, whether it is as it is now
    for each in catalog.all:
        live = each.published and not each.dropped
        old = before.get(each.number)
        if old is None and each.number <= known.highest:
            if live:
                raise Uncertain(f'the publication has got column "{each.name}" after the table')
            continue
        if old is not None and not each.published and not each.dropped:
            raise Uncertain(f'column "{each.name}" has left the publication')
        if old is None and not live and not each.dropped:
            continue  # generated, or not in the column list
        seen = known.read != INVALID_LSN and final_lsn > known.read
        if seen and each.number in known.gone:
            continue
        must = live and (old is not None or (seen and each.number in known.live))
        choice.append((each, must, old is not None and live and old.version == each.version and final_lsn > old.lsn))
    found = _choices(choice, described, known.highest)
    if not found:
        raise Uncertain("the publisher's catalog does not have them, or not yet")
    if len(found) > 1:
        raise Uncertain("columns were added and dropped, and the publisher's catalog shows only the result")
    return found[0]


def _choices(choice: Sequence[tuple[Attribute, bool, bool]], described: Described, highest: int) -> list[list[int]]:
    """The choices of numbers that fit, at most two."""
    # per number of described columns that are assigned, and whether an added column that still exists was left out: at most two choices
    states: dict[tuple[int, bool], list[list[int]]] = {(0, False): [[]]}
    for attribute, must, settled in choice:
        following: dict[tuple[int, bool], list[list[int]]] = {}
        is_new = attribute.number > highest
        for (count, left_out), chosen in states.items():
            fits = count < len(described) and (not settled or described[count] == (attribute.name, attribute.type))
            if fits and not (is_new and left_out):
                following.setdefault((count + 1, left_out), []).extend([*each, attribute.number] for each in chosen)
            if not must:
                following.setdefault((count, left_out or (is_new and not attribute.dropped)), []).extend(chosen)
        states = {state: chosen[:2] for state, chosen in following.items()}
    found = [each for (count, _), chosen in states.items() if count == len(described) for each in chosen]
    return found[:2]
