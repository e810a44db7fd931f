"""A lake's files: names that another program has written, of which none leads out of the lake, and files where directories belong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber import TargetError
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.tables.delta_reader import DeltaReader

NAMES = ["../secret", "tables/../../secret", "/etc/passwd", "a/\0", "file:///etc/passwd", ".."]
USES: dict[str, Callable[[Storage, str], object]] = {
    "read": lambda storage, name: storage.read(name),
    "write": lambda storage, name: storage.write(name, b""),
    "write_new": lambda storage, name: storage.write_new(name, b""),
    "create": lambda storage, name: storage.create(name),
    "files": lambda storage, name: storage.files(name),
    "entries": lambda storage, name: storage.entries(name),
    "sync": lambda storage, name: storage.sync([name]),
    "delete": lambda storage, name: storage.delete([name]),
    "remove_directory": lambda storage, name: storage.remove_directory(name),
    "make_directory": lambda storage, name: storage.make_directory(name),
    "reading": lambda storage, name: storage.reading(name).__enter__(),
    "Delta table": DeltaReader,
}


@pytest.mark.parametrize("use", USES)
def test_names_that_lead_out_of_the_lake(use: str, tmp_path: Path) -> None:
    (tmp_path / "lake/tables").mkdir(parents=True)
    (tmp_path / "secret").write_text("kept")
    storage = Storage.open(Location.of(str(tmp_path / "lake")))
    for name in NAMES:
        with pytest.raises(TargetError, match="names a path outside of the lake"):
            USES[use](storage, name)
    assert {path.name: path.is_dir() or path.read_text() for path in tmp_path.iterdir()} == {"lake": True, "secret": "kept"}


@pytest.mark.parametrize("name", NAMES)
def test_paths_in_documents(name: str) -> None:
    """A manifest, the document of a copy, and of a part of one."""
    with pytest.raises(ValueError, match="inside of the lake"):
        LandedFile.from_json({"id": 1, "path": name, "rows": 1, "size": 1, "schema": {"table": ["a", "b"], "columns": [], "identity": "d"}})


@pytest.mark.parametrize("name", ["landing", "landing/part"])
def test_directory_whose_place_has_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "landing").write_text("")
    with pytest.raises(TargetError) as refused:
        Storage.open(Location(path=str(tmp_path))).make_directory(name)
    assert (type(refused.value), refused.value.hint) == (TargetError, "the lake needs a directory of its own")
