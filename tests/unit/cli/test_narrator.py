"""The lines about copies."""

from __future__ import annotations

from subscriber.apply.tables.table_synchronization import ReconciledRows
from subscriber.cli.narrator import caught_up
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run_status import Status, TableCopy

COPIED = TableCopy(1000, 1000, done=True)
COMPARED = TableCopy(3005, 3000, done=True, reconciled=ReconciledRows(kept=2990, compared=3000, written=10, deleted=5))


def said(*copies: TableCopy) -> str:
    found = {TableName("public", f"t{number}"): copy for number, copy in enumerate(copies)}
    return caught_up(Status(flushed=Lsn(0x100), copies=found), 2.0).removesuffix("; caught up to 0/100")


def test_what_was_done() -> None:
    assert said() == "0 tables, nothing to copy"
    assert said(COPIED) == "copied 1 table, 1,000 rows in 2.0 s"
    assert said(COMPARED, COMPARED) == "compared 2 tables, 6,000 rows: 20 written, 10 deleted in 2.0 s"
    assert said(COPIED, COMPARED) == "copied 1 table, 1,000 rows; compared 1 table, 3,000 rows: 10 written, 5 deleted in 2.0 s"
