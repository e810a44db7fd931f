"""The page in headless Chromium: what an operator reads when something is wrong. Skipped where Chromium is not installed."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from subscriber.cli.http.actions import Actions
from subscriber.cli.http.server import ServerThread
from subscriber.cli.http.subscription_site import SubscriptionSite
from subscriber.config import Settings
from subscriber.errors import DataLossError, PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.interfaces import Retry, TableEntry, TableName, TableState, WorkerState
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run_status import Status
from subscriber.subscription.subscription import Subscription
from subscriber.walreceiver.slot_status import SlotObservation

GOOD = SlotObservation(
    publisher_lsn=Lsn(100), active=True, wal_status="reserved", confirmed_flush_lsn=Lsn(90), retained_bytes=56, lag_seconds=None
)
LOST = SlotObservation(
    publisher_lsn=Lsn(100), active=False, wal_status="lost", confirmed_flush_lsn=Lsn(90), retained_bytes=0, lag_seconds=None
)
AWAY = PublisherUnavailable("could not connect to the publisher", hint="check that it runs")
READY = {TableName("public", f"t{number:04d}"): TableEntry(TableState.READY, Lsn(1)) for number in range(3000)}
PARKED = TableEntry(TableState.PARKED, Lsn(9), error="it is <b>refused</b> (hint: fix it)", since=1.0)


class Known(Subscription):
    """One whose status is given."""

    def __init__(self, status: Status, slot: SlotObservation | SubscriberError = GOOD) -> None:
        self._known, self._slot = status, slot

    @property
    def status(self) -> Status:
        return self._known

    async def observe_slot(self) -> SlotObservation:
        if isinstance(self._slot, SubscriberError):
            raise self._slot
        return self._slot


def failing(error: SubscriberError) -> Status:
    retry = Retry(str(error), 12, time.time() + 30)
    return Status(state=WorkerState.RETRYING, retry=retry, latest_error=error, last_error_time=time.time(), tables=dict(READY))


def running(**more: object) -> Status:
    return Status(**{"state": WorkerState.RUNNING, "streaming": True, "tables": dict(READY), "lag_seconds": 0.0, **more})  # type: ignore[arg-type]


class InFile:
    """A configuration file with one subscription."""

    def target_of(self, name: str) -> str | None:
        return "sqlite:///x" if name == "h_paused" else None

    def held(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def runs(self, _name: str) -> bool:
        return False


SUBSCRIPTIONS = {
    "a_well": Known(running()),
    "b_parked": Known(running(tables={**READY, TableName("public", "bad"): PARKED})),
    "c_target": Known(failing(TargetUnavailable("connection refused", hint="start it"))),
    "d_slot": Known(failing(DataLossError("the slot was invalidated", hint="see below")), LOST),
    "e_publisher": Known(failing(AWAY), AWAY),
    "f_window": Known(
        running(state=WorkerState.COPYING, tables={TableName("public", "t"): TableEntry(TableState.INIT)}, copies_begin=time.time() + 7200)
    ),
    "g_limited": Known(running(limited=True)),
}


async def test_what_is_wrong_comes_first_and_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or pytest.skip("Chromium is not installed")
    actions = Actions(Settings(), "a-token-of-enough-letters", list, {"h_paused", "i_dropped"}, InFile())
    site = SubscriptionSite(lambda: SUBSCRIPTIONS, actions)
    server = ServerThread("127.0.0.1", 0, site)
    with caplog.at_level("INFO"):
        server.start()
    port = re.findall(r":(\d+)/metrics", caplog.text)[0]
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--dump-dom"]
    try:
        done = await asyncio.to_thread(
            subprocess.run, [chromium, *arguments, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, check=True, timeout=100
        )
    finally:
        await asyncio.to_thread(server.stop)
    text = html.unescape(re.sub(r"<[^>]*>", "\n", done.stdout.replace("&lt;b&gt;", "[b]")))
    found = [line for line in text.splitlines() if line.strip()]
    cards = re.findall(r'<h2>(\w+)</h2><span class="badge (\w+)">([^<]*)</span>', done.stdout)
    assert cards == [
        ("c_target", "bad", "target away"),
        ("d_slot", "bad", "slot lost"),
        ("e_publisher", "bad", "publisher away"),
        ("b_parked", "warn", "1 table parked"),
        ("f_window", "warn", "waits for copy_window"),
        ("g_limited", "warn", "limited by max_apply_rate"),
        ("h_paused", "warn", "paused"),
        ("a_well", "good", "running"),
    ]
    assert "3 of 8 need attention" in found
    assert any(line.startswith("The target does not answer: attempt 12 failed") for line in found)
    assert any(line.startswith("run `subscriber recover d_slot --target URL`: ") for line in found)
    assert any(line.startswith("it is [b]refused") for line in found)
    assert any(line.startswith("Copies wait for copy_window, which opens at ") for line in found)
    assert done.stdout.count("3,000 ready") >= 3
