"""The tables whose owners are checked are those that the program makes in schema ``subscriber``."""

from __future__ import annotations

import re
from pathlib import Path

from subscriber.catalog.schema_trust import TABLES

PACKAGE = Path(__file__).parents[2] / "subscriber"
SOURCES = ("sinks/postgres/catalog/schema.py", "walreceiver/fences/fence_row.py")


def test_all_tables_are_checked() -> None:
    text = "".join((PACKAGE / source).read_text() for source in SOURCES)
    assert set(re.findall(r'CREATE (?:UNLOGGED )?TABLE (?:IF NOT EXISTS )?subscriber\."?(\w+)', text)) == set(TABLES)
