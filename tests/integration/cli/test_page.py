"""run --http: the page's JSON, its actions, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from subscriber import SubscriptionOptions, drop_subscription
from tests.integration.cli.test_metrics import probe, scrape, told_port
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up, create
from tests.support.program import running, subscriber

TOKEN = "a-token-of-enough-letters"
SECRET = "value-of-a-row"


def ask(port: int, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), given)
        answer = connection.getresponse()
        assert answer.getheader("Content-Security-Policy", "").startswith("default-src 'none'")
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def ask_raw(port: int, request: bytes) -> bytes:
    """The beginning of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(request)
        return connection.recv(12, socket.MSG_WAITALL)


def overview(port: int) -> dict[str, Any]:
    return dict(json.loads(ask(port, "/api/overview")[1]))


def until(port: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS
    while not wanted(found := overview(port)):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


async def test_page_and_actions(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(synchronous_commit="on"))
    token = tmp_path / "token"
    missing = subscriber("run", "--target", target_db.dsn, "--http", "127.0.0.1:0", "--http-token-file", str(token))
    assert (missing.status, len(missing.errors.splitlines())) == (1, 1)
    token.write_text(TOKEN)
    arguments = ("-v", "--http", "127.0.0.1:0", "--http-token-file", str(token), "-c", "wal_retrieve_retry_interval=200ms")
    with running("run", "--target", target_db.dsn, *arguments) as program:
        port = told_port(program)
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        for path, kind in (("/", "<!doctype html>"), ("/page.css", ":root"), ("/page.js", '"use strict"')):
            status, text = ask(port, path)
            assert status == 200
            assert text.startswith(kind)
        assert ask(port, "/other")[0] == 404
        known = until(port, lambda found: any(one.get("slot") for one in found["subscriptions"]))
        (found,) = known["subscriptions"]
        assert (found["name"], found["running"], found["streaming"], sum(found["tables"].values())) == (name, True, True, 1)
        tables = json.loads(ask(port, f"/api/tables?subscription={urllib.parse.quote(name)}&search=public.T&offset=x")[1])
        assert [(row["table"], row["rows"], row["bytes"]) for row in tables["rows"]] == [("public.t", 1, 0)]
        assert tables["rows"][0]["copied_bytes"] > 0
        assert ask(port, "/api/tables?subscription=other")[0] == 404
        _refused_requests(port, name)
        allowed = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
        same = {"Origin": f"http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-origin"}
        assert ask(port, "/api/action", {"subscription": name, "action": "disable"}, **allowed, **same)[0] == 202
        found = until(port, lambda found: bool(found["log"]) and found["log"][0]["state"] == "done")
        assert target_db.fetch("SELECT subenabled FROM subscriber.pg_subscription") == [(False,)]
        assert probe(port, "readyz")[0] == 503
        assert ask(port, "/api/action", {"subscription": name, "action": "enable"}, **allowed)[0] == 202
        until(port, lambda found: any(one["running"] and one["streaming"] for one in found["subscriptions"]))
        # an action that fails
        wrong = {"subscription": name, "action": "skip", "lsn": "0/1"}
        assert ask(port, "/api/action", wrong, **allowed)[0] == 202
        found = until(port, lambda found: found["log"][0]["state"] == "failed")
        assert "skip WAL location" in found["log"][0]["error"]["text"]
        until(port, lambda found: any(one["running"] and one["streaming"] for one in found["subscriptions"]))
        # a refused row: its remedy, not its value
        target_db.execute("ALTER TABLE t ADD CHECK (id < 100)")
        publisher18_db.execute(f"INSERT INTO t VALUES (100, '{SECRET}')")
        found = until(port, lambda found: any(one.get("retry") and one["error"] for one in found["subscriptions"]))
        error = found["subscriptions"][0]["error"]
        assert "violates check constraint" in error["text"]
        assert "constraint" in error["remedy"]
        assert found["subscriptions"][0]["failing"]
        everything = json.dumps(found) + ask(port, "/metrics")[1] + probe(port, "readyz")[1]
        assert SECRET not in everything
        assert "password" not in everything
        assert TOKEN not in everything
        assert scrape(port)["subscriber_retry_attempt", ("ApplyError", "23514")] >= 1
        skip = {"subscription": name, "action": "skip", "lsn": error["finish_lsn"]}
        assert ask(port, "/api/action", skip, **allowed)[0] == 202
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        _misbehaving_clients(port)
        publisher18_db.execute("INSERT INTO t VALUES (3, 'c')")
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
        program.send(signal.SIGTERM)
        done = program.ended()
        assert done.status == 0
    assert "Traceback" not in program.errors
    await drop_subscription(name, target=target_db.dsn)


def _refused_requests(port: int, name: str) -> None:
    action = {"subscription": name, "action": "disable"}
    right = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
    assert ask(port, "/api/action")[0] == 405
    assert ask(port, "/api/action", action, Content_Type="application/json")[0] == 401
    assert ask(port, "/api/action", action, **{**right, "Authorization": "Bearer wrong"})[0] == 401
    assert ask(port, "/api/action", action, **{**right, "Authorization": "Bearer \xff"})[0] == 401
    assert ask(port, "/api/action", action, **{**right, "Content_Type": "text/plain"})[0] == 403
    assert ask(port, "/api/action", action, **right, Origin="https://evil.example")[0] == 403
    assert ask(port, "/api/action", action, **right, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(port, "/api/action", {"subscription": name, "action": "drop"}, **right)[0] == 400
    assert ask(port, "/api/action", {"subscription": "x" * 100_000, "action": "disable"}, **right)[0] in {400, 413}
    assert overview(port)["log"] == []
    hosts = {"evil.example": 421, "evil.example:9187": 421, "127.0.0.1.evil.example": 421, f"LOCALHOST:{port}": 200, "[::1]:9187": 200}
    assert {host: ask(port, "/api/overview", Host=host)[0] for host in hosts} == hosts
    assert ask(port, "/api/overview", Host=socket.gethostname())[0] == 200
    assert ask(port, "/api/action", action, **right, Host="evil.example", Sec_Fetch_Site="same-origin")[0] == 421
    status, text = ask(port, "/", Host="evil.example")
    assert (status, text.count("\n")) == (421, 1)
    assert ask(port, "/metrics", Host="evil.example")[0] == ask(port, "/readyz", Host="evil.example")[0] == 200


def _misbehaving_clients(port: int) -> None:
    """A hundred clients at once, and more connections that send or read nothing than the server keeps."""
    with ThreadPoolExecutor(100) as pool:
        assert ask_raw(port, b"\x16\x03\x01\x02\x00\x01\x00") == b"HTTP/1.0 400"  # TLS
        assert ask_raw(port, b"GET /?" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n") == b"HTTP/1.0 400"
        assert {status for status, _ in pool.map(lambda _: ask(port, "/api/overview"), range(300))} == {200}
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        for number, each in enumerate(idle):
            # some send nothing, some a part of a request, and some read nothing of the answer
            each.sendall([b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"][number % 3])
        idle[0].settimeout(WAIT_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # the oldest ends
        assert scrape(port)["subscriber_streaming", ()] == 1
    finally:
        for each in idle:
            each.close()


def _shows(found: dict[str, Any], **values: object) -> bool:
    return any(all(one[key] == value for key, value in values.items()) for one in found["subscriptions"])


async def test_actions_with_a_configuration_file(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    publisher18_db.execute(
        "CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION own FOR TABLE u; INSERT INTO u VALUES (1, 'a'), (2, 'b')"
    )
    created, own = await create(publisher18_db, target_db), f"own_{publisher18_db.name}"
    file = tmp_path / "subscriber.toml"
    file.write_text(
        'http = "127.0.0.1:0"\n[targets.copy]\nurl = "env:TARGET"\nlauncher = true\n'
        f'[subscriptions.{own}]\nconnection = "env:PUBLISHER"\npublications = ["own"]\ntarget = "copy"\n'
    )
    env = {"TARGET": target_db.dsn, "PUBLISHER": publisher18_db.dsn, "SUBSCRIBER_HTTP_TOKEN": TOKEN}
    with running("-v", "run", f"--config={file}", env=env) as program:
        port = told_port(program)

        def act(name: str, action: str, **more: str) -> tuple[int, str]:
            given = {"Authorization": f"Bearer {TOKEN}", "Content_Type": "application/json"}
            return ask(port, "/api/action", {"subscription": name, "action": action, **more}, **given)

        found = until(port, lambda found: len(found["subscriptions"]) == 2 and all(each["can"] for each in found["subscriptions"]))
        assert {each["name"]: each["can"] for each in found["subscriptions"]} == {
            created: ["enable", "disable", "resync", "skip", "pause"],
            own: ["resync", "skip", "pause"],
        }
        assert act(own, "disable")[0] == 403
        assert act("none", "disable")[0] == 404
        target_db.wait("SELECT count(*) FROM u", 2)
        until(port, lambda found: all(each["state"] == "running" for each in found["subscriptions"]))
        target_db.execute("UPDATE u SET v = 'changed' WHERE id = 1")
        assert act(own, "resync", table="public.u")[0] == 202
        target_db.wait("SELECT v FROM u WHERE id = 1", "a")
        for name, table in ((own, "u"), (created, "t")):
            assert act(name, "resume")[0] == 403
            assert act(name, "pause")[0] == 202
            found = until(port, partial(_shows, name=name, state="paused"))
            assert [one["can"][-1] for one in found["subscriptions"] if one["name"] == name] == ["resume"]
            publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()", 1)
            publisher18_db.execute(f"INSERT INTO {table} VALUES (9, 'i')")
            if table == "u":  # an action, which stops and starts what runs, does not resume
                assert act(name, "resync", table="public.u")[0] == 202
                until(port, lambda found: found["log"][0]["state"] == "done" and "resync" in found["log"][0]["action"])
            assert target_db.fetch(f"SELECT * FROM {table} WHERE id = 9") == []
            assert act(name, "resume")[0] == 202
            target_db.wait(f"SELECT v FROM {table} WHERE id = 9", "i")
        assert act(created, "disable")[0] == 202
        until(port, lambda found: any(each["name"] == created and not each["running"] for each in found["subscriptions"]))
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    await drop_subscription(created, target=target_db.dsn)
