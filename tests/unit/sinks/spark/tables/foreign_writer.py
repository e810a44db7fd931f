"""Another writer of a lake's tables, as tests play it; and a second table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from subscriber.errors import SubscriberError
from subscriber.interfaces import TableName
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from tests.unit.sinks.spark.pipeline.test_applier import storage

OTHER = Relation(6, "public", "other", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
OTHER_NAME = TableName("public", "other")


def commit(path: Path, *actions: dict[str, Any]) -> int:
    """Commit as a writer that delta-rs is not."""
    version = DeltaTable(str(path / "tables/public/t")).version() + 1
    log = path / "tables/public/t/_delta_log"
    (log / f"{version:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return version


def protocol(*features: str) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly", "invariants", *features]}}


def reader_protocol(*features: str) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": [*features], "readerFeatures": [*features]}}


class Maintained(LocalEngine):
    """Another writer commits between the plan of a round and its commits."""

    def __init__(self, path: Path, between: Callable[[], None]) -> None:
        super().__init__(storage(path))
        self.between = between

    def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
        found = super().run(units)
        self.between()
        return found
