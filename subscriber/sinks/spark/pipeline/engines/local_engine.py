"""Engine ``local``: units run in threads of this process, with pyarrow, and delta-rs commits. It needs neither Spark nor Java."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from subscriber.errors import SubscriberError
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.engines.engine import Engine, attempt

__all__ = ["LocalEngine"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LocalEngine(Engine):
    """Runs units in threads of this process, so many at once."""

    name = "local"

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self._storage = storage
        self._threads = threads

    def outcomes(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result | SubscriberError]:
        if len(items) <= 1:
            return [attempt(function, self._storage, item) for item in items]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda item: attempt(function, self._storage, item), items))
