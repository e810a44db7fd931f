"""The subscriber of PostgreSQL logical replication."""

__version__ = "0.1.0"
