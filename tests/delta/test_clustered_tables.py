"""Tables that other writers have clustered, so that only Delta can write them: what engine ``spark`` continues with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from tests.delta.test_engines_on_one_lake import by_the_jar, engine_of
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

WIDER = replace(RELATION, columns=(*RELATION.columns, Column("amount", 1700, (12 << 16 | 2) + 4, False), Column("tags", 1009, -1, False)))


async def test_new_columns_keep_the_clustering(tmp_path: Path, delta: SparkSession) -> None:
    uri = f"delta.`{tmp_path}/tables/public/t`"
    sink = await begun(make(tmp_path))
    end = 100

    async def applied(*messages: Message) -> set[tuple[object, ...]]:
        nonlocal end
        end += 100
        await sink.apply(batch(transaction(end, *messages)))
        await sink.advance(Lsn(end))
        snapshot = all_rounds(Applier(storage(tmp_path), engine_of("spark", delta, tmp_path), ApplierSettings(target_rows=100)))
        assert not snapshot.stopped, snapshot.stopped
        assert snapshot.tables[TABLE].applied == end
        return {(entry[0], entry[1], *entry[4:]) for entry in by_the_jar(delta, tmp_path, snapshot)["t"]}

    await applied(RELATION, *(Insert(5, row(str(number), "a", None)) for number in range(3)))
    delta.sql(f"ALTER TABLE {uri} CLUSTER BY (id)").collect()
    found = await applied(
        Insert(5, row("3", "a", None)),
        WIDER,
        Insert(5, row("4", "b", None, "1.50", "{x,y}")),
        Update(5, None, None, row("1", "c", None, "2.25", None)),
        Delete(5, row("2", None, None, None, None), None),
    )
    assert {entry[:2] for entry in found} == {(0, "a"), (1, "c"), (3, "a"), (4, "b")}
    found = await applied(Update(5, None, None, row("0", "d", None, "3.00", "{z}")))
    assert {(entry[0], *map(str, entry[2:])) for entry in found} == {
        (0, "3.00", "['z']"),
        (1, "2.25", "None"),
        (3, "None", "None"),
        (4, "1.50", "['x', 'y']"),
    }
    await sink.close()
    (told,) = delta.sql(f"DESCRIBE DETAIL {uri}").collect()
    assert told["clusteringColumns"] == ["id"]
    assert {"amount", "tags"} <= {*delta.table(uri).schema.names}
