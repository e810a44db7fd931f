"""PostgreSQL as a target."""

from subscriber.sinks.postgres.observing import observe
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.postgres.subscriptions import PostgresCatalog

__all__ = ["PostgresCatalog", "PostgresSink", "observe"]
