"""Recordings of real servers (``tests/golden/capture.py``): decoded, checked, and encoded to the same bytes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import pytest

from subscriber.protocol.decoder import Decoder
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import (
    BINARY,
    NULL,
    TEXT,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.recording.file import RecordedSession
from tests.golden.capture import DIRECTORY, VERSIONS, Capture, captures, recording
from tests.golden.capture import read as read_capture

T = TypeVar("T")

ALWAYS = {Begin, Commit, Origin, Relation, Type, Insert, Update, Delete, Truncate}
STREAMED = {StreamStart, StreamStop, StreamCommit, StreamAbort}
TWO_PHASE = {BeginPrepare, Prepare, CommitPrepared, RollbackPrepared}
Options = Mapping[str, str]
CAPTURES = [(version, each) for version in VERSIONS for each in captures(version)]
ALL = [(version, each.name) for version, each in CAPTURES]
SCENARIOS = [(version, each.name, dict(each.options.pairs())) for version, each in CAPTURES if each.slot != "stray"]
STRAY = [(version, each.name) for version, each in CAPTURES if each.slot == "stray"]


@cache
def opened(version: int, name: str) -> tuple[RecordedSession, list[bytes]]:
    return read_capture(version, name)


def read(version: int, name: str) -> list[bytes]:
    return opened(version, name)[1]


def decoded(version: int, name: str) -> list[Message]:
    decoder = Decoder()
    return [decoder.decode(payload) for payload in read(version, name)]


def tuples_of(message: Message) -> list[TupleData]:
    match message:
        case Insert(new=new):
            return [new]
        case Update(key=key, old=old, new=new):
            return [data for data in (key, old, new) if data is not None]
        case Delete(key=key, old=old):
            return [data for data in (key, old) if data is not None]
        case _:
            return []


def of_type(kind: type[T], messages: Sequence[object]) -> list[T]:
    return [message for message in messages if isinstance(message, kind)]


def test_directory_holds_exactly_these_recordings() -> None:
    files = [path for path in DIRECTORY.iterdir() if path.suffix not in {".py", ""}]
    assert {*files} == {recording(version, name) for version, name in ALL}
    assert sum(path.stat().st_size for path in files) < 1_000_000


@pytest.mark.parametrize(("version", "capture"), CAPTURES, ids=lambda value: getattr(value, "name", str(value)))
def test_recorded_sessions(version: int, capture: Capture) -> None:
    session, _ = opened(version, capture.name)
    assert session.server_version // 10000 == version
    assert (session.options, session.slot_name) == (dict(capture.options.pairs()), capture.slot)


@pytest.mark.parametrize(("version", "name"), ALL)
def test_encoding_gives_the_same_bytes(version: int, name: str) -> None:
    decoder = Decoder()
    for payload in read(version, name):
        in_stream = decoder.in_stream
        message = decoder.decode(payload)
        assert encode(message) == payload
        if hasattr(message, "xid") and payload[:1] in b"RYIUDTM":
            assert (message.xid is not None) == in_stream
    assert not decoder.in_stream


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_options_give_exactly_these_messages(version: int, name: str, options: Options) -> None:
    expected = set(ALWAYS)
    if "streaming" in options:
        expected |= STREAMED
    if "two_phase" in options:
        expected |= TWO_PHASE
    if "streaming" in options and "two_phase" in options:
        expected |= {StreamPrepare}
    if "messages" in options:
        expected |= {LogicalMessage}
    if options.get("origin") == "none":
        expected -= {Origin}
    assert {type(message) for message in decoded(version, name)} == expected


@pytest.mark.parametrize(("version", "name", "options"), [case for case in SCENARIOS if "streaming" in case[2]])
def test_streamed_blocks(version: int, name: str, options: Options) -> None:
    messages = decoded(version, name)
    inside = [message for message in messages if getattr(message, "xid", None) is not None]
    expected = {Relation, Type, Insert, Update, Delete, Truncate} | ({LogicalMessage} if "messages" in options else set[type]())
    assert expected <= {type(message) for message in inside}
    # subtransactions put their own xid in front, and one of them was rolled back alone
    tops = {start.xid for start in of_type(StreamStart, messages)}
    assert {message.xid for message in of_type(Insert, inside)} - tops
    aborts = of_type(StreamAbort, messages)
    assert any(abort.subxid != abort.xid for abort in aborts)
    # LSN and time of an abort come with parallel streaming, not with protocol 4
    assert {abort.abort_lsn is not None for abort in aborts} == {options["streaming"] == "parallel"}
    assert {abort.abort_time is not None for abort in aborts} == {options["streaming"] == "parallel"}
    # two transactions took turns
    order = [start.xid for start in of_type(StreamStart, messages)]
    assert any(order[i] == order[i + 2] != order[i + 1] for i in range(len(order) - 2))
    assert any(start.first_segment for start in of_type(StreamStart, messages))
    assert any(not start.first_segment for start in of_type(StreamStart, messages))
    if options.get("origin") != "none":
        starts = [i for i, message in enumerate(messages) if isinstance(message, StreamStart)]
        assert any(isinstance(messages[i + 1], Origin) for i in starts)


@pytest.mark.parametrize("version", [version for version, name in STRAY if name == "stray-proto4-parallel"])
def test_empty_blocks_of_an_aborted_transaction_before_18(version: int) -> None:
    messages = decoded(version, "stray-proto4-parallel")
    empty = [i for i, message in enumerate(messages[:-1]) if isinstance(message, StreamStart) and isinstance(messages[i + 1], StreamStop)]
    assert bool(empty) == (version < 18)


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_rows(version: int, name: str, options: Options) -> None:
    messages = decoded(version, name)
    kinds = {kind for message in messages for data in tuples_of(message) for kind in data.kinds}
    assert kinds == {NULL, UNCHANGED, TEXT} | ({BINARY} if "binary" in options else set[int]())
    updates, deletes = of_type(Update, messages), of_type(Delete, messages)
    assert {(change.key is not None, change.old is not None) for change in updates} == {(False, False), (True, False), (False, True)}
    assert {(change.key is not None, change.old is not None) for change in deletes} == {(True, False), (False, True)}
    # a key has placeholders for the columns that do not belong to it
    assert any(change.key is not None and NULL in change.key.kinds for change in deletes)


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_relations(version: int, name: str, options: Options) -> None:
    messages = decoded(version, name)
    relations = {relation.name: relation for relation in of_type(Relation, messages)}
    assert {relation.replica_identity for relation in relations.values()} == {"d", "n", "f", "i"}
    assert all(relation.namespace == "public" for relation in relations.values())
    assert [(column.name, column.key) for column in relations["Größe – 表"].columns] == [("ключ", True), ('a "quoted" name', False)]
    assert [column.name for column in relations["wide"].columns] == ["id"]  # a column list
    assert all(column.key for column in relations["full_identity"].columns)
    by_name = {column.name: column for column in relations["types"].columns}
    assert (by_name["exact"].type_oid, by_name["exact"].type_modifier) == (1700, (20 << 16 | 5) + 4)
    # a Type message came before each Relation that uses an enum, and its column refers to it
    moods = [found for found in of_type(Type, messages) if found.name == "mood"]
    assert {found.type_oid for found in moods} == {by_name["feeling"].type_oid}
    # each row belongs to a relation seen before, and has its number of columns
    widths: dict[int, int] = {}
    for message in messages:
        if isinstance(message, Relation):
            widths[message.relation_id] = len(message.columns)
        for data in tuples_of(message):
            assert isinstance(message, Insert | Update | Delete)
            assert len(data.values) == widths[message.relation_id]


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_truncates(version: int, name: str, options: Options) -> None:
    truncates = of_type(Truncate, decoded(version, name))
    found = {(message.options, len(message.relation_ids)) for message in truncates}
    both = TruncateOption.CASCADE | TruncateOption.RESTART_IDENTITY
    assert found == {(TruncateOption(0), 1), (both, 2), (TruncateOption.RESTART_IDENTITY, 2)}


@pytest.mark.parametrize(("version", "name", "options"), [case for case in SCENARIOS if "messages" in case[2]])
def test_logical_messages(version: int, name: str, options: Options) -> None:
    found = {message.prefix: message for message in of_type(LogicalMessage, decoded(version, name))}
    assert {prefix: (message.transactional, message.content) for prefix, message in found.items()} == {
        "transactional": (True, b"\x00\xff"),
        "at once": (False, b"text"),
        "in a stream": (True, b"content"),
        "out of the stream": (False, b"content"),
    }
    assert found["out of the stream"].xid is None
    assert (found["in a stream"].xid is not None) == ("streaming" in options)


@pytest.mark.parametrize(("version", "name", "options"), [case for case in SCENARIOS if "two_phase" in case[2]])
def test_prepared_transactions(version: int, name: str, options: Options) -> None:
    messages = decoded(version, name)
    prepares = {message.gid: message for message in messages if isinstance(message, Prepare | StreamPrepare)}
    assert set(prepares) == {"small, committed", "small, rolled back", "large, committed ü", "large, rolled back"}
    commits, rollbacks = of_type(CommitPrepared, messages), of_type(RollbackPrepared, messages)
    assert {message.gid for message in commits} == {"small, committed", "large, committed ü"}
    assert {message.gid for message in rollbacks} == {"small, rolled back", "large, rolled back"}
    for ended in commits:
        assert prepares[ended.gid].xid == ended.xid
        assert prepares[ended.gid].end_lsn <= ended.commit_lsn < ended.end_lsn
    for undone in rollbacks:
        assert undone.prepare_end_lsn == prepares[undone.gid].end_lsn
        assert undone.prepare_time == prepares[undone.gid].prepare_time
    for begin in of_type(BeginPrepare, messages):
        assert begin.end_lsn == prepares[begin.gid].end_lsn


@pytest.mark.parametrize(("version", "name", "options"), SCENARIOS)
def test_positions(version: int, name: str, options: Options) -> None:
    messages = decoded(version, name)
    begin = None
    for message in messages:
        if isinstance(message, Begin):
            begin = message
        elif isinstance(message, Commit):
            assert begin is not None
            assert begin.final_lsn == message.commit_lsn < message.end_lsn
            assert begin.commit_time == message.commit_time > 0
    ends = [message.end_lsn for message in messages if isinstance(message, Commit | StreamCommit | Prepare | StreamPrepare)]
    assert ends == sorted(ends)


@pytest.mark.parametrize(("version", "name"), [case for case in STRAY if case[0] == 18])
def test_the_stray_abort_of_18(version: int, name: str) -> None:
    messages = decoded(version, name)
    assert isinstance(messages[0], StreamAbort)
    assert messages[0].xid != messages[0].subxid
    assert not of_type(StreamStart, messages)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version < 18])
def test_no_stray_abort_before_18(version: int) -> None:
    assert not of_type(StreamAbort, decoded(version, "stray-proto1"))
