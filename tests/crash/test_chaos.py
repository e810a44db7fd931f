"""Each fault of ``make chaos`` that a proxy makes, once, so that none of them rots."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.chaos import forgeries, network
from tests.chaos.environments import Servers, make_environment
from tests.chaos.rounds import Result, Round


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1500)
async def test_each_fault_once(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = Servers.start("postgres18", stack)
        rng, result = random.Random(18), Result()
        async with make_environment("postgres18", servers, rng, tmp_path, rate=15) as environment:
            assert environment.to_target is not None
            faults = [(environment.to_publisher, forgeries.forgery(name, rng)) for name in forgeries.NAMES]
            faults += [(proxy, network.fault(network.POSTGRES, name, rng)) for name in network.POSTGRES for proxy in environment.proxies]
            await Round(environment, rng, result, frozenset()).strike_each(faults)
            assert environment.process.distinct_bad() == [], environment.process.log(10**6)
    assert result.checks["all rows equal"] == 1
