"""Lines of output: JSON and text, for any names and values."""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.json_lines import JsonLines, json_line
from subscriber.sinks.output_lines import ChangeFormat, Line, change_line, moment
from subscriber.sinks.text_lines import TextLines, text_line
from subscriber.transaction.changes import (
    UNCHANGED,
    Change,
    DeleteChange,
    InsertChange,
    MessageChange,
    Row,
    TruncateChange,
    UpdateChange,
)
from subscriber.transaction.header import TransactionHeader, TransactionKind
from tests.unit.protocol.strategies import lsns, namespaces, texts, times, uint32

T = Relation(1, "public", "t", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
HEADER = TransactionHeader(
    kind="commit", xid=7, gid=None, commit_lsn=Lsn(0x10), end_lsn=Lsn(0x20), commit_time=757_382_400_000_000, origin="up"
)
TIME = "2024-01-01T00:00:00.000000+00:00"

values = texts | st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.binary(max_size=20) | st.none() | st.just(UNCHANGED)
rows: st.SearchStrategy[Row] = st.dictionaries(texts, values, max_size=5)
relations = st.builds(Relation, uint32, namespaces, texts, st.just("d"), st.just(()))
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(InsertChange, relations, rows),
    st.builds(UpdateChange, relations, st.none() | rows, st.none() | rows, rows),
    st.builds(DeleteChange, relations, st.none() | rows, st.none() | rows),
    st.builds(TruncateChange, st.lists(relations, max_size=3).map(tuple), st.booleans(), st.booleans()),
    st.builds(MessageChange, lsns, texts, st.binary(max_size=20)),
)
kinds: st.SearchStrategy[TransactionKind] = st.sampled_from(("commit", "prepare", "commit prepared", "rollback prepared"))
headers = st.builds(
    TransactionHeader,
    kind=kinds,
    xid=uint32,
    gid=st.none() | texts,
    commit_lsn=lsns,
    end_lsn=lsns,
    commit_time=times,
    origin=st.none() | texts,
)


class TestJson:
    def test_transaction(self) -> None:
        lines = JsonLines()
        assert json.loads(lines.opening(HEADER) or "") == {
            "kind": "begin",
            "xid": 7,
            "lsn": "0/10",
            "end_lsn": "0/20",
            "time": TIME,
            "origin": "up",
        }
        assert json.loads(lines.closing(HEADER))["kind"] == "commit"

    @pytest.mark.parametrize(
        ("kind", "opening"), [("prepare", "begin prepare"), ("commit prepared", None), ("rollback prepared", None), ("commit", "begin")]
    )
    def test_opening_line_of_each_kind_of_transaction(self, kind: TransactionKind, opening: str | None) -> None:
        header = TransactionHeader(kind=kind, xid=7, gid="g", commit_lsn=Lsn(1), end_lsn=Lsn(2), commit_time=0)
        line = JsonLines().opening(header)
        assert (json.loads(line)["kind"] if line else None) == opening
        assert json.loads(JsonLines().closing(header))["gid"] == "g"

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (InsertChange(T, {"id": "1", "note": None}), {"kind": "insert", "new": {"id": "1", "note": None}}),
            (
                UpdateChange(T, {"id": "1"}, None, {"id": "2", "note": UNCHANGED}),
                {"kind": "update", "key": {"id": "1"}, "new": {"id": "2"}, "unchanged": ["note"]},
            ),
            (
                UpdateChange(T, None, {"id": b"\0", "note": UNCHANGED}, {"id": b"\1", "note": "x"}),
                {
                    "kind": "update",
                    "old": {"id": "\\x00"},
                    "new": {"id": "\\x01", "note": "x"},
                    "old_unchanged": ["note"],
                    "binary": ["id"],
                },
            ),
            (DeleteChange(T, {"id": "1"}, None), {"kind": "delete", "key": {"id": "1"}}),
        ],
    )
    def test_rows(self, change: Change, expected: dict[str, Any]) -> None:
        line = json.loads(JsonLines().change(HEADER, change))
        assert line == {**expected, "xid": 7, "namespace": "public", "relation": "t"}

    def test_truncate(self) -> None:
        assert json_line(change_line(TruncateChange((T,), cascade=True, restart_identity=False))) == (
            '{"kind":"truncate","relations":[{"namespace":"public","relation":"t"}],"cascade":true,"restart_identity":false}'
        )

    def test_message_that_is_no_text(self) -> None:
        assert json.loads(JsonLines().message(Lsn(1), "p", b"\xff")) == {
            "kind": "message",
            "transactional": False,
            "lsn": "0/1",
            "prefix": "p",
            "content": "\\xff",
            "binary": ["content"],
        }

    def test_bytes_that_are_not_utf8(self) -> None:
        line = json_line({"kind": "insert", "new": {"a\udcff": "\udc80ü\\"}})
        assert json.loads(line) == {"kind": "insert", "new": {"a\\xff": "\\x80ü\\"}}

    @given(rows)
    def test_row_is_read_back(self, row: Row) -> None:
        line = json.loads(json_line({"kind": "insert", "new": row}))
        expected = {
            _escaped(name): value if value is None else f"\\x{value.hex()}" if isinstance(value, bytes) else _escaped(str(value))
            for name, value in row.items()
            if value is not UNCHANGED
        }
        assert line["new"] == expected
        assert line.get("unchanged", []) == [_escaped(name) for name, value in row.items() if value is UNCHANGED]
        assert line.get("binary", []) == [_escaped(name) for name, value in row.items() if isinstance(value, bytes)]


def _escaped(text: str) -> str:
    """A byte that is not UTF-8 as backslash, x and two digits."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class TestText:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (change_line(InsertChange(T, {"id": "1", "note": None})), "insert public.t new=(id='1' note=NULL)"),
            (
                change_line(UpdateChange(T, {"id": "1"}, None, {"id": b"\0\xff", "note": UNCHANGED})),
                "update public.t key=(id='1') new=(id=\\x00ff note=UNCHANGED)",
            ),
            (change_line(DeleteChange(T, None, {"id": "it's"})), "delete public.t old=(id='it\\'s')"),
            (
                change_line(TruncateChange((T, T), cascade=False, restart_identity=True)),
                "truncate relations=(public.t public.t) cascade=false restart_identity=true",
            ),
            (change_line(MessageChange(Lsn(1), "p", b"hello")), "message transactional=true lsn=0/1 prefix=p content='hello'"),
            ({"kind": "x", "name": TableName("a b", 'q"')}, 'x "a b"."q\\""'),
            (
                {"kind": "x", "new": {"": "a\tb\n\x1b\u2028\udcff\\ü表\U000e0001"}},
                "x new=(\"\"='a\\tb\\n\\u001b\\u2028\\xff\\\\ü表\\U000e0001')",
            ),
        ],
    )
    def test_line(self, line: Line, expected: str) -> None:
        assert text_line(line) == expected

    def test_transaction(self) -> None:
        assert TextLines().opening(HEADER) == f"begin xid=7 lsn=0/10 end_lsn=0/20 time={TIME} origin=up"
        assert TextLines().closing(HEADER) == f"commit xid=7 lsn=0/10 end_lsn=0/20 time={TIME} origin=up"


@pytest.mark.parametrize("lines", [JsonLines(), TextLines()], ids=["json", "text"])
class TestAnything:
    @given(header=headers, change=changes, prefix=texts, content=st.binary(max_size=20))
    def test_is_one_line_of_utf8(self, lines: ChangeFormat, header: TransactionHeader, change: Change, prefix: str, content: bytes) -> None:
        opening = lines.opening(header)
        written = [lines.change(header, change), lines.closing(header), lines.message(header.end_lsn, prefix, content)]
        for line in written if opening is None else [*written, opening]:
            assert line
            line.encode()
            assert len(line.split("\n")) == 1
            if isinstance(lines, JsonLines):
                assert isinstance(json.loads(line), dict)
            else:
                assert not [character for character in line if unicodedata.category(character) == "Cc"]


def test_moments() -> None:
    assert moment(0) == "2000-01-01T00:00:00.000000+00:00"
    assert moment(-(2**63)) == -(2**63)
    last = datetime.max.replace(tzinfo=UTC) - POSTGRES_EPOCH
    assert moment(last // timedelta(microseconds=1)) == "9999-12-31T23:59:59.999999+00:00"
