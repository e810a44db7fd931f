"""PostgreSQL as a target."""

from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog, observe
from subscriber.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresCatalog", "PostgresSink", "observe"]
