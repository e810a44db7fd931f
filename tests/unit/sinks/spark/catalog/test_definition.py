"""The stored definition of a lake's subscription."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.sinks.spark.catalog.definition import LakeDefinition, read_definition, write_definition
from tests.support.lakes import storage


@pytest.mark.parametrize("options", [SubscriptionOptions(), SubscriptionOptions(binary=False, origin="none", wal_receiver_timeout=30.0)])
def test_what_is_stored_is_read_again(tmp_path: Path, options: SubscriptionOptions) -> None:
    """The default of wal_receiver_timeout was taken for damage, so that no lake could be created; 30 s became 30 ms."""
    definition = LakeDefinition(enabled=False, conninfo="host=h", options=options)
    write_definition(storage(tmp_path), definition)
    assert read_definition(storage(tmp_path)) == definition
