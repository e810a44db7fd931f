"""Actions of the page of ``run --http``, without a target."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from subscriber.cli.http.actions import Actions
from subscriber.config import Settings
from tests.support.observation import until

TOKEN = "a-token-of-enough-letters"


class NeverStops:
    """A configuration file with a subscription that waits for its target."""

    def target_of(self, _name: str) -> str | None:
        return "sqlite:///x"

    def held(self, _name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def runs(self, _name: str) -> bool:
        return True


async def test_action_on_a_subscription_that_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that such an action waited without a limit."""
    monkeypatch.setattr("subscriber.cli.http.actions._STOP_SECONDS", 0.1)
    actions = Actions(Settings(), TOKEN, list, set(), NeverStops())
    application = web.Application()
    application.router.add_post("/api/action", actions.answer)
    async with TestClient(TestServer(application)) as client:
        wanted = {"subscription": "copy", "action": "resync", "table": "public.t"}
        answer = await client.post("/api/action", json=wanted, headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status == 202
        await until(lambda: actions.log[0]["state"] != "running", "the end of the action")
    assert actions.log[0]["state"] == "failed"
    assert actions.log[0]["error"]["text"] == 'subscription "copy" has not stopped within 0.1 s, so it was not altered'
