"""Which relations a transaction changes."""

from __future__ import annotations

import struct

from subscriber.protocol.lsn import Lsn
from subscriber.transaction.model import Transaction
from subscriber.transaction.relations import changed_relations


def transaction(*records: bytes, prefixed: bool = False, spilled: int = 0) -> Transaction:
    lsn = Lsn(100)
    return Transaction(xid=5, final_lsn=lsn, end_lsn=lsn, commit_time=0, prefixed=prefixed, records=list(records), spilled=spilled)


def row(tag: bytes, relation_id: int, *, xid: int | None = None) -> bytes:
    return tag + (b"" if xid is None else struct.pack("!I", xid)) + struct.pack("!I", relation_id) + b"N\0\0"


def truncate(*relation_ids: int, xid: int | None = None) -> bytes:
    prefix = b"" if xid is None else struct.pack("!I", xid)
    return b"T" + prefix + struct.pack(f"!IB{len(relation_ids)}I", len(relation_ids), 1, *relation_ids)


def test_rows_and_truncate() -> None:
    relation = b"R" + struct.pack("!I", 99) + b"public\0t\0d\0\0"
    found = changed_relations(transaction(relation, row(b"I", 1), row(b"U", 2), row(b"D", 3), truncate(4, 70000), b"M\0"))
    assert found == frozenset({1, 2, 3, 4, 70000})


def test_relations_of_records_with_an_xid() -> None:
    assert changed_relations(transaction(row(b"I", 1, xid=7), truncate(2, xid=7), prefixed=True)) == frozenset({1, 2})


def test_empty_and_spilled_transactions() -> None:
    assert changed_relations(transaction()) == frozenset()
    assert changed_relations(transaction(row(b"I", 1), spilled=3)) is None
