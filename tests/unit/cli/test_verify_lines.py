"""The lines of ``verify``."""

from __future__ import annotations

import pytest

from subscriber.cli.verbs.verify import _show
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.verification.model import TableReport, VerificationReport

NAMES = [TableName("public", name) for name in "abc"]


@pytest.mark.parametrize(
    ("tables", "last"),
    [
        ([], "no table was compared"),
        ([TableReport(NAMES[0], left_out="it is still being synchronized")], "no table was compared"),
        ([TableReport(NAMES[0], publisher_rows=1)], "1 table with 1 row compared as of 0/1 in 1.5 s: all equal"),
        (
            [TableReport(name, publisher_rows=5_000, differing_ranges=number) for number, name in enumerate(NAMES[:2])],
            "2 tables with 10,000 rows compared as of 0/1 in 1.5 s: 1 of them differs",
        ),
        (
            [TableReport(name, publisher_rows=2, differing_ranges=1) for name in NAMES],
            "3 tables with 6 rows compared as of 0/1 in 1.5 s: 3 of them differ",
        ),
    ],
)
def test_the_last_line(tables: list[TableReport], last: str, capsys: pytest.CaptureFixture[str]) -> None:
    _show(VerificationReport("copy", Lsn(1), 0.1, tables, 1.5), quiet=False, would=False)
    assert capsys.readouterr().out.splitlines()[-1] == last
