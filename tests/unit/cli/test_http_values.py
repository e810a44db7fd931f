"""What the page and the metrics say is computed from counters, and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from subscriber.apply.apply_times import BUCKETS, ApplyTimes
from subscriber.cli.http import actions, serving
from subscriber.cli.http.overview import describe, table_rows
from subscriber.cli.http.sampler import LARGEST, Largest, Point, Sampler, Watched
from subscriber.cli.http.server import ServerThread
from subscriber.cli.http.subscription_site import SubscriptionSite
from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.interfaces import Retry, TableEntry, TableName, TableState
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.subscription.run_status import Status, TableCopy
from subscriber.transaction.model import Transaction
from subscriber.walreceiver.slot_status import SlotObservation

TABLES = [TableName("public", f"t{number:04d}") for number in range(3000)]


def slot(retained: int, *, safe: int | None = 1000, wal_status: str = "extended") -> SlotObservation:
    return SlotObservation(
        publisher_lsn=Lsn(5000),
        active=False,
        wal_status=wal_status,
        confirmed_flush_lsn=Lsn(1000),
        retained_bytes=retained,
        lag_seconds=None,
        safe_wal_size=safe,
    )


def test_slot_is_lost_at_the_rate_of_the_last_ten_minutes() -> None:
    watched = Watched()
    found = []
    for now, observed in ((0, slot(100)), (10, slot(110)), (60, slot(700)), (70, slot(700, safe=None)), (700, slot(700))):
        watched.note_slot(observed, float(now))
        found.append(watched.seconds_until_lost)
    # nothing to compare, too early to tell, 600 bytes in a minute, no limit, it does not grow any more
    assert found == [None, None, 100, None, None]


def test_lag_is_known_while_nothing_is_received() -> None:
    watched = Watched()
    assert watched.lag_bytes(Status()) is None
    watched.note_slot(slot(0), 0.0)
    assert watched.lag_bytes(Status()) == 4000
    assert watched.lag_bytes(Status(flushed=Lsn(2000), publisher_lsn=Lsn(3000))) == 3000


def test_number_of_labels_is_bounded_and_other_never_shrinks() -> None:
    largest, counted = Largest(), dict.fromkeys(TABLES, 1)
    found = largest.of(counted)
    assert len(found) == LARGEST + 1
    other = found["other"]
    assert other == len(TABLES) - LARGEST
    counted[TABLES[-1]] = 1000
    found = largest.of(counted)
    assert next(iter(found)) == str(TABLES[-1])
    assert found["other"] == other
    counted[TABLES[-2]] += 1
    assert largest.of(counted | {TABLES[-3]: 0})["other"] >= other


def test_times_of_batches() -> None:
    times, now = ApplyTimes(), (time.time() - POSTGRES_EPOCH.timestamp()) * 1e6
    for lsn, age in ((10, 0.0), (20, 20.0), (30, 7200.0), (40, -60.0)):
        times.taken(Transaction(xid=1, final_lsn=Lsn(lsn), end_lsn=Lsn(lsn), commit_time=int(now - age * 1e6), prefixed=False, records=[]))
    times.durable(Lsn(9))
    assert sum(times.counts) == 0
    times.durable(Lsn(30))
    assert sum(times.counts) == 3
    assert times.counts[BUCKETS.index(30.0)] == times.counts[-1] == 1
    times.durable(Lsn(50))
    assert sum(times.counts) == 4
    assert 7220 <= times.total < 7230


def test_tables_come_in_pages_with_the_problems_first() -> None:
    entries = {table: TableEntry(TableState.READY, Lsn(1)) for table in TABLES}
    entries[TABLES[7]] = TableEntry(TableState.PARKED, Lsn(9), error="it is refused (hint: fix it)", since=1.0)
    status = Status(
        tables=entries,
        table_retries={TABLES[9]: Retry("no such column", 3, 2.0)},
        left_out={TableName("public", "new\x1b"): "it was published later"},
    )
    found = table_rows(status, search="", problems=False, offset=0, limit=100)
    assert (found["total"], len(found["rows"])) == (3001, 100)
    assert [row["table"] for row in found["rows"][:3]] == ["public.new\\u001b", "public.t0007", "public.t0009"]
    assert table_rows(status, search="", problems=True, offset=0, limit=100)["total"] == 3
    assert table_rows(status, search="T2999", problems=False, offset=0, limit=100)["total"] == 1
    overview = describe("many", status, Watched())
    assert overview["tables"] == {"ready": 2999, "parked": 1, "left out": 1}
    assert overview["parked"][0]["remedy"] == "fix it"
    # what is stored has no hint of its own: it was one of the attempts
    refused = TableEntry(TableState.PARKED, Lsn(9), error="it is refused; in transaction 7", since=1.0)
    for latest, remedy in ((TargetError("it is  refused", hint="drop the constraint"), "drop the constraint"), (None, "fix the cause")):
        shown = describe("one", Status(tables={TABLES[0]: refused}, latest_error=latest), Watched())
        assert shown["parked"][0]["remedy"] == remedy
    parked = Status(tables=dict.fromkeys(TABLES, entries[TABLES[7]]), left_out=dict.fromkeys(TABLES, "x" * 100))
    watched = Watched()
    for number in range(2000):
        watched.points.append(Point(number, number, 1.0, number, number, number, 0, 0))
    assert len(json.dumps(describe("all are parked", parked, watched))) < 40_000


def test_overview_of_a_dead_target_and_of_a_lost_slot() -> None:
    watched = Watched()
    watched.note_slot(slot(10**9, safe=None, wal_status="lost"), 0.0)
    error = TargetUnavailable("the target is away", hint="start it")
    status = Status(retry=Retry("the target is away", 4, time.time() + 1), latest_error=error, last_error_time=time.time())
    found = describe("s", status, watched)
    assert (found["error"]["text"], found["error"]["remedy"], found["error"]["kind"]) == (
        "the target is away",
        "start it",
        "TargetUnavailable",
    )
    assert found["retry"]["attempt"] == 4
    assert found["slot"]["wal_status"] == "lost"
    assert "invalidated" in found["slot"]["danger"]
    assert "`subscriber recover NAME`" in found["slot"]["danger"]


def test_estimate_of_copies() -> None:
    status = Status(tables={TABLES[0]: TableEntry(TableState.DATASYNC)}, copies={TABLES[0]: TableCopy(600, 1000, False)})
    watched = Watched()
    assert describe("s", status, watched)["copies"]["seconds_left"] is None
    watched.points.append(Point(time.time() - 10, 0, 0.0, 0, 0, None, 400, 1))
    assert describe("s", status, watched)["copies"]["seconds_left"] == pytest.approx(20, rel=0.1)
    # three of five tables were copied in ten seconds
    tables = dict.fromkeys(TABLES[:2], TableEntry(TableState.INIT)) | dict.fromkeys(TABLES[2:5], TableEntry(TableState.READY))
    many, watched = Status(tables=tables, copies={TABLES[2]: TableCopy(500, 500, True)}), Watched()
    watched.points.append(Point(time.time() - 10, 0, 0.0, 0, 0, None, 0, 5))
    assert describe("s", many, watched)["copies"]["seconds_left"] == pytest.approx(20 / 3, rel=0.1)


async def test_history_has_no_retained_wal_of_a_lost_slot() -> None:
    sampler = Sampler(dict)
    for state, retained in (("reserved", 10), ("lost", 0)):
        running: Any = SimpleNamespace(status=Status(), observe_slot=partial(asyncio.sleep, 0, slot(retained, safe=None, wal_status=state)))
        await sampler.sample({"s": running})
    assert [point.retained for point in sampler.of("s").points] == [10, None]


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serving.TOKEN_VARIABLE, raising=False)
    assert actions.read_token(None) is None
    monkeypatch.setenv(serving.TOKEN_VARIABLE, "0123456789abcdef")
    assert actions.read_token(None) == "0123456789abcdef"
    file = tmp_path / "token"
    with pytest.raises(ConfigurationError, match=r"cannot read the token in .*No such file"):
        actions.read_token(str(file))
    for content, reason in ((b"", "too short"), (b"short\n", "too short"), (b"\xff" * 20, "not ASCII")):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=reason):
            actions.read_token(str(file))
    file.write_text("a-token-of-enough-letters\n")
    assert actions.read_token(str(file)) == "a-token-of-enough-letters"


@pytest.mark.parametrize("address", ["nowhere", "host:70000", "host:", "host:-1"])
def test_invalid_address(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a valid address for --http"), serving.served(address, None):  # type: ignore[arg-type]
        pass


async def test_start_that_fails_is_reported() -> None:
    site = SubscriptionSite(dict)
    for host, error in (("192.0.2.1", OSError), ("no\x00host", ValueError)):
        with pytest.raises(error):
            ServerThread(host, 0, site).start()
    server = ServerThread("127.0.0.1", 0, site)
    server.start()
    server.stop()


async def test_defect_ends_the_look_at_the_servers_visibly(caplog: pytest.LogCaptureFixture) -> None:
    class Defective(SubscriptionSite):
        async def work(self) -> None:
            raise ZeroDivisionError("value-of-a-row")

    server = ServerThread("127.0.0.1", 0, Defective(dict))
    with caplog.at_level("INFO"):
        server.start()
        port = int(re.findall(r":(\d+)/metrics", caplog.text)[0])

        def get(path: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        status, text = await asyncio.to_thread(get, "/healthz")
        assert (status, "ZeroDivisionError" in text) == (503, True)
        assert (await asyncio.to_thread(get, "/metrics"))[0] == 200
        server.stop()
    assert "show old values from now on, replication continues: ZeroDivisionError in " in caplog.text
    assert "value-of-a-row" not in caplog.text


def test_page_needs_nothing_from_elsewhere_and_reads_nothing_as_html() -> None:
    static = Path(serving.__file__).parent / "static"
    for file in static.iterdir():
        text = file.read_text()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    script = (static / "page.js").read_text()
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in script
    assert "style=" not in (static / "page.html").read_text()  # the Content-Security-Policy does not allow it
