"""PostgreSQL as a target."""

from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.postgres.subscriptions import PostgresCatalog, observe

__all__ = ["PostgresCatalog", "PostgresSink", "observe"]
