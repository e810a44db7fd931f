"""``subscriber tail`` as a program, on live servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Self

import pytest

from tests.support.database import Database
from tests.support.preloaded import PreloadedProgram
from tests.support.program import environment

TIMEOUT = 30.0
SECOND = ("-c", "wal_receiver_status_interval=1s")


class Tail:
    """The program in a process of its own, read by this loop."""

    program: PreloadedProgram
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    @classmethod
    async def started(cls, *arguments: str) -> Self:
        found, ends = cls(), []
        found.stdout, found.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        for reader in (found.stdout, found.stderr):
            ours, theirs = os.pipe()
            ends.append(theirs)
            await asyncio.get_running_loop().connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), os.fdopen(ours, "rb"))
        found.program = PreloadedProgram(["tail", *arguments], environment(), *ends)
        for end in ends:
            os.close(end)
        return found

    async def communicate(self) -> tuple[int, bytes, bytes]:
        """Its status and all that it writes until its end."""
        output, errors = await asyncio.gather(self.stdout.read(), self.stderr.read())
        status = await asyncio.to_thread(self.program.wait, TIMEOUT)
        return status, output, errors


Start = Callable[..., Awaitable[Tail]]


def made(publisher: Database) -> Database:
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    publisher.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return publisher


@pytest.fixture
def any_source(publisher_db: Database) -> Database:
    """Of the version that the run is for, because the result depends on the protocol."""
    return made(publisher_db)


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    """On 18 alone."""
    return made(publisher18_db)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Tail] = []

    async def run(source: Database | str, *args: str) -> Tail:
        connection = source if isinstance(source, str) else source.conninfo()
        started.append(await Tail.started("--connection", connection, "--publication", "p", *args))
        return started[-1]

    yield run
    for tail in started:
        if tail.program.returncode is None:
            tail.program.kill()
            await tail.communicate()


async def ended(process: Tail) -> tuple[int, list[str], str]:
    """Its status, its lines, what it said on stderr."""
    async with asyncio.timeout(TIMEOUT):
        status, out, err = await process.communicate()
    return status, out.decode("utf-8").splitlines(), err.decode()


async def output(process: Tail) -> list[str]:
    status, lines, err = await ended(process)
    assert (status, err) == (0, "")
    return lines


async def following(source: Database) -> None:
    """Until a walsender streams to us."""
    streaming = (
        "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        " AND pid IN (SELECT active_pid FROM pg_replication_slots WHERE database = current_database())"
    )
    await asyncio.to_thread(source.wait, streaming, 1)


async def lines_of(process: Tail, count: int) -> list[str]:
    async with asyncio.timeout(TIMEOUT):
        return [(await process.stdout.readline()).decode("utf-8") for _ in range(count)]


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


async def test_json_lines_resume_at_the_slots_position(any_source: Database, start: Start) -> None:
    caught_up = ("--slot", "s", "--format", "json", "--until-caught-up")
    assert await output(await start(any_source, *caught_up)) == []
    any_source.execute("INSERT INTO t VALUES (1, E'ü\\n\"'), (2, NULL)")
    any_source.execute("UPDATE t SET id = 3 WHERE id = 1; TRUNCATE t RESTART IDENTITY")
    found = parsed(await output(await start(any_source, *caught_up)))
    xids = [line.pop("xid") for line in found]
    assert xids[:4] == [xids[0]] * 4
    assert xids[4:] == [xids[4]] * 4
    assert xids[0] < xids[4]
    assert [line["kind"] for line in found] == ["begin", "insert", "insert", "commit", "begin", "update", "truncate", "commit"]
    assert found[0].keys() == {"kind", "lsn", "end_lsn", "time"}
    assert found[3] == {**found[0], "kind": "commit"}
    table = {"namespace": "public", "relation": "t"}
    assert found[1] == {"kind": "insert", **table, "new": {"id": "1", "note": 'ü\n"'}}
    assert found[2] == {"kind": "insert", **table, "new": {"id": "2", "note": None}}
    assert found[5] == {"kind": "update", **table, "key": {"id": "1"}, "new": {"id": "3", "note": 'ü\n"'}}
    assert found[6] == {"kind": "truncate", "relations": [table], "cascade": False, "restart_identity": True}
    any_source.execute("INSERT INTO t VALUES (4)")
    again = parsed(await output(await start(any_source, *caught_up)))
    assert [line["new"]["id"] for line in again if line["kind"] == "insert"] == ["4"]


@pytest.mark.publisher(min=15, lacks="two-phase commit in the protocol")
@pytest.mark.matrix
async def test_binary_toast_messages_and_two_phase(any_source: Database, start: Start) -> None:
    any_source.execute("ALTER TABLE t ALTER COLUMN note SET STORAGE EXTERNAL")
    args = ("--slot", "s", "--format", "json", "--messages", "-o", "binary=true", "-o", "two_phase=true", "--until-caught-up")
    await output(await start(any_source, *args))
    any_source.execute("SELECT pg_logical_emit_message(false, 'loose', 'text')")
    any_source.execute("INSERT INTO t VALUES (1, repeat('x', 5000))")
    any_source.execute("BEGIN; UPDATE t SET id = 1; PREPARE TRANSACTION 'it''s'")
    any_source.execute("COMMIT PREPARED 'it''s'")
    found = parsed(await output(await start(any_source, *args)))
    assert [line["kind"] for line in found] == [
        "message",
        *("begin", "insert", "commit"),
        *("begin prepare", "update", "prepare"),
        "commit prepared",
    ]
    assert (found[0]["transactional"], found[0]["prefix"], found[0]["content"]) == (False, "loose", "text")
    assert found[2]["new"] == {"id": "\\x00000001", "note": "\\x" + "78" * 5000}
    assert found[2]["binary"] == ["id", "note"]
    assert found[5]["new"] == {"id": "\\x00000001"}
    assert found[5]["unchanged"] == ["note"]
    assert {line["gid"] for line in (found[4], found[6], found[7])} == {"it's"}


async def test_text_and_names_that_need_care(source: Database, start: Start) -> None:
    source.execute('CREATE TABLE "a\nb" ("the ""key""" int PRIMARY KEY, "表" text)')
    process = await start(source, "--format", "text")
    await following(source)
    source.execute("""INSERT INTO "a\nb" VALUES (1, E'\\x1b[31m it''s \\\\ 表')""")
    source.execute("INSERT INTO t VALUES (1)")
    begin, insert, commit, _, second, _ = await lines_of(process, 6)
    assert begin.startswith("begin xid=")
    assert insert == 'insert public."a\\nb" new=("the \\"key\\""=\'1\' 表=\'\\u001b[31m it\\\'s \\\\ 表\')\n'
    assert commit.startswith("commit xid=")
    assert second == "insert public.t new=(id='1' note=NULL)\n"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_signals_end_it_cleanly(source: Database, start: Start, number: signal.Signals, expected: int) -> None:
    process = await start(source, *SECOND)
    await following(source)
    source.execute("INSERT INTO t VALUES (1)")
    await lines_of(process, 3)
    process.program.send_signal(number)
    assert await ended(process) == (expected, [], "")
    await asyncio.to_thread(source.wait, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)


async def test_until_lsn(source: Database, start: Start) -> None:
    await output(await start(source, "--slot", "s", "--until-caught-up"))
    source.execute("INSERT INTO t VALUES (1)")
    lsn = source.current_lsn()
    source.execute("INSERT INTO t VALUES (2)")
    lines = await output(await start(source, "--slot", "s", "--until-lsn", str(lsn)))
    assert [line for line in lines if line.startswith("insert")] == ["insert public.t new=(id='1' note=NULL)"]


async def test_connection_lost_and_found(source: Database, start: Start) -> None:
    process = await start(source, "--slot", "s", "-c", "wal_retrieve_retry_interval=100ms")
    await following(source)
    source.execute("INSERT INTO t VALUES (1)")
    first = await lines_of(process, 3)
    source.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 's'")
    source.execute("INSERT INTO t VALUES (2)")
    lines = first + await lines_of(process, 3)
    while "id='2'" not in lines[-2]:
        lines += await lines_of(process, 3)  # the first one again: its acknowledgement was lost with the connection
    process.program.send_signal(signal.SIGTERM)
    status, _, err = await ended(process)
    assert status == 0
    assert "terminating connection" in err
    assert "next attempt in" in err


async def test_closed_pipe_ends_it_quietly(source: Database) -> None:
    reading, writing = os.pipe()
    program = [sys.executable, "-m", "subscriber", "tail", "--connection", source.conninfo(), "--publication", "p"]
    process = subprocess.Popen(program, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    try:
        await following(source)
        source.execute("INSERT INTO t VALUES (1)")
        assert (await asyncio.to_thread(os.read, reading, 5)) == b"begin"
        os.close(reading)
        source.execute("INSERT INTO t VALUES (2)")
        _, err = await asyncio.to_thread(process.communicate, timeout=TIMEOUT)
        assert (process.returncode, err) == (0, b"")
    finally:
        process.kill()
        process.wait()


async def test_reader_who_is_slow_does_not_cost_the_connection(source: Database, start: Start) -> None:
    slow = source.conninfo(options="-c wal_sender_timeout=6s")
    process = await start(slow, "--format", "json", *SECOND)
    await following(source)
    pid = source.value("SELECT active_pid FROM pg_replication_slots WHERE database = current_database()")
    source.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 5000) g")
    # without a reader: five megabytes do not fit into a pipe
    began = source.value("SELECT now()::text")
    await asyncio.to_thread(source.wait, f"SELECT now() > '{began}'::timestamptz + interval '12 s'", True)
    assert source.value("SELECT active_pid FROM pg_replication_slots WHERE database = current_database()") == pid
    lines = await lines_of(process, 5002)
    assert [json.loads(line)["new"]["id"] for line in lines[1:-1]] == [str(number) for number in range(1, 5001)]


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (("--publication", "nope"), 1, 'publication "nope" does not exist'),
        (("-o", "copy_dat=true"), 1, 'unrecognized subscription parameter: "copy_dat"'),
        (("-o", "create_slot=false", "--slot", "s"), 1, 'replication slot "s" does not exist'),
        (("--slot", "Bad Name"), 1, 'replication slot name "Bad Name" contains an invalid character'),
        (("--until-lsn", "12"), 2, "invalid input syntax for type pg_lsn"),
    ],
)
async def test_bad_input(source: Database, start: Start, args: tuple[str, ...], status: int, said: str) -> None:
    found, lines, err = await ended(await start(source, *args))
    assert (found, lines) == (status, [])
    assert said in err
    if status == 1:
        assert err.count("\n") == 1
    assert source.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
