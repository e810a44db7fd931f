"""What tasks leave behind in Spark's Python workers."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from subscriber.sinks.spark.session.jobs import forget_jars


def test_jars_are_not_read_again_and_can_still_be_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar, wheel = tmp_path / "some.jar", tmp_path / "some.whl"
    for path, module in ((jar, "in_the_jar"), (wheel, "in_the_wheel")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{module}.py", "VALUE = 1")
            archive.writestr(f"{module}_later.py", "VALUE = 2")
        monkeypatch.syspath_prepend(str(path))
    assert importlib.import_module("in_the_jar").VALUE == 1
    assert importlib.import_module("in_the_wheel").VALUE == 1
    forget_jars()
    assert str(jar) not in sys.path_importer_cache
    assert str(wheel) in sys.path_importer_cache
    importlib.invalidate_caches()  # as Spark does before the next task
    assert str(jar) not in sys.path_importer_cache
    assert importlib.import_module("in_the_jar_later").VALUE == 2
