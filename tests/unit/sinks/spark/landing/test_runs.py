"""Changes that are read in runs are landed as those that are decoded one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subscriber.errors import SubscriberError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, TupleData, Update
from subscriber.sinks import runs
from subscriber.transaction.model import Transaction
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, landed, make, row, run, transaction

_COLUMNS = (("id", 23, True), ("note", 25, False), ("day", 1082, False))
_PLAIN = Relation(5, "public", "t", "d", tuple(Column(name, oid, -1, key) for name, oid, key in _COLUMNS))
_WIDER = Relation(5, "public", "t", "d", (*_PLAIN.columns, Column("n", 1700, -1, False)))
_FULL = Relation(5, "public", "t", "f", tuple(Column(name, oid, -1, True) for name, oid, _ in _COLUMNS))

_IDS = st.integers(-2, 3).map(lambda number: b"%d" % number)
_NOTES = st.none() | st.sampled_from([b"", b"one", "é".encode(), b"x" * 70])
_DAYS = st.none() | st.sampled_from([b"2024-02-29", b"infinity", b"0044-03-15 BC"])


def _tuple(values: Sequence[bytes | None], *, short: bool = False, kind: str = "t", unchanged: Sequence[int] = ()) -> TupleData:
    kinds = bytearray(ord("n") if value is None else ord(kind) for value in values)
    found = list(values)
    for place in unchanged:
        kinds[place], found[place] = ord("u"), None
    width = len(values) - short
    return TupleData(bytes(kinds[:width]), found[:width])


_ROWS = st.tuples(_IDS, _NOTES, _DAYS)
_NEW = st.builds(_tuple, _ROWS, unchanged=st.sampled_from([(), (), (1,), (1, 2)]))
_ODD = st.one_of(st.builds(_tuple, _ROWS, short=st.booleans(), kind=st.sampled_from("tb")), st.just(_tuple((b"1", b"\xff", None))))
_KEY = st.builds(lambda number: TupleData(b"tnn", [number, None, None]), _IDS)
_INSERTS = st.lists(st.builds(lambda row: Insert(5, row), _NEW), min_size=1, max_size=5)
_UPDATES = st.lists(st.builds(lambda row: Update(5, None, None, row), _NEW), min_size=1, max_size=5)
_WHOLE = st.lists(st.builds(lambda old, row: Update(5, None, old, row), st.builds(_tuple, _ROWS), _NEW), min_size=1, max_size=5)
_DELETES = st.lists(st.builds(lambda key: Delete(5, key, None), _KEY), min_size=1, max_size=5)
_OTHERS: st.SearchStrategy[Message] = st.one_of(
    st.builds(lambda key, row: Update(5, key, None, row), _KEY, _NEW),
    st.builds(lambda old: Delete(5, None, old), st.builds(_tuple, _ROWS)),
    st.just(Truncate(TruncateOption(0), (5,))),
    st.sampled_from([_PLAIN, _WIDER, _FULL]),
    st.builds(lambda row: Insert(5, row), _ODD),
)
_CHANGES: st.SearchStrategy[list[Message]] = st.one_of(
    _INSERTS, _INSERTS, _UPDATES, _UPDATES, _WHOLE, _DELETES, st.lists(_OTHERS, max_size=1)
)
_TRANSACTIONS = st.lists(
    st.tuples(
        st.lists(_CHANGES, max_size=5).map(lambda bursts: [change for burst in bursts for change in burst]),
        st.booleans(),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=6,
)


def _transaction(number: int, changes: Sequence[Message], *, prefixed: bool, cut: int) -> Transaction:
    """``cut``: where the last record ends, of the large ones."""
    records = [encode(change) for change in ([_PLAIN, *changes] if number == 0 else changes)]
    if prefixed:
        records = [record[:1] + b"\0\0\0\7" + record[1:] for record in records]
    if cut > 35 and records:
        records[-1] = records[-1][: cut - 20]
    end = 1000 + number
    return Transaction(end, Lsn(end - 1), Lsn(end), end * 1000, prefixed, records)


async def _landed(transactions: Sequence[Transaction]) -> tuple[list[dict[str, Any]], list[str], list[object]]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        opened = await begun(make(place), tables=[TABLE])
        errors = []
        for one in transactions:
            try:
                await opened.apply(batch(one))
            except SubscriberError as error:
                errors.append(repr(error))
        try:
            await opened.close()
        except SubscriberError as error:
            errors.append(repr(error))
        counted = opened.statistics
        return landed(place), errors, [counted.inserts, counted.updates, counted.deletes, counted.truncates, counted.transactions]


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(_TRANSACTIONS)
def test_runs_are_landed_as_single_changes(drawn: list[tuple[list[Message], bool, int]]) -> None:
    transactions = [_transaction(number, changes, prefixed=prefixed, cut=cut) for number, (changes, prefixed, cut) in enumerate(drawn)]
    found = run(_landed(transactions))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "read_rows", lambda *_, **__: [])
        assert run(_landed(transactions)) == found


async def test_takes_of_few_large_records_do_not_stay_in_memory(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=1h&batch_size=1GB"))
    text, end = "x" * 1_000_000, 200
    for _ in range(4):
        transactions = []
        for _ in range(20):
            end += 10
            transactions.append(transaction(end, RELATION, Insert(5, row(str(end), text, None))))
        await sink.apply(batch(*transactions))
        assert sink._usable.lander.size < 50_000_000
    await sink.advance(Lsn(end))
    await sink.close()
    assert len(landed(tmp_path)) == 80
