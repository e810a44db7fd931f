import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import TargetError
from subscriber.interfaces import CopyFormat, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog import lake as catalog
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from tests.unit.sinks.spark.stream import TABLE, begun, make, run


def test_lake_made_between_read_and_listing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open(Location(path=str(tmp_path)))
    listed = Storage.entries

    def entries(self: Storage, directory: str) -> list[str]:
        if not (tmp_path / "subscriber.json").exists():
            Lake.make(storage, "s")
        return listed(self, directory)

    monkeypatch.setattr(Storage, "entries", entries)
    found = Lake.find(storage)
    assert found is not None
    assert found.name == "s"


def test_a_table_whose_state_is_uncertain_begins_with_a_certain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SYNCDONE is stored, but the write reports an error. Otherwise a start after a crash would find SYNCDONE at an LSN that was passed."""

    def write(*arguments: Any, **options: Any) -> None:
        write_document(*arguments, **options)
        raise TargetError("the disk reports an error")

    async def body() -> None:
        opened = await begun(make(tmp_path / "lake"), tables=())
        await opened.add_tables([TABLE], TableEntry(TableState.FINISHEDCOPY))
        copying = opened.open_table(TABLE)
        await copying.begin()
        with monkeypatch.context() as patch:
            patch.setattr(catalog, "write_document", write)
            with pytest.raises(TargetError):
                await copying.finish_sync(Lsn(200))
        entry = await copying.begin()
        found = Lake.find(opened.lake.storage)
        assert found is not None
        assert found.table(TABLE).entry == entry
        await copying.close()
        await opened.close()

    run(body())


async def _formatted(path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Copy empty tables in a group, and make them ready one by one. Return the length of all JSON that was formatted meanwhile."""

    async def no_rows() -> AsyncIterator[bytes]:
        for row in list[bytes]():
            yield row

    dumps, lengths = json.dumps, [0]

    def counting(*arguments: Any, **options: Any) -> str:
        text = dumps(*arguments, **options)
        lengths[0] += len(text)
        return text

    tables = [
        PublishedTable(
            name=TableName("public", f"t{number}"), relation_id=number, kind="r", columns=("id",), key_columns=("id",),
            replica_identity="d", row_filters=(), size=0, column_types=(23,), column_modifiers=(-1,),
        )
        for number in range(count)
    ]  # fmt: skip
    names = [table.name for table in tables]
    opened = await begun(make(path), tables=())
    await opened.add_tables(names, TableEntry(TableState.INIT))
    group = opened.open_group()
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", counting)
        await group.begin(names)
        for table in tables:
            await group.copy(table, CopyFormat.TEXT, no_rows())
            await group.finish({table.name: Lsn(200)})
        for name in names:
            await opened.set_ready({name: Lsn(200)})
        await group.close()
    await opened.remove_table(names[0])
    found = Lake.find(opened.lake.storage)
    assert found is not None
    assert found.state == opened.lake.state
    assert {table.entry for table in found.state.tables.values()} == {TableEntry(TableState.READY, Lsn(200))}
    await opened.close()
    return lengths[0]


async def test_states_of_other_tables_are_not_formatted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the work to copy tables grew with the square of their number."""
    few, many = [await _formatted(tmp_path / str(count), monkeypatch, count) for count in (10, 40)]
    assert many < 5 * few
