"""What a server serves."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiohttp.web import AbstractRouteDef
    from prometheus_client.registry import Collector

__all__ = ["Site", "worked"]

_log = logging.getLogger(__name__)


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


async def worked(site: Site) -> str | None:
    """Let a site look at the servers, until cancelled. An error that it does not expect is a defect: it ends this, and is returned."""
    try:
        await site.work()
    except Exception as error:  # noqa: BLE001 -- replication continues, whatever it is
        # not its text, which may have values
        place = traceback.extract_tb(error.__traceback__)[-1]
        defect = f"{type(error).__name__} in {place.filename}:{place.lineno}"
        _log.error("the page and the metrics show old values from now on, replication continues: %s", defect)
        return defect
    return None
