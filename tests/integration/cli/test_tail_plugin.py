"""``subscriber tail --plugin`` as a program."""

from __future__ import annotations

import io
import json
import re

import pytest

from subscriber.consumer.captures import records
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Begin, Commit, Insert, Relation, Type, Update
from tests.integration.cli.test_tail import Start, ended, made, output, start
from tests.support.database import Database

__all__ = ["start"]

DECODING = ("--plugin", "test_decoding", "-p", "skip-empty-xacts")


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    """A table and a publication of all tables."""
    return made(publisher18_db)


async def test_test_decoding(source: Database, start: Start) -> None:
    args = ("--slot", "s", *DECODING, "-o", "two_phase=true", "--until-caught-up")
    assert await output(await start(source, *args)) == []
    source.execute("CREATE TYPE mood AS ENUM ('ok'); CREATE DOMAIN small AS int; CREATE TABLE u (id int PRIMARY KEY, m mood[], s small)")
    source.execute("SELECT pg_logical_emit_message(false, 'loose', 'text')")
    source.execute("INSERT INTO u VALUES (1, '{ok}', 3)")
    source.execute("BEGIN; INSERT INTO t VALUES (1, 'a'); PREPARE TRANSACTION 'held_nodecode'")
    source.execute("BEGIN; INSERT INTO t VALUES (2, 'b'); PREPARE TRANSACTION 'g'")
    held = await output(await start(source, *args))
    lines = [re.sub(r"\b\d{3,}\b", "XID", line) for line in held]
    assert lines == [
        "message: transactional: 0 prefix: loose, sz: 4 content:text",
        *("BEGIN XID", "table public.u: INSERT: id[integer]:1 m[public.mood[]]:'{ok}' s[public.small]:'3'", "COMMIT XID"),
        *("BEGIN XID", "table public.t: INSERT: id[integer]:2 note[text]:'b'", "PREPARE TRANSACTION 'g', txid XID"),
    ]
    # nothing after the held transaction was acknowledged
    again = await output(await start(source, *args))
    assert again == held[-3:]
    source.execute("COMMIT PREPARED 'held_nodecode'")
    source.execute("ROLLBACK PREPARED 'g'")
    last = await output(await start(source, *args))
    assert [re.sub(r"\b\d{3,}\b", "XID", line) for line in last[3:]] == [
        *("BEGIN XID", "table public.t: INSERT: id[integer]:1 note[text]:'a'", "COMMIT XID", "ROLLBACK PREPARED 'g', txid XID")
    ]
    assert await output(await start(source, *args)) == []


async def test_pgoutput_and_debezium(source: Database, start: Start) -> None:
    source.execute("CREATE TYPE mood AS ENUM ('ok'); CREATE TABLE u (id int PRIMARY KEY, m mood)")
    for slot in ("a", "b"):
        await output(await start(source, "--slot", slot, "--until-caught-up"))
    source.execute("INSERT INTO u VALUES (1, 'ok')")
    source.execute("UPDATE u SET m = NULL")
    process = await start(source, "--slot", "a", "--plugin", "pgoutput", "--until-caught-up")
    status, captured, err = await process.communicate()
    assert (status, err) == (0, b"")
    found = [decode(record.data) for record in records(io.BytesIO(captured), "pg_recvlogical", decode)]
    expected = [Begin, Type, Relation, Insert, Commit, Begin, Update, Commit]
    assert [type(message) for message in found] == expected
    lines = await output(await start(source, "--slot", "b", "--plugin", "debezium", "-p", "topic.prefix=x", "--until-caught-up"))
    assert [(event["op"], event["after"]) for event in map(json.loads, lines)] == [
        ("c", {"id": 1, "m": "ok"}),
        ("u", {"id": 1, "m": None}),
    ]


async def test_jsonl_is_the_json_format(source: Database, start: Start) -> None:
    for slot in ("a", "b"):
        await output(await start(source, "--slot", slot, "-o", "two_phase=true", "--until-caught-up"))
    source.execute("INSERT INTO t VALUES (1, 'a'); UPDATE t SET id = 2; TRUNCATE t")
    source.execute("SELECT pg_logical_emit_message(true, 'p', '\\x00'::bytea), pg_logical_emit_message(false, 'q', 'ü')")
    source.execute("BEGIN; INSERT INTO t VALUES (3); PREPARE TRANSACTION 'g'")
    source.execute("COMMIT PREPARED 'g'")
    args = ("-o", "two_phase=true", "--until-caught-up")
    plugin = await output(await start(source, "--slot", "a", "--plugin", "jsonl", *args))
    assert plugin == await output(await start(source, "--slot", "b", "--format", "json", "--messages", *args))
    assert "truncate" in {json.loads(line)["kind"] for line in plugin}


@pytest.mark.parametrize(
    ("table", "insert", "message"),
    [
        (
            "CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
            "g",
            "the generated columns twice of public.g",
        ),
        (
            "CREATE TABLE g (id int PRIMARY KEY) PARTITION BY LIST (id); CREATE TABLE h PARTITION OF g DEFAULT;"
            " ALTER PUBLICATION p SET (publish_via_partition_root)",
            "g",
            "publishes via the root",
        ),
        (
            "CREATE TABLE g (id int PRIMARY KEY, a int); DROP PUBLICATION p; CREATE PUBLICATION p FOR TABLE g (id)",
            "g (id)",
            "has a column list for public.g",
        ),
    ],
)
async def test_what_pgoutput_does_not_send_is_an_error(source: Database, start: Start, table: str, insert: str, message: str) -> None:
    for statement in table.split("; "):
        source.execute(statement)
    await output(await start(source, "--slot", "s", "--until-caught-up"))
    source.execute(f"INSERT INTO {insert} VALUES (1)")
    args = ("--slot", "s", *DECODING, "--until-caught-up")
    for _ in range(2):
        status, lines, err = await ended(await start(source, *args))
        assert (status, lines) == (1, [])
        assert message in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--plugin", "nothing"), 'there is no output plugin "nothing"'),
        (("--plugin", "test_decoding"), "set skip-empty-xacts=on"),
        (("--plugin", "json:dumps"), "cannot be called without arguments"),
        (("--plugin", "test_decoding", "-p", "stream-changes=on", "-o", "streaming=off"), "transactions in progress"),
        (("--plugin", "pgoutput", "-o", "two_phase=true"), "was told by its options to do without two-phase commit"),
        (("-p", "a=b"), "-p needs --plugin"),
        (("--plugin", "jsonl", "--format", "json"), "not allowed with argument"),
    ],
)
async def test_wrong_arguments(source: Database, start: Start, args: tuple[str, ...], message: str) -> None:
    status, lines, err = await ended(await start(source, "--slot", "s", *args, "--until-caught-up"))
    assert status != 0
    assert lines == []
    assert message in err
    assert source.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
