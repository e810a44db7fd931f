from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from subscriber.errors import TargetError
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.data_file import write_data_file


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open(Location(path=str(tmp_path)))
    storage.make_directory("tables/public/t")

    def write(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", write)
    with pytest.raises(TargetError, match=r"tables/public/t/new\.parquet: no space left"):
        write_data_file(storage, "tables/public/t", "new.parquet", pa.table({"id": [1]}))
    assert list((tmp_path / "tables/public/t").iterdir()) == []
