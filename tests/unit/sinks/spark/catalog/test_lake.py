from pathlib import Path

import pytest

from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage


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
