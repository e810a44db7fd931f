"""Groups whose keys do not meet can be applied in either order: the rows and the errors are the same.

The target is modelled: rows with two unique indexes, and changes that fail or miss their row. The keys are those of the raw messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Message, Type
from subscriber.sinks.postgres.parallel import keys
from subscriber.sinks.postgres.parallel.keys import FollowedTable, GroupKeys, KeyReader, UniqueKey
from tests.support.examples import property_test
from tests.support.sink_postgres import UNCHANGED, Binary, Remote, truncate

NUMERIC = 1700
PRIMARY = UniqueKey(("id",), (0,), (False,))
MAIL = UniqueKey(("mail",), (1,), (False,))
PAIR = UniqueKey(("a", "b"), (2, 3), (False, False))
COLUMNS = ("*id", "mail", "a", "b", "v")
PLAIN = Remote("t", *COLUMNS)
FULL = Remote("t", *COLUMNS, identity="f")

Values = tuple[int, str | None, int, int, int]
Rows = dict[int, Values]


@dataclass(frozen=True)
class Change:
    """A change, with the row that the publisher had before and has after it."""

    old: Values | None
    new: Values | None

    def message(self, remote: Remote) -> Message:
        if self.old is None:
            assert self.new is not None
            return remote.insert(*self.new)
        old = self.old if remote.full else (self.old[0], None, None, None, None)
        if self.new is None:
            return remote.delete(*old)
        return remote.update(*self.new, old=old if remote.full or self.old[0] != self.new[0] else None)


def collides(rows: Rows, new: Values) -> bool:
    return any(other[0] == new[0] or (new[1] is not None and other[1] == new[1]) or other[2:4] == new[2:4] for other in rows.values())


def apply(rows: Rows, changes: Sequence[Change]) -> tuple[object, Rows]:
    """What a group does: its error, or the number of rows that it does not find, and the rows after it."""
    after, missing = dict(rows), 0
    for change in changes:
        if change.old is not None and after.pop(change.old[0], None) is None:
            missing += 1
        elif change.new is not None:
            if collides(after, change.new):
                return "error", rows
            after[change.new[0]] = change.new
    return missing, after


def both(rows: Rows, first: Sequence[Change], second: Sequence[Change]) -> tuple[object, object, Rows]:
    one, rows = apply(rows, first)
    two, rows = apply(rows, second)
    return one, two, rows


SMALL = st.integers(0, 4)
VALUES = st.tuples(SMALL, st.none() | st.sampled_from("xyz"), SMALL, SMALL, SMALL)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rows, list[Change], list[Change]]:
    """The rows of publisher and target, and two groups of changes that the publisher has made one after the other."""
    begin: Rows = {}
    for new in draw(st.lists(VALUES, max_size=6)):
        if not collides(begin, new):
            begin[new[0]] = new
    rows, groups = dict(begin), []
    for _ in range(2):
        changes = []
        for number, new, deletes in draw(st.lists(st.tuples(SMALL, VALUES, st.booleans()), min_size=1, max_size=5)):
            old = rows.get(number)
            without = {key: value for key, value in rows.items() if key != number}
            if old is not None and deletes:
                changes.append(Change(old, None))
                rows = without
            elif not collides(without, new if old is None else (new := replace_id(new, number, draw))):
                changes.append(Change(old, new))
                rows = without | {new[0]: new}
        groups.append(changes)
    return begin, groups[0], groups[1]


def replace_id(new: Values, number: int, draw: st.DrawFn) -> Values:
    """An UPDATE seldom changes the key."""
    return new if draw(st.integers(0, 3)) == 0 else (number, *new[1:])


def keys_of(remote: Remote, changes: Sequence[Change], *indexes: UniqueKey) -> GroupKeys:
    reader = KeyReader({remote.relation_id: FollowedTable(remote.relation, 1, indexes)})
    found = reader.read([encode(change.message(remote)) for change in changes])
    assert found is not None
    return found


def differs(history: tuple[Rows, list[Change], list[Change]], *indexes: UniqueKey) -> bool:
    """Whether the groups are said to be independent although the order matters."""
    rows, first, second = history
    if keys_of(FULL, first, *indexes).meets(keys_of(FULL, second, *indexes)):
        return False
    one, two, after = both(rows, first, second)
    assert (one, two) == (0, 0)
    other_two, other_one, other_after = both(rows, second, first)
    return (one, two, after) != (other_one, other_two, other_after)


@property_test(100, 1000, histories())
def test_independent_groups_can_be_applied_in_either_order(history: tuple[Rows, list[Change], list[Change]]) -> None:
    assert not differs(history, PRIMARY, MAIL, PAIR)


@property_test(100, 1000, histories())
def test_without_the_old_rows_the_order_shows_in_errors_only(history: tuple[Rows, list[Change], list[Change]]) -> None:
    """The publisher does not send the value that an UPDATE removes from an index: too early, a row with that value is rejected."""
    rows, first, second = history
    indexes = (PRIMARY, MAIL, PAIR)
    if not keys_of(PLAIN, first, *indexes).meets(keys_of(PLAIN, second, *indexes)):
        early, after = apply(rows, second)
        assert early in {"error", 0}
        if early == 0:
            assert apply(after, first) == (0, both(rows, first, second)[2])


def divided(remote: Remote, history: tuple[Rows, list[Change], list[Change]]) -> tuple[list[Change], list[Change]]:
    """The second group: what is made before the first one, and what after it."""
    _, first, second = history
    one, two = (keys_of(remote, changes, PRIMARY, MAIL, PAIR) for changes in (first, second))
    late = two.late([two.meets(one)])
    parts: tuple[list[Change], list[Change]] = ([], [])
    for place, change in enumerate(second):
        parts[place in late].append(change)
    return parts


@property_test(100, 3000, histories())
def test_changes_without_a_key_in_common_are_made_before_the_first_group(history: tuple[Rows, list[Change], list[Change]]) -> None:
    rows, first, second = history
    early, late = divided(FULL, history)
    missed, after = apply(rows, early)
    assert (missed, apply(after, first)[0]) == (0, 0)
    assert both(after, first, late) == both(rows, first, second)


@property_test(100, 3000, histories())
def test_without_the_old_rows_it_shows_in_errors_only(history: tuple[Rows, list[Change], list[Change]]) -> None:
    rows, first, second = history
    early, late = divided(PLAIN, history)
    result, after = apply(rows, early)
    assert result in {"error", 0}
    if result == 0:
        one, two, after = both(after, first, late)
        assert one == 0
        assert two == "error" or (two, after) == both(rows, first, second)[1:]


def found_mistake(*indexes: UniqueKey) -> bool:
    """Whether a history shows that these indexes are not enough."""

    @given(histories())
    # the same search each time, without making a history that was found smaller, which takes a minute
    @settings(
        max_examples=3000,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    def search(history: tuple[Rows, list[Change], list[Change]]) -> None:
        assert not differs(history, *indexes)

    try:
        search()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("left_out", [PRIMARY, MAIL, PAIR], ids=["primary key", "unique index", "unique index of two columns"])
def test_a_key_that_is_not_read_is_missed(left_out: UniqueKey) -> None:
    assert found_mistake(*(key for key in (PRIMARY, MAIL, PAIR) if key is not left_out))


T = Remote("t", "*id", "u", "v", types={"u": (NUMERIC, -1)})
NUMBER = UniqueKey(("u",), (1,), (True,))
ONE = Remote("one", "v", relation_id=4712)


def group(*messages: Message, **table: object) -> GroupKeys | None:
    usual = {"keys": (PRIMARY, NUMBER), "finds_one": True}
    followed = FollowedTable(T.relation, 1, **(usual | table))  # type: ignore[arg-type]
    free = FollowedTable(ONE.relation, 2, (), finds_one=False)
    return KeyReader({T.relation_id: followed, ONE.relation_id: free}).read([encode(message) for message in messages])


def meet(one: Message, other: Message, **table: object) -> bool:
    first, second = group(one, **table), group(other, **table)
    assert first is not None
    assert second is not None
    assert first.meets(second) == second.meets(first)
    return bool(first.meets(second))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (T.insert(1, "1", ""), T.insert(2, "2", ""), False),
        (T.insert(1, "1", ""), T.update(1, "2", ""), True),
        (T.insert(1, "1.0", ""), T.insert(2, "1.00", ""), True),
        (T.insert(1, "10", ""), T.insert(2, "100", ""), False),
        (T.insert(1, None, ""), T.insert(2, None, ""), False),
        (T.update(2, "1", "", old=(1, None, None)), T.delete(1, None, None), True),
        (T.update(2, "1", "", old=(1, None, None)), T.delete(2, None, None), True),
        (T.update(2, "1", "", old=(1, None, None)), T.delete(3, None, None), False),
        # not sent, so not changed
        (T.update(1, UNCHANGED, ""), T.update(2, UNCHANGED, ""), False),
        (T.update(1, UNCHANGED, ""), T.insert(2, "1", ""), False),
        (T.insert(1, Binary(b"\0"), ""), T.insert(2, "7", ""), True),
        # without a unique index
        (ONE.insert("x"), ONE.insert("x"), False),
        (ONE.insert("x"), ONE.delete("x"), True),
        (ONE.insert("x"), T.insert(1, "1", ""), False),
    ],
)
def test_groups_that_meet(one: Message, other: Message, expected: bool) -> None:
    assert meet(one, other) is expected


def test_tables_without_known_keys() -> None:
    insert: Callable[[int], Message] = lambda number: T.insert(number, str(number), "")  # noqa: E731
    assert meet(insert(1), insert(2), keys=None)
    assert meet(insert(1), insert(2), inserts_alone=True)
    assert not meet(T.update(1, "1", ""), T.update(2, "2", ""), inserts_alone=True)
    assert meet(T.update(1, "1", ""), T.update(2, "2", ""), finds_one=False)


def late(*messages: Message, earlier: Sequence[Message], **table: object) -> set[int]:
    found, before = group(*messages, **table), [group(message, **table) for message in earlier]
    assert found is not None
    return found.late([found.meets(each) for each in before if each is not None])


def test_changes_that_wait() -> None:
    changes: list[Message] = [
        T.insert(1, "1", ""),
        T.update(2, UNCHANGED, ""),
        T.insert(3, "3", ""),
        T.delete(2, None, None),
        ONE.insert("x"),
    ]
    assert late(*changes, earlier=[]) == set()
    assert late(*changes, earlier=[T.delete(2, None, None)]) == {1, 3}
    assert late(*changes, earlier=[T.insert(9, "3", ""), T.insert(8, "1.0", "")]) == {0, 2}
    # through the number: 7 of the first, 5 of the second
    chain: list[Message] = [T.insert(1, "5", ""), T.update(4, "5", "", old=(3, None, None)), T.insert(2, "7", ""), T.update(3, "7", "")]
    assert late(*chain, earlier=[T.delete(2, None, None)]) == {0, 1, 2, 3}
    assert late(*changes, earlier=[ONE.delete("x")]) == {4}
    assert late(*changes, earlier=[T.insert(9, "9", "")], keys=None) == {0, 1, 2, 3}


def test_a_long_chain_of_keys() -> None:
    """Each row takes the number of the next one, and back. All changes of the table wait: the bug was time in the square of their count."""
    others = [T.insert(100 + number, str(200 + number), "") for number in range(20)]
    chain = [part for number in range(20) for part in (T.update(number, str(number + 1), ""), others[number])]
    shifts: list[Message] = [*chain, *(T.update(number, str(number), "") for number in range(20)), ONE.insert("x")]
    assert late(*shifts, earlier=[T.delete(0, None, None)]) == set(range(60))
    assert late(*shifts, earlier=[T.delete(100, None, None)]) == {1}


def test_nulls_that_are_equal() -> None:
    equal = replace(NUMBER, nulls_differ=False)
    assert meet(T.insert(1, None, ""), T.insert(2, None, ""), keys=(PRIMARY, equal))


def test_part_of_a_key_was_not_sent() -> None:
    pair = UniqueKey(("u", "v"), (1, 2), (False, False))
    assert meet(T.update(1, "1", UNCHANGED), T.update(2, "2", ""), keys=(PRIMARY, pair))
    assert not meet(T.update(1, UNCHANGED, UNCHANGED), T.update(2, "2", ""), keys=(PRIMARY, pair))


def test_groups_that_are_applied_alone() -> None:
    assert group(T.insert(1, "1", ""), truncate(T)) is None
    assert group(Remote("other", "*id", relation_id=9).insert(1)) is None
    assert group(Remote("t", "*id", "u").relation) is None
    # nothing new
    found = group(T.relation, Type(70000, "public", "mood"), T.insert(1, "1", ""))
    assert found is not None
    assert found.tables == {1: 1}


def test_too_many_keys_count_as_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MOST_KEYS", 20)
    large, small = group(*(T.insert(number, str(number), "") for number in range(11))), group(T.insert(99, "99", ""))
    assert large is not None
    assert small is not None
    assert large.meets(small)


def test_values_are_read_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MOST_READ", 1000)
    sizes = []
    add = GroupKeys.add

    def observed(self: GroupKeys, form: Any, rows: Sequence[Any], places: Sequence[int]) -> None:
        sizes.append(len(rows))
        add(self, form, rows, places)

    monkeypatch.setattr(GroupKeys, "add", observed)
    found = group(*(T.insert(number, str(number), "x" * 100) for number in range(50)), T.relation, T.insert(50, "50", ""))
    assert found is not None
    assert (found.tables, max(sizes)) == ({1: 51}, 8)


def test_changes_of_many_forms_are_read() -> None:
    messages = [T.insert(number, str(number), "v") for number in range(5)]
    mixed = [part for number in range(5) for part in (T.delete(number, None, None), T.update(number + 10, None, "x"), ONE.insert(number))]
    found = group(*messages, *mixed)
    assert found is not None
    assert found.tables == {1: 15, 2: 5}
    for number in (*range(5), *range(10, 15)):
        other = group(T.delete(number, None, None))
        assert other is not None
        assert found.meets(other).keys() == {1}
