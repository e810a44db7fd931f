"""``subscriber decode``: every form of capture, every message, and what is said of a damaged one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subscriber.cli.verbs.streams import decode
from subscriber.consumer.message_lines import wire_line
from subscriber.errors import ConfigurationError, ProtocolError, SubscriberError
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Begin, Column, Commit, Insert, Message, Relation, StreamStart, StreamStop, TupleData
from subscriber.recording.file import read_recording
from subscriber.sinks.json_lines import json_line
from subscriber.sinks.text_lines import text_line
from tests.unit.protocol.strategies import inside_streams, outside_streams

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.rec"))
T = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
TRANSACTION: list[Message] = [
    Begin(Lsn(16), 0, 7),
    T,
    Insert(5, TupleData(b"tt", [b"1", b"two\nlines\n\n"])),
    Commit(0, Lsn(16), Lsn(32), 0),
    StreamStart(8, True),
    Insert(5, TupleData(b"bn", [b"\0\n", None]), xid=9),
    StreamStop(),
]
KINDS = ["begin", "relation", "insert", "commit", "stream start", "insert", "stream stop"]


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Output:
    """What a run printed, also when it failed."""

    def __init__(self, capture: pytest.CaptureFixture[bytes]) -> None:
        self._capture = capture

    def lines(self) -> list[str]:
        return self._capture.readouterr().out.decode("utf-8").splitlines()

    def kinds(self) -> list[str]:
        return [json.loads(line)["kind"] for line in self.lines()]


@pytest.fixture
def output(capfdbinary: pytest.CaptureFixture[bytes]) -> Output:
    return Output(capfdbinary)


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    args = parser.parse_args([*map(str, arguments)])
    status: int = asyncio.run(args.execute(args))
    return status


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "capture"
        path.write_bytes(data)
        return path

    return write


def hexadecimal(messages: list[Message]) -> bytes:
    return b"".join(encode(message).hex().encode() + b"\n" for message in messages)


def length_prefixed(records: list[bytes]) -> bytes:
    return b"".join(len(record).to_bytes(4) + record for record in records)


class TestForms:
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_recordings_of_servers(self, path: Path, output: Output) -> None:
        with path.open("rb") as file:
            expected = len(list(read_recording(file)))
        assert run(path, "--format", "json") == 0
        found = [json.loads(line) for line in output.lines()]
        assert len(found) == expected
        assert (found[0]["kind"], found[-2]["kind"], found[-1]["kind"]) == ("session", "commit", "standby status update")
        assert not [line for line in found if line["kind"] in {"insert", "update", "delete"} and "relation" not in line]
        assert run(path) == 0
        assert len(output.lines()) == expected

    @pytest.mark.parametrize("form", [[], ["--input", "length"]])
    def test_length_prefixed(self, written: Callable[[bytes], Path], output: Output, form: list[str]) -> None:
        run(written(length_prefixed([encode(message) for message in TRANSACTION])), "--format", "json", *form)
        assert output.kinds() == KINDS

    @pytest.mark.parametrize("form", [[], ["--input", "pg_recvlogical"]])
    def test_pg_recvlogical(self, written: Callable[[bytes], Path], output: Output, form: list[str]) -> None:
        run(written(b"".join(encode(message) + b"\n" for message in TRANSACTION)), "--format", "json", *form)
        found = [json.loads(line) for line in output.lines()]
        assert [line["kind"] for line in found] == KINDS
        assert found[2]["new"] == {"id": "1", "note": "two\nlines\n\n"}
        assert found[5]["new"] == {"id": "\\x000a", "note": None}

    @pytest.mark.parametrize(
        "line",
        ["{}", "\\x{}", "  {}  ", "0/10|7|\\x{}", " 0/10 | 7 | \\x{}", "0/10\t7\t\\\\x{}", "0/10,7,\\x{}", '"\\x{}"'],
    )
    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_hexadecimal_as_psql_prints_it(self, written: Callable[[bytes], Path], output: Output, line: str, end: str) -> None:
        rows = [line.format(encode(message).hex()) for message in TRANSACTION]
        text = end.join(["# a comment", "", " lsn  | xid | data ", "------+-----+------", *rows, "(7 rows)", ""])
        run(written(text.encode()), "--format", "json")
        assert output.kinds() == KINDS

    def test_frames(self, written: Callable[[bytes], Path], output: Output) -> None:
        frames = [
            encode_frame(XLogData(Lsn(0), Lsn(0), 0, encode(T))),
            encode_frame(PrimaryKeepalive(Lsn(0x30), 0, True)),
            encode_frame(StandbyStatusUpdate(Lsn(3), Lsn(2), Lsn(1), 0, False)),
            encode_frame(XLogData(Lsn(0x40), Lsn(0x40), 0, encode(TRANSACTION[2]))),
        ]
        path = written(length_prefixed(frames))
        run(path, "--frames")
        time = "2000-01-01T00:00:00.000000+00:00"
        found = output.lines()
        assert found[0].startswith("relation relation_id=5 public.t ")
        assert found[0].endswith(" wal_start=0/0")
        assert found[1:3] == [
            f"primary keepalive end_lsn=0/30 send_time={time} reply_requested=true",
            f"standby status update write=0/3 flush=0/2 apply=0/1 send_time={time} reply_requested=false",
        ]
        assert found[3] == "insert relation_id=5 public.t new=(id='1' note='two\\nlines\\n\\n') wal_start=0/40"

    def test_standard_input(self, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(hexadecimal(TRANSACTION))))
        run("-", "--format", "json")
        assert output.kinds() == KINDS

    def test_empty_file(self, written: Callable[[bytes], Path], output: Output) -> None:
        assert run(written(b"")) == 0
        assert output.lines() == []

    def test_capture_that_begins_in_the_middle(self, written: Callable[[bytes], Path], output: Output) -> None:
        run(written(hexadecimal([TRANSACTION[2]])), "--format", "text")
        assert output.lines() == ["insert relation_id=5 new=(1='1' 2='two\\nlines\\n\\n')".replace("1=", '"1"=').replace("2=", '"2"=')]


class TestDamage:
    def damaged(self, path: str | Path, *arguments: str) -> SubscriberError:
        with pytest.raises(SubscriberError) as raised:
            run(path, "--format", "json", *arguments)
        assert "\n" not in raised.value.one_line()
        assert "secret" not in raised.value.one_line()
        return raised.value

    def test_bad_message(self, written: Callable[[bytes], Path], output: Output) -> None:
        bad = encode(Insert(5, TupleData(b"tt", [b"secret", b"secret"])))[:-1]
        path = written(b"# capture\n" + hexadecimal(TRANSACTION[:2]) + bad.hex().encode() + b"\n" + hexadecimal(TRANSACTION[3:]))
        error = self.damaged(path)
        assert isinstance(error, ProtocolError)
        assert (error.tag, error.offset) == ("I", len(bad))
        assert f"in message 'I' at offset {len(bad)}; in {path}, line 4" in error.one_line()
        assert output.kinds() == KINDS[:2]

    def test_bad_message_of_pg_recvlogical_is_found_where_it_is(self, written: Callable[[bytes], Path], output: Output) -> None:
        bad = b"I\0\0\0\5Xsecret"
        path = written(b"".join(encode(message) + b"\n" for message in TRANSACTION[:2]) + bad + b"\n" + b"more\n" * 3)
        error = self.damaged(path)
        assert isinstance(error, ProtocolError)
        assert (error.tag, error.offset) == ("I", 5)
        assert "record 3 at byte" in error.one_line()
        assert output.kinds() == KINDS[:2]

    @pytest.mark.parametrize("cut", [1, 3, 6])
    def test_file_that_ends_within_a_record(self, written: Callable[[bytes], Path], output: Output, cut: int) -> None:
        whole = length_prefixed([encode(message) for message in TRANSACTION[:2]])
        path = written(whole + length_prefixed([encode(TRANSACTION[2])])[:cut])
        assert f"the file ends within record 3 at byte {len(whole)}; in {path}" in self.damaged(path).one_line()
        assert output.kinds() == KINDS[:2]

    def test_file_of_pg_recvlogical_that_ends_within_a_record(self, written: Callable[[bytes], Path], output: Output) -> None:
        path = written(b"".join(encode(message) + b"\n" for message in TRANSACTION[:3])[:-4])
        assert "the file ends within record 3" in self.damaged(path).one_line()
        assert output.kinds() == KINDS[:2]

    @pytest.mark.parametrize("line", [b"secret", b"4g", b"424", b"\\x42 43", b"(3 secrets)"])
    def test_line_that_is_not_hexadecimal(self, written: Callable[[bytes], Path], output: Output, line: bytes) -> None:
        path = written(hexadecimal(TRANSACTION[:1]) + line + b"\n")
        error = self.damaged(path)
        assert isinstance(error, ConfigurationError)
        assert "line 2 is not hexadecimal" in error.one_line()
        assert output.kinds() == KINDS[:1]

    def test_bad_frame(self, written: Callable[[bytes], Path]) -> None:
        error = self.damaged(written(length_prefixed([b"x\0\0\0"])), "--frames")
        assert "unknown CopyData from the walsender in message 'x' at offset 0" in error.one_line()

    def test_no_such_file(self, tmp_path: Path) -> None:
        assert "No such file" in self.damaged(tmp_path / "missing").one_line()

    def test_directory(self, tmp_path: Path) -> None:
        assert "Is a directory" in self.damaged(tmp_path).one_line()

    def test_pg_recvlogical_has_no_frames(self, written: Callable[[bytes], Path]) -> None:
        assert "without their frames" in self.damaged(written(b""), "--frames", "--input", "pg_recvlogical").one_line()


class TestAnyMessage:
    @given(message=outside_streams | inside_streams, known=st.booleans())
    def test_is_one_line(self, message: Message, known: bool) -> None:
        relations: dict[int, Relation] = {}
        if known and isinstance(message, Insert):
            relations[message.relation_id] = T
        line = wire_line(message, relations)
        written = json_line(line)
        written.encode()
        found: dict[str, Any] = json.loads(written)
        assert found["kind"] == line["kind"]
        text = text_line(line)
        text.encode()
        assert text.isprintable()
        assert text.startswith(str(line["kind"]))

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.binary(max_size=200))
    def test_any_file_gives_lines_or_an_error(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "capture"
        path.write_bytes(data)
        for arguments in ([], ["--frames"], ["--input", "length"], ["--input", "hex"], ["--input", "pg_recvlogical"]):
            with contextlib.suppress(SubscriberError):  # and nothing else
                assert run(path, *arguments) == 0
