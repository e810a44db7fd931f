"""Records of a transaction to changes with names and values."""

from __future__ import annotations

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Column,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RollbackPrepared,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.transaction.changes import (
    UNCHANGED,
    Change,
    ChangeReader,
    DeleteChange,
    InsertChange,
    MessageChange,
    TruncateChange,
    UpdateChange,
)
from subscriber.transaction.header import header
from subscriber.transaction.model import PreparedTransaction, Transaction

T = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
WIDER = Relation(5, "public", "t", "d", (*T.columns, Column("more", 23, -1, False)))


def read(reader: ChangeReader, message: Message) -> Change | None:
    return reader.read(encode(message))


@pytest.fixture
def reader() -> ChangeReader:
    return ChangeReader({5: T}, prefixed=False)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Insert(5, TupleData(b"tn", [b"1", None])), InsertChange(T, {"id": "1", "note": None})),
        (Insert(5, TupleData(b"bt", [b"\0\1", b"\xff"])), InsertChange(T, {"id": b"\0\1", "note": "\udcff"})),
        (Update(5, None, None, TupleData(b"tu", [b"1", None])), UpdateChange(T, None, None, {"id": "1", "note": UNCHANGED})),
        (
            Update(5, TupleData(b"tn", [b"1", None]), None, TupleData(b"tt", [b"2", b"x"])),
            UpdateChange(T, {"id": "1"}, None, {"id": "2", "note": "x"}),  # the key's other columns are placeholders
        ),
        (
            Update(5, None, TupleData(b"tn", [b"1", None]), TupleData(b"tt", [b"2", b"x"])),
            UpdateChange(T, None, {"id": "1", "note": None}, {"id": "2", "note": "x"}),
        ),
        (Delete(5, TupleData(b"tn", [b"1", None]), None), DeleteChange(T, {"id": "1"}, None)),
        (Delete(5, None, TupleData(b"tn", [b"1", None])), DeleteChange(T, None, {"id": "1", "note": None})),
        (Truncate(TruncateOption.CASCADE, (5, 5)), TruncateChange((T, T), cascade=True, restart_identity=False)),
        (Truncate(TruncateOption.RESTART_IDENTITY, (5,)), TruncateChange((T,), cascade=False, restart_identity=True)),
        (LogicalMessage(True, Lsn(7), "p", b"\0"), MessageChange(Lsn(7), "p", b"\0")),
        (Relation(6, "a", "b", "f", ()), None),
        (Type(7, "a", "b"), None),
    ],
)
def test_change(reader: ChangeReader, message: Message, expected: Change | None) -> None:
    assert read(reader, message) == expected


def test_in_a_streamed_transaction() -> None:
    reader = ChangeReader({5: T}, prefixed=True)
    assert read(reader, Insert(5, TupleData(b"tn", [b"1", None]), xid=8)) == InsertChange(T, {"id": "1", "note": None})


def test_relation_applies_from_its_description_on() -> None:
    known = {5: T}
    reader = ChangeReader(known, prefixed=False)
    first = read(reader, Insert(5, TupleData(b"tn", [b"1", None])))
    reader.skim(encode(Insert(5, TupleData(b"tn", [b"1", None]))))
    reader.skim(encode(WIDER))
    second = read(reader, Insert(5, TupleData(b"tnn", [b"2", None, None])))
    assert first == InsertChange(T, {"id": "1", "note": None})
    assert second == InsertChange(WIDER, {"id": "2", "note": None, "more": None})
    assert (known, reader.described) == ({5: T}, {5: WIDER})


def test_unknown_relation(reader: ChangeReader) -> None:
    with pytest.raises(ProtocolError, match="no relation map entry for remote relation ID 99"):
        read(reader, Insert(99, TupleData(b"", [])))


def test_row_with_wrong_number_of_columns(reader: ChangeReader) -> None:
    with pytest.raises(ProtocolError, match=r"a row of relation public\.t has 1 columns, its description has 2"):
        read(reader, Insert(5, TupleData(b"t", [b"secret"])))


def test_no_values_in_a_repr(reader: ChangeReader) -> None:
    row = TupleData(b"tt", [b"secret", b"secret"])
    for message in (
        Insert(5, row),
        Update(5, row, None, row),
        Update(5, None, row, row),
        Delete(5, row, None),
        LogicalMessage(True, Lsn(7), "p", b"secret"),
    ):
        assert "secret" not in repr(read(reader, message))


def test_headers() -> None:
    transaction = Transaction(
        xid=7,
        final_lsn=Lsn(10),
        end_lsn=Lsn(20),
        commit_time=30,
        prefixed=False,
        records=[],
        origin=Origin(Lsn(1), "up"),
        size=40,
    )
    plain = header(transaction)
    assert (plain.kind, plain.xid, plain.gid, plain.commit_lsn, plain.end_lsn, plain.commit_time, plain.origin, plain.size) == (
        *("commit", 7, None, 10, 20, 30, "up", 40),
    )
    prepared = header(PreparedTransaction(transaction, "g"))
    assert (prepared.kind, prepared.gid, prepared.end_lsn) == ("prepare", "g", 20)
    committed = header(CommitPrepared(0, Lsn(10), Lsn(20), 30, 7, "g"))
    assert (committed.kind, committed.gid, committed.commit_lsn, committed.end_lsn) == ("commit prepared", "g", 10, 20)
    rolled_back = header(RollbackPrepared(0, Lsn(10), Lsn(20), 30, 40, 7, "g"))
    assert (rolled_back.kind, rolled_back.gid, rolled_back.end_lsn, rolled_back.commit_time) == ("rollback prepared", "g", 20, 40)
