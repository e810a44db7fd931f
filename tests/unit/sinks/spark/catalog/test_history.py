"""Which tables of a lake have a history."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.history import read_histories, write_histories
from subscriber.sinks.spark.files.documents import write_document
from tests.unit.sinks.spark.pipeline.test_applier import storage


def test_histories_are_stored(tmp_path: Path) -> None:
    place, tables = storage(tmp_path), {TableName("public", "t"), TableName("a.b", 'c"d')}
    assert read_histories(place) == frozenset()
    write_histories(place, tables)
    assert read_histories(place) == tables


def test_a_document_of_another_form_is_an_error_until_the_subscriber_starts(tmp_path: Path) -> None:
    """As an earlier version wrote it. Otherwise the table "table.form" would have a history, and public.t would have none."""
    place, tables = storage(tmp_path), {TableName("public", "t")}
    write_document(place, "history.json", {"tables": [{"table": ["public", "t"], "form": "scd2"}]})
    with pytest.raises(TargetError) as found:
        read_histories(place)
    assert re.search(r"history\.json is damaged.*start the subscriber again", found.value.one_line())
    write_histories(place, tables)
    assert read_histories(place) == tables
