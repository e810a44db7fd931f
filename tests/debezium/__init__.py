"""Debezium: `make test-debezium` (a JVM and 200 MB)."""
