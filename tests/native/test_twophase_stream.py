"""Prepared transactions that were streamed before (native's topic 023)."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.twophase import prepared_and_ended

pytestmark = pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")


@pytest.mark.parametrize("streaming", [pytest.param("on", marks=pytest.mark.matrix), pytest.param("parallel", marks=pytest.mark.endurance)])
async def test_prepared_and_ended(nodes_native16: Nodes, streaming: str) -> None:
    await prepared_and_ended(nodes_native16, streaming)
