"""The PostgreSQL sink."""

from subscriber.sinks.postgres.sink import PostgresSink

__all__ = ["PostgresSink"]
