"""The compliance suite over the sink in docs/howto/own-sink.md, exactly as the page shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from subscriber import ConfigurationError, Subscription, SubscriptionOptions, check
from subscriber.testing.compliance import SCENARIOS, Scenario
from tests.support.code_blocks import Block, blocks


def _block(part: str) -> Block:
    (found,) = [block for block in blocks() if block.page == "docs/howto/own-sink.md" and part in block.text]
    return found


def own_sink() -> dict[str, Any]:
    """What the block of the sink defines."""
    names: dict[str, Any] = {}
    exec(_block("class JsonSink(").text, names)
    return names


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_compliance(scenario: Scenario, tmp_path: Path) -> None:
    names = own_sink()
    exec(_block("class JsonTarget").text, names)
    await scenario.run(names["JsonTarget"](tmp_path))


async def test_two_phase_is_refused_before_the_publisher_is_asked(tmp_path: Path) -> None:
    sink = own_sink()["JsonSink"](tmp_path)
    options = SubscriptionOptions(two_phase=True)
    with pytest.raises(ConfigurationError, match=r"^this kind of target cannot hold prepared transactions$"):
        await check("replica", connection="host=/nowhere", publications=["pub"], target=sink, options=options)
    with pytest.raises(ConfigurationError, match=r"^this kind of target cannot hold prepared transactions$"):
        Subscription("replica", connection="host=/nowhere", publications=["pub"], target=sink, options=options)
