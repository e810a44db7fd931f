"""What a server serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiohttp.web import AbstractRouteDef
    from prometheus_client.registry import Collector

__all__ = ["Site"]


class Site(Protocol):
    """Metrics, the probe of readiness, and further routes. All of it runs in the server's thread."""

    @property
    def collector(self) -> Collector:
        """What ``/metrics`` gives."""
        ...

    def unready(self) -> Sequence[str]:
        """Why ``/readyz`` fails, one line for each reason. Empty: it succeeds."""
        ...

    def routes(self) -> Sequence[AbstractRouteDef]:
        """Further routes."""
        ...

    async def work(self) -> None:
        """Run beside the server, until cancelled."""
        ...
