"""A query keeps its columns, while types of the table's are widened: it gets no value that is another one than the publisher's."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.reading import change_feed as changes_module
from subscriber.sinks.spark.reading.change_feed import Changes
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import land, relation
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

pytestmark = pytest.mark.slow


def values(changes: Changes, schema: pa.Schema, start: int, end: int) -> list[Any]:
    pieces = changes.pieces(Lsn(start), Lsn(end))
    return [value for piece in pieces for rows in changes.read(piece, schema) for value in rows["v"].to_pylist()]


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize(
    ("oid", "text", "wider", "later"),
    [
        (1082, "2024-01-01", 1114, "2024-01-02 13:14:15"),
        (700, "1", 701, "0.123456789012345"),
        (21, "1", 23, "1"),
        (23, "1", 25, "hush"),
        (1016, "{1}", 1009, "{hush}"),
    ],
)
async def test_query_ends_at_values_that_its_types_cannot_hold(
    tmp_path: Path, oid: int, text: str, wider: int, later: str, logged: bool
) -> None:
    sink, work = await begun(make(tmp_path)), applier(tmp_path)

    def tidied() -> None:
        if logged:
            all_rounds(work)
            work.tidy(now=True)

    await land(sink, 200, relation("d", ("id", 23, True), ("v", oid, False)), Insert(5, row("1", text)))
    tidied()
    changes = Changes(storage(tmp_path), TABLE)
    schema = changes.schema()
    before = values(changes, schema, 0, 200)
    await land(sink, 300, relation("d", ("id", 23, True), ("v", wider, False)), Insert(5, row("2", later)))
    await sink.close()
    tidied()
    with pytest.raises(TargetError, match=r'column "v" of table "public\.t" is of another type') as refused:
        values(changes, schema, 200, 300)
    assert "hush" not in "".join(traceback.format_exception(refused.value))
    # what is older than the types of now is read, whether the log has it or not
    again = changes.schema()
    found = values(changes, again, 0, 300)
    assert len(found) == 2
    assert found == pa.array(found, again.field("v").type).to_pylist()
    if not logged:
        assert values(changes, schema, 0, 200) == before


async def test_a_query_that_starts_again_has_the_types_of_what_is_landed(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path)), applier(tmp_path)
    await land(sink, 200, relation("d", ("id", 23, True), ("v", 23, False)), Insert(5, row("1", "1")))
    all_rounds(work)
    work.tidy(now=True)
    await land(sink, 300, relation("d", ("id", 23, True), ("v", 25, False), ("w", 23, False)), Insert(5, row("2", "x", "1")))
    await sink.close()
    changes = Changes(storage(tmp_path), TABLE)
    landed = changes.schema()
    assert values(changes, landed, 0, 300) == ["1", "x"]
    assert landed.names[-3:] == ["id", "v", "w"]
    all_rounds(work)
    work.tidy(now=True)
    assert changes.schema() == landed
    assert values(changes, landed, 0, 300) == ["1", "x"]


async def test_what_arrow_says_of_values_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> pa.Table:
        raise pa.ArrowInvalid("Failed to parse string: 'hush'")

    sink = await begun(make(tmp_path))
    await land(sink, 200, relation("d", ("id", 23, True), ("v", 25, False)), Insert(5, row("1", "hush")))
    await sink.close()
    changes = Changes(storage(tmp_path), TABLE)
    monkeypatch.setattr(changes_module, "conformed", refuse)
    with pytest.raises(TargetError, match="Arrow cannot compute") as refused:
        values(changes, changes.schema(), 0, 200)
    assert "hush" not in "".join(traceback.format_exception(refused.value))
