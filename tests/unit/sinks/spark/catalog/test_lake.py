from pathlib import Path
from typing import Any

import pytest

from subscriber.abc import TableEntry, TableState
from subscriber.errors import TargetError
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
