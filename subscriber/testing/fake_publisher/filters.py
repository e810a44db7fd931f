"""Row filters of publications."""

from __future__ import annotations

from subscriber.errors import ConfigurationError
from subscriber.testing.fake_publisher.tables import RowValues, TableShape, Types

__all__ = ["passes_filters"]


def passes_filters(shape: TableShape, filters: tuple[str, ...], row: RowValues | None, types: Types) -> bool:
    raise ConfigurationError(f"row filter of {shape.name}: not available")
