"""Which changes are read together, which may be moved past others, and which must stay in their place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Tag, TupleData, Update
from subscriber.sinks.apply_counters import ChangeContext
from subscriber.sinks.runs import Form, LatestForms, Row, Run, Runs, is_plain, keeps_order, old_and_new, parts_of

CONTEXT = ChangeContext("pg_1", 7, Lsn(1))


def _keys(rows: Sequence[Row]) -> list[object]:
    return [row[0] for row in rows]


def _form(tag: Tag, table: str = "t", *, keyed: bool = True) -> Form:
    return Form(tag=tag, parts=(), table=table, keys=_keys if keyed else None, key_space=table)


INSERT, UPDATE, DELETE = (_form(tag) for tag in (Tag.INSERT, Tag.UPDATE, Tag.DELETE))
NAMES = {INSERT: "INSERT", UPDATE: "UPDATE", DELETE: "DELETE"}


def _taken(*changes: tuple[Form, int]) -> list[Run[Form]]:
    """The runs of changes of rows. The number of a change is the second value of its row."""
    runs: Runs[Form] = Runs()
    for number, (form, key) in enumerate(changes):
        runs.add(form, [(b"%d" % key, b"%d" % number)], [CONTEXT], 10)
    assert (runs.count, runs.size) == (len(changes), 10 * len(changes))
    found = [run for table in runs.take() for run in table]
    assert (runs.count, runs.size, list(runs.take())) == (0, 0, [])
    assert sum(len(run.contexts) for run in found) == len(changes)
    return found


def _told(*changes: tuple[Form, int]) -> list[tuple[str, list[int]]]:
    return [(NAMES.get(run.form, "other"), [int(row[1] or b"") for row in run.rows]) for run in _taken(*changes)]


def test_changes_of_other_rows_are_overtaken() -> None:
    found = _told((INSERT, 1), (UPDATE, 2), (INSERT, 3), (DELETE, 4), (UPDATE, 5), (INSERT, 6))
    assert found == [("INSERT", [0, 2, 5]), ("UPDATE", [1, 4]), ("DELETE", [3])]


def test_changes_of_one_row_stay_in_order() -> None:
    found = _told((INSERT, 1), (DELETE, 1), (INSERT, 1), (INSERT, 2), (DELETE, 1))
    assert found == [("INSERT", [0]), ("DELETE", [1]), ("INSERT", [2, 3]), ("DELETE", [4])]


def test_change_without_a_key_keeps_its_place() -> None:
    moves = _form(Tag.UPDATE, keyed=False)
    found = _told((DELETE, 2), (moves, 1), (moves, 5), (DELETE, 3), (INSERT, 4), (DELETE, 6))
    assert found == [("DELETE", [0]), ("other", [1, 2]), ("DELETE", [3, 5]), ("INSERT", [4])]


def test_without_keys_only_neighbours_are_together() -> None:
    one, two = _form(Tag.INSERT, keyed=False), _form(Tag.UPDATE, keyed=False)
    assert [len(run.rows) for run in _taken((one, 1), (one, 2), (two, 3), (one, 4), (two, 5), (one, 6))] == [2, 1, 1, 1, 1]


def test_keys_of_other_kinds_are_not_compared() -> None:
    other = Form(tag=Tag.UPDATE, parts=(), table="t", keys=_keys, key_space="binary")
    assert [len(run.rows) for run in _taken((INSERT, 1), (other, 2), (INSERT, 3))] == [1, 1, 1]


def test_forms_are_made_one_after_another_if_each_row_keeps_its_order() -> None:
    def part(form: Form, **places: int) -> tuple[Form, list[Row], list[int]]:
        return form, [(key[1:].encode(),) for key in places], list(places.values())

    assert keeps_order([part(INSERT, k1=0, k2=3), part(UPDATE, k1=1, k7=2), part(DELETE, k2=4, k1=5, k8=6)])
    assert not keeps_order([part(INSERT, k1=1), part(DELETE, k1=0)])
    assert not keeps_order([part(INSERT, k1=0, k2=4), part(UPDATE, k3=1), part(DELETE, k2=3)])
    twice: tuple[Form, list[Row], list[int]] = (UPDATE, [(b"1",), (b"1",)], [0, 2])
    assert keeps_order([twice, part(DELETE, k1=3)])
    assert not keeps_order([twice, part(DELETE, k1=1)])
    assert not keeps_order([part(UPDATE, k1=5), twice])
    assert not keeps_order([part(INSERT, k1=0), (_form(Tag.DELETE, keyed=False), [(b"2",)], [1])])
    assert not keeps_order([part(INSERT, k1=0), (_form(Tag.DELETE, "binary"), [(b"2",)], [1])])


def test_tables_do_not_wait_for_each_other() -> None:
    here, there = _form(Tag.INSERT, keyed=False), _form(Tag.INSERT, "u", keyed=False)
    assert [len(run.rows) for run in _taken((here, 1), (there, 1), (here, 2), (there, 2))] == [2, 2]


def test_not_too_many_runs_are_looked_at() -> None:
    forms = [_form(Tag.UPDATE) for _ in range(20)]
    found = _taken((INSERT, 0), *((form, number) for number, form in enumerate(forms, 1)), (INSERT, 99))
    assert len(found) == 22


def test_runs_of_one_table_are_taken() -> None:
    runs: Runs[Form] = Runs()
    other = _form(Tag.INSERT, "u")
    for form in (INSERT, UPDATE, other):
        runs.add(form, [(b"1",)], [CONTEXT], 10)
    assert [run.form for run in runs.take_table(DELETE)] == [INSERT, UPDATE]
    assert (runs.count, runs.size) == (1, 10)
    assert runs.take_table(DELETE) == []
    assert [run.form for table in runs.take() for run in table] == [other]


@pytest.mark.parametrize("xid", [None, 9])
def test_changes_after_one_of_their_form_are_read_together(xid: int | None) -> None:
    changes: list[Insert | Update | Delete] = [
        Insert(7, TupleData(b"tt", [b"1", b"x"]), xid),
        Insert(7, TupleData(b"tn", [b"2", None]), xid),
        Update(7, None, TupleData(b"tt", [b"2", b"o"]), TupleData(b"tu", [b"2", None]), xid),
        Delete(7, TupleData(b"tn", [b"1", None]), None, xid),
        Delete(7, None, TupleData(b"tt", [b"2", b"x"]), xid),
    ]
    records = list(map(encode, changes))
    latest: LatestForms[Form] = LatestForms()
    offset = 1 if xid is None else 5
    read: list[tuple[str, list[Row]]] = []
    place = 0
    while place < len(records):
        places = range(place, len(records))
        found = latest.read(records, places, offset)
        if found is None:
            form = Form(tag=Tag(records[place][0]), parts=parts_of(changes[place]))
            latest.add(form)
            found = latest.read(records, places, offset)
            assert found is not None
        form, rows = found
        read.append((Tag(form.tag).name, rows))
        place += len(rows)
    assert read == [
        ("INSERT", [(b"1", b"x"), (b"2", None)]),
        ("UPDATE", [(b"2", b"o", b"2", None)]),
        ("DELETE", [(b"1", None)]),
        ("DELETE", [(b"2", b"x")]),
    ]
    latest.clear()
    assert latest.read(records, range(1), offset) is None
    assert latest.read([b""], range(1), 1) is None


def test_updates_with_whole_old_rows_are_read_while_the_key_stays() -> None:
    def update(old: bytes, new: bytes) -> Update:
        return Update(7, None, TupleData(b"ttn", [b"1", old, None]), TupleData(b"ttt", [b"1", new, b"v"]))

    changes = [update(b"a", b"a"), update(b"b", b"b"), update(b"c", b"d"), update(b"e", b"e")]
    records = list(map(encode, changes))
    form = Form(tag=Tag.UPDATE, parts=parts_of(changes[0]), same=(0, 1))
    assert form.read(records, range(4), 1) == (form, [(b"1", b"a", b"v"), (b"1", b"b", b"v")])
    assert form.read(records, range(2, 4), 1) == (form, [])
    assert [is_plain(change, (0, 1)) for change in changes] == [True, True, False, True]
    assert [is_plain(change, (0,)) for change in changes] == [True] * 4
    row, key = TupleData(b"tt", [b"1", b"x"]), TupleData(b"tn", [b"1", None])
    others: list[Insert | Update | Delete] = [Insert(7, row), Update(7, None, None, row), Delete(7, key, None), Update(7, key, None, row)]
    assert [is_plain(change, (0,)) for change in others] == [True, True, True, False]
    assert [is_plain(change, None) for change in others] == [True, False, False, False]


def test_rows_have_the_columns_of_their_relation() -> None:
    row, key = TupleData(b"tt", [b"1", b"x"]), TupleData(b"tn", [b"1", None])
    assert old_and_new(Insert(7, row), 2, "t") == (None, row)
    assert old_and_new(Update(7, key, None, row), 2, "t") == (key, row)
    assert old_and_new(Delete(7, None, row), 2, "t") == (row, None)
    with pytest.raises(ProtocolError, match='a row of relation "t" has 2 columns where its Relation message has 3'):
        old_and_new(Update(7, key, None, row), 3, "t")
    with pytest.raises(ProtocolError, match="without an old row"):
        old_and_new(Delete(7, None, None), 2, "t")
