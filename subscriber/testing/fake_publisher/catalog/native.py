"""The queries of PostgreSQL's own subscriber (subscriptioncmds.c, tablesync.c)."""

from __future__ import annotations

from typing import Final

from subscriber.testing.fake_publisher.results import KnownQuery

__all__ = ["QUERIES"]

QUERIES: Final[tuple[KnownQuery, ...]] = ()
