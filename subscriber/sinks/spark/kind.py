"""A lake as a kind of target: see :mod:`subscriber.catalog.target_kind`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

from subscriber.catalog import Catalog, Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Sink
from subscriber.sinks.required_packages import requiring

if TYPE_CHECKING:
    from subscriber.sinks.spark.reading.compared_lake import ComparedLake

__all__ = ["LAKE_NEEDS", "LakeKind"]

LAKE_NEEDS: Final = ("a Spark target", "lake")


class LakeKind:
    """``spark:///path`` and ``spark+…://…``."""

    noun = "a lake"
    repairs = False

    def sink(self, target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool) -> Sink:
        with requiring(*LAKE_NEEDS):
            from subscriber.sinks.spark.sink import SparkSink  # noqa: PLC0415 -- pyarrow comes with an extra
        return SparkSink(target, options=options, settings=settings, defined=defined)

    async def open_catalog(self, target: str, application_name: str) -> Catalog:
        with requiring(*LAKE_NEEDS):
            from subscriber.sinks.spark.catalog.subscriptions import LakeCatalog  # noqa: PLC0415 -- as above
        return await LakeCatalog.open(target)

    async def observe(self, target: str) -> Sequence[Observation]:
        with requiring(*LAKE_NEEDS):
            from subscriber.sinks.spark.catalog.observe import observe  # noqa: PLC0415 -- as above
        return await observe(target)

    @contextlib.asynccontextmanager
    async def compared(self, target: str, name: str, jobs: int) -> AsyncIterator[ComparedLake]:
        with requiring(*LAKE_NEEDS):
            from subscriber.sinks.spark.reading.compared_lake import ComparedLake  # noqa: PLC0415 -- as above
        yield await ComparedLake.open(target, name)
